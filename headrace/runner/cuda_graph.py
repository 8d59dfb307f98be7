"""CUDA graphs of steps: whole ones, or the pieces between attention calls, captured when a size is used a second time.
A prompt that runs alone, whole, is captured as one, since all that attention depends on is its size.

The first use of a size runs eagerly, which loads every kernel that the capture will hold; so a start captures nothing
and serving begins at once. A size for which there is no room stays eager. Knows nothing of what the model computes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.runner.graph_settings import GraphSettings
from headrace.runner.input_batch import Batch
from headrace.runner.memory import first_line, is_out_of_memory
from headrace.runner.pending import Notes
from headrace.step import SchedulerOutput

MOST_FAILURES = 3
"""Captures of a kind that may fail for no lack of memory: what is wrong with all of them costs three tries, and what
was wrong with one does not cost all others."""


class Shape(NamedTuple):
    """What a step is padded to, and the key of its graph."""

    kind: str
    """full | piecewise"""
    decode: bool
    """Padding is more decodes; else one request with all of it, and requests without tokens."""
    num_reqs: int
    num_tokens: int
    alone: bool = False
    """One whole prompt, which nothing was computed of before, and one request for the padding."""

    @property
    def size(self) -> str:
        if self.alone:
            return f"a lone prompt of {self.num_tokens} tokens"
        return f"{self.num_reqs} decodes" if self.decode else f"{self.num_tokens} tokens"

    def __str__(self) -> str:
        return f"{self.kind} graph of {self.size}"


class Graph(Protocol):
    """torch.cuda.CUDAGraph, as far as it is used here."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """Where graphs come from. Tests bring a recorder."""

    pool: Any

    def new_graph(self) -> Graph: ...

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        """A stream of its own, with nothing running; entered around all captures of one size."""
        ...

    def used_memory(self) -> int:
        """bytes, of this device"""
        ...

    def give_back(self) -> None:
        """Return cached memory to the device, once what runs has ended."""
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory without keeping it: what is in a graph's pool may be reused by whatever is captured next,
        since replays follow one another."""
        ...


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def new_graph(self) -> Graph:
        return torch.cuda.CUDAGraph()

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        torch.cuda.synchronize(self._device)
        return torch.cuda.stream(self._stream)

    def used_memory(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def borrow(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            return tensor
        memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
        return memory.view(tensor.dtype).view(tensor.shape)


class _Memory:
    """A tensor's bytes, not owned."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


class Forward(Protocol):
    """What the runner lends: both take a batch whose tensors are views at fixed addresses."""

    def forward(self, batch: Batch, cut: Callable[..., Tensor] | None = None) -> tuple[Tensor, AttentionMetadata]:
        """Hidden states [num_tokens, hidden_size] and what attention was told. With `cut`, attention goes through it,
        and nothing else depends on how the batch's tokens are spread over requests."""
        ...

    def metadata(self, batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...]) -> AttentionMetadata:
        """What attention is told of a batch whose inputs are gathered elsewhere."""
        ...


@dataclass(frozen=True)
class _Piece:
    """A graph, and the attention call that follows it."""

    graph: Graph
    attend: Callable[..., Tensor]
    q: Tensor
    kv_cache: Tensor
    rest: tuple[Any, ...]
    out: Tensor


class Cut:
    """Handed to the layers while pieces are captured: at each attention call it ends one graph and begins the next.
    Attention itself is left out, and gives its result in `out` when the pieces are replayed."""

    def __init__(self, device: GraphDevice, buffer: Callable[[Tensor, tuple[int, ...]], Tensor]) -> None:
        self._device = device
        self._buffer = buffer
        self._current: Graph | None = None
        self.pieces: list[_Piece] = []

    def begin(self) -> None:
        graph = self._device.new_graph()
        graph.capture_begin(pool=self._device.pool, capture_error_mode="thread_local")
        self._current = graph

    def end(self) -> Graph:
        assert self._current is not None
        graph, self._current = self._current, None
        graph.capture_end()
        return graph

    def __call__(
        self,
        attend: Callable[..., Tensor],
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *rest: Any,
        shape: tuple[int, ...],
    ) -> Tensor:
        """In place of attend(q, kv_cache, metadata, *rest), which gives # [tokens of q, *shape]."""
        graph = self.end()
        out = self._buffer(q, shape)
        self.pieces.append(_Piece(graph, attend, self._device.borrow(q), kv_cache, rest, out))
        self.begin()
        return out

    def abandon(self) -> None:
        """Leave no capture under way after a failure."""
        if self._current is not None:
            with contextlib.suppress(RuntimeError):  # the failure that led here is the one to tell
                self.end()


@dataclass(frozen=True)
class _Captured:
    """Hidden states come out of the last graph, in memory that is only borrowed; `metadata` is what the capture was
    told, and keeps what the pieces write positions and slots to, which attention reads between their replays."""

    pieces: list[_Piece]
    last: Graph
    hidden: Tensor
    metadata: AttentionMetadata


class StepGraphs:
    """All graphs share one memory pool."""

    def __init__(self, settings: GraphSettings, model: Forward, device: GraphDevice, notes: Notes) -> None:
        self.settings = settings
        self.notes = notes
        self._model = model
        self._device = device
        self._seen: set[Shape] = set()
        self._refused: set[Shape] = set()
        self._failures: Counter[tuple[str, bool]] = Counter()
        """by kind, those of lone prompts apart: captures that failed, but for lack of memory"""
        self._captured: dict[Shape, _Captured] = {}
        self._count: Counter[str] = Counter()
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._decode_shapes = self._lookup(settings.decode, True, settings.decode_sizes, settings.decode_len)
        self._other_shapes = self._lookup(settings.other, False, settings.other_sizes)
        self._alone_sizes = frozenset(settings.alone_sizes)

    @staticmethod
    def _lookup(kind: str, decode: bool, sizes: tuple[int, ...], length: int = 1) -> list[Shape | None]:
        """size -> what it is padded to; a mixed step's number of requests is filled in later"""
        if kind == "none" or not sizes:
            return []
        found: list[Shape | None] = [None] * (sizes[-1] + 1)
        for size in reversed(sizes):
            found[: size + 1] = [Shape(kind, decode, size, size * length)] * (size + 1)
        return found

    def shape_of(self, step: SchedulerOutput) -> Shape | None:
        """What the step is padded to, or None where it runs eagerly.

        A step of decodes is one in which every request runs one token and its drafts, and samples. (A token that
        samples is never one that prompt logprobs are wanted after.)
        """
        num_reqs, num_tokens, length = len(step.rows), step.num_tokens, self.settings.decode_len
        decodes = num_tokens == num_reqs * length and all(step.samples)
        if decodes and (length == 1 or step.num_drafts == [length - 1] * num_reqs):
            return self._decode_shapes[num_reqs] if num_reqs < len(self._decode_shapes) else None
        shape = self._other_shapes[num_tokens] if num_tokens < len(self._other_shapes) else None
        if shape is None or shape.num_tokens - num_tokens > self.settings.max_model_len:
            return None
        if num_reqs == 1 and not step.num_computed_tokens[0] and (alone := self._alone(shape)) is not None:
            return alone
        reqs = num_reqs + 1  # one for the padding tokens
        if shape.kind == "full":
            reqs = min(1 << (reqs - 1).bit_length(), self.settings.max_num_seqs + 1)
        return shape._replace(num_reqs=reqs)

    def _alone(self, shape: Shape) -> Shape | None:
        """What a lone prompt is padded to, or None where pieces serve it better."""
        alone = Shape("full", False, 2, shape.num_tokens, alone=True)
        if alone in self._captured:
            return alone
        if shape.num_tokens not in self._alone_sizes or not self._may_capture(alone):
            return None
        if alone not in self._seen and _pieces_of(shape) in self._captured:  # they load the same kernels
            self._seen.add(alone)
            return None
        return alone

    def _may_capture(self, key: Shape) -> bool:
        return key not in self._refused and self._failures[key.kind, key.alone] < MOST_FAILURES

    def run(self, shape: Shape, batch: Batch) -> Tensor:
        """Hidden states of a batch padded to `shape`; overwritten by the next run, of whatever shape."""
        key = _pieces_of(shape) if shape.kind == "piecewise" else shape
        captured = self._captured.get(key)
        if captured is None:
            if shape.kind == "full":
                batch = _for_any_lengths(batch, shape, self.settings.max_model_len)
            captured = self._try(key, batch)
            if captured is None:
                return self._model.forward(batch, _whole if shape.kind == "piecewise" else None)[0]
        if captured.pieces:
            told = captured.metadata
            metadata = self._model.metadata(batch, told.positions, told.slot_mappings)
            for piece in captured.pieces:
                piece.graph.replay()
                piece.attend(piece.q, piece.kv_cache, metadata, *piece.rest, out=piece.out)
        captured.last.replay()
        return captured.hidden

    def _try(self, key: Shape, batch: Batch) -> _Captured | None:
        """Capture `key` if this is not its first use. Where that fails nothing has run, and the step can run eagerly:
        for lack of memory this size does so from now on; for any other reason it is tried again, but after
        MOST_FAILURES of them all of its kind is left alone."""
        if not self._may_capture(key):
            return None
        if key not in self._seen:
            self._seen.add(key)
            return None
        before = self._device.used_memory()
        said = ""
        for _ in range(2):
            try:
                captured = self._captured[key] = self._capture(key, batch)
            except Exception as error:
                said = first_line(error)
                if not is_out_of_memory(error):
                    self._failed(key, f"{type(error).__name__}: {said}")
                    return None
            else:
                self._count[key.kind] += 1
                sizes = self.notes.graph_bytes
                sizes[key.kind] = sizes.get(key.kind, 0) + max(0, self._device.used_memory() - before)
                total = f"{self._count[key.kind]} {key.kind} graphs: {sizes[key.kind] / 2**20:.1f} MiB"
                self.notes.lines.append(f"captured a {key} ({total})")
                return captured
            self._device.give_back()
        self.notes.warnings.append(f"no room for a {key}, which stays eager: {said}")
        self._refused.add(key)
        return None

    def _failed(self, key: Shape, said: str) -> None:
        self._failures[key.kind, key.alone] += 1
        count = self._failures[key.kind, key.alone]
        if count < MOST_FAILURES:
            self.notes.warnings.append(f"a {key} could not be captured, and is tried again: {said}")
        else:
            kind = f"{key.kind} graphs{' of lone prompts' if key.alone else ''}"
            self.notes.warnings.append(f"no {kind} from now on, since {count} could not be captured: {said}")

    def _capture(self, key: Shape, batch: Batch) -> _Captured:
        cut = Cut(self._device, self._buffer)
        with self._device.capturing():
            try:
                cut.begin()
                hidden, metadata = self._model.forward(batch, cut if key.kind == "piecewise" else None)
                metadata.cut = None  # it knows these graphs, which are to go as soon as nobody wants them
                metadata.plan = {}  # and this, memory of the pool that other captures may use
                return _Captured(cut.pieces, cut.end(), self._device.borrow(hidden), metadata)
            finally:
                cut.abandon()

    def _buffer(self, q: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Where attention's result lies between two pieces: one buffer for all layers of a shape, and all sizes."""
        key = (shape, q.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            size = (self.settings.most_tokens, *shape)
            buffer = self._buffers[key] = torch.empty(size, dtype=q.dtype, device=q.device)
        return buffer[: q.shape[0]]


def _pieces_of(shape: Shape) -> Shape:
    """The key of the pieces that serve any step of so many tokens."""
    return Shape("piecewise", False, 0, shape.num_tokens)


def _whole(attend: Callable[..., Tensor], *arguments: Any, shape: tuple[int, ...]) -> Tensor:
    """A cut that cuts nothing: the kernels of a capture in pieces, run eagerly."""
    return attend(*arguments)


def _for_any_lengths(batch: Batch, shape: Shape, max_model_len: int) -> Batch:
    """What a whole graph is told of its batch: nothing that depends on current lengths. In a mixed step any request may
    be of any length, so that none is known to be a decode; a lone prompt is as long as its step at most."""
    if shape.decode:
        return replace(batch, max_seq_len=max_model_len)
    longest, most = shape.num_tokens if shape.alone else max_model_len, max(2, shape.num_tokens)
    return replace(batch, max_seq_len=longest, max_prompt_len=longest, max_query_len=most, num_decodes=0)
