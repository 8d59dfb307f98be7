"""Captures steps as CUDA graphs and replays them: whole steps, or the pieces between attention calls.

A size runs eagerly the first time, which loads every kernel that the capture will hold, and is captured the second
time; so a start captures nothing and serving begins at once. A size for which memory is short stays eager. A whole
prompt that runs alone can be one graph, since its size is all that attention depends on.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.attention.metadata import AttentionMetadata
from headrace.errors import HeadraceError
from headrace.graph_sizes import GraphSettings
from headrace.runner.memory import DeviceMemory, device_memory, first_line, is_out_of_memory
from headrace.runner.pending import Notes
from headrace.spec_decode.drafter import Drafter, Tables
from headrace.step import SchedulerOutput

DRAFTING = "drafting"
"""Kind of graphs of what guesses tokens behind a step of decodes"""
MOST_FAILURES = 3
"""After so many captures of a kind have failed for other reasons than memory, the kind is not captured any more. One
failure alone says nothing about other sizes."""


class Shape(NamedTuple):
    """Says what a step is padded to, and is the key of its graph."""

    kind: str
    """full | piecewise | DRAFTING"""
    decode: bool
    """padding is more decodes; else it is one request that has all of it, and requests without tokens"""
    num_reqs: int
    num_tokens: int
    alone: bool = False
    """the step is one whole prompt, of which nothing was computed before, and one request of padding"""
    adapted: int = 0
    """places of the model that the requests' adapters may change, none of which other graphs change; 0: there are no
    adapters"""

    @property
    def size(self) -> str:
        """The size as the log names it."""
        if self.alone:
            return f"a lone prompt of {self.num_tokens} tokens"
        return f"{self.num_reqs} decodes" if self.decode else f"{self.num_tokens} tokens"

    def decodes_with(self, drafts: int) -> bool:
        """Tell whether it is a step of decodes that have so many drafts each."""
        return self.decode and self.num_tokens == self.num_reqs * (1 + drafts)

    def __str__(self) -> str:
        return f"{self.kind} graph of {self.size}{' with adapters' if self.adapted else ''}"


class Graph(Protocol):
    """Describes the part of torch.cuda.CUDAGraph that is used here."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class GraphDevice(Protocol):
    """Makes graphs. Tests bring one that records operations."""

    pool: Any
    memory: DeviceMemory

    def new_graph(self) -> Graph:
        """Return an empty graph."""
        ...

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for all captures of one size: a stream of its own, on a device that computes nothing."""
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return the same memory without keeping it allocated, so that later captures may use it: graphs are replayed
        one after the other, and what lies in their pool is read before the next replay."""
        ...


class CudaDevice:
    """Makes graphs on a GPU, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.memory = device_memory(device)

    def new_graph(self) -> Graph:
        return torch.cuda.CUDAGraph()

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        torch.cuda.synchronize(self._device)
        return torch.cuda.stream(self._stream)

    def borrow(self, tensor: Tensor) -> Tensor:
        if not tensor.is_contiguous():
            return tensor
        memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
        return memory.view(tensor.dtype).view(tensor.shape)


class _Memory:
    """Exposes a tensor's bytes to torch without owning them."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


class Forward(Protocol):
    """Describes what graphs need of the runner. Both methods take a batch whose tensors are views at fixed
    addresses."""

    def forward(
        self, batch: Batch, cut: Callable[..., Tensor] | None = None
    ) -> tuple[Tensor, AttentionMetadata | None]:
        """Return hidden states # [num_tokens, hidden_size] and the metadata given to attention, if pieces need it. With
        `cut`, attention is called through it, and nothing else depends on how the batch's tokens are spread over
        requests."""
        ...

    def metadata(self, batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...]) -> AttentionMetadata:
        """Return the metadata of a batch whose positions and slots are already computed."""
        ...


@dataclass(frozen=True)
class Drafting:
    """Stands in for the model where what is captured are guesses behind a step of decodes."""

    drafter: Drafter
    tables: Tables

    def forward(self, batch: Batch, cut: Callable[..., Tensor] | None = None) -> tuple[Tensor, None]:
        """Guess behind each row of the batch; return the last guesses # [R]."""
        guesses = self.drafter.propose(self.tables, batch, None)
        assert guesses is not None
        return guesses, None

    def metadata(self, batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...]) -> AttentionMetadata:
        """Raise an error: these graphs have no pieces."""
        raise HeadraceError("guesses are not captured in pieces")


@dataclass(frozen=True)
class _Piece:
    """Holds a graph and the attention call that follows it."""

    graph: Graph
    attend: Callable[..., Tensor]
    q: Tensor
    kv_cache: Tensor
    rest: tuple[Any, ...]
    out: Tensor


class Cut:
    """Stands in for attention while pieces are captured: each call ends one graph and begins the next. Attention itself
    is not captured; it runs between the pieces when they are replayed, and writes its result to `out`."""

    def __init__(self, device: GraphDevice, buffer: Callable[[Tensor, tuple[int, ...]], Tensor]) -> None:
        self._device = device
        self._buffer = buffer
        self._current: Graph | None = None
        self.pieces: list[_Piece] = []

    def begin(self) -> None:
        """Begin to capture a graph."""
        graph = self._device.new_graph()
        graph.capture_begin(pool=self._device.pool, capture_error_mode="thread_local")
        self._current = graph

    def end(self) -> Graph:
        """End the capture under way and return its graph."""
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
        """Return the buffer # [tokens of q, *shape] for the result of attend(q, kv_cache, metadata, *rest)."""
        graph = self.end()
        out = self._buffer(q, shape)
        borrow = self._device.borrow
        held = tuple(borrow(one) if isinstance(one, Tensor) else one for one in rest)
        self.pieces.append(_Piece(graph, attend, borrow(q), kv_cache, held, out))
        self.begin()
        return out

    def abandon(self) -> None:
        """End the capture that a failure has left under way, if there is one."""
        if self._current is not None:
            with contextlib.suppress(RuntimeError):  # the failure that led here is the one to report
                self.end()


@dataclass(frozen=True)
class _Captured:
    """Holds the graphs of one size. The last of them writes `hidden`, in borrowed memory; `metadata` owns the tensors
    to which the pieces write positions and slots, and which attention reads between their replays."""

    pieces: list[_Piece]
    last: Graph
    hidden: Tensor
    metadata: AttentionMetadata | None


class StepGraphs:
    """Holds the graphs of all sizes, which share one pool of memory."""

    def __init__(self, settings: GraphSettings, model: Forward, device: GraphDevice, notes: Notes) -> None:
        self.settings = settings
        self.notes = notes
        self._model = model
        self._device = device
        self._seen: set[Shape] = set()
        self._refused: set[Shape] = set()
        self._failures: Counter[tuple[str, bool]] = Counter()
        """by kind, and whether of a lone prompt: captures that failed for other reasons than memory"""
        self._captured: dict[Shape, _Captured] = {}
        self._buffers: dict[tuple[Any, ...], Tensor] = {}
        self._decode_shapes = {
            length: self._lookup(settings.decode, True, settings.decode_sizes, length)
            for length in settings.decode_lens
        }
        self._other_shapes = self._lookup(settings.other, False, settings.other_sizes)
        self._alone_sizes = frozenset(settings.alone_sizes)
        self._token_sizes = settings.token_sizes("piecewise", "full")

    @staticmethod
    def _lookup(kind: str, decode: bool, sizes: tuple[int, ...], length: int = 1) -> list[Shape]:
        """Return what each size is padded to; a mixed step's number of requests is filled in later."""
        shapes: list[Shape] = []
        for size in () if kind == "none" else sizes:
            shapes += [Shape(kind, decode, size, size * length)] * (size + 1 - len(shapes))
        return shapes

    def padded(self, num_tokens: int) -> int:
        """Return the tokens of the smallest graph for so many; where there is none, `num_tokens`."""
        return min((size for size in self._token_sizes if size >= num_tokens), default=num_tokens)

    def shape_of(self, step: SchedulerOutput, adapted: int = 0, rows: int = 0) -> Shape | None:
        """Return what the step is padded to; None: it runs eagerly. `adapted`: as in Shape. `rows`: it must
        have so many tokens then, as other engines take it with so many; 0: any number.

        In a step of decodes every request runs one token and its drafts, and samples. (Prompt logprobs are never wanted
        after a token that samples.)
        """
        num_reqs, num_tokens = len(step.rows), step.num_tokens
        length, more = divmod(num_tokens, num_reqs)
        decodes = not more and all(step.samples) and (step.num_drafts or [0] * num_reqs) == [length - 1] * num_reqs
        if decodes and (shapes := self._decode_shapes.get(length)) is not None:
            reqs = max(num_reqs, rows // length)
            shape = shapes[reqs]._replace(adapted=adapted) if reqs < len(shapes) else None
            if not rows or (shape is not None and shape.num_tokens == rows):
                return shape
        tokens = max(num_tokens, rows)
        shape = self._other_shapes[tokens] if tokens < len(self._other_shapes) else None
        if shape is None or shape.num_tokens - num_tokens > self.settings.max_model_len:
            return None
        if rows and shape.num_tokens != rows:
            return None
        shape = shape._replace(adapted=adapted)
        if num_reqs == 1 and not step.num_computed_tokens[0] and (alone := self._alone(shape)) is not None:
            return alone
        reqs = num_reqs + 1  # one for the padding tokens
        if shape.kind == "full":
            reqs = min(1 << (reqs - 1).bit_length(), self.settings.max_num_seqs + 1)
        return shape._replace(num_reqs=reqs)

    def _alone(self, shape: Shape) -> Shape | None:
        """Return what a lone prompt is padded to; None: pieces serve it better."""
        alone = Shape("full", False, 2, shape.num_tokens, alone=True, adapted=shape.adapted)
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
        """Return the hidden states of a batch padded to `shape`; the next run, of any shape, overwrites them."""
        key = _pieces_of(shape) if shape.kind == "piecewise" else shape
        captured = self._captured.get(key)
        if captured is None:
            if shape.kind != "piecewise":
                batch = _for_any_lengths(batch, shape, self.settings.max_model_len)
            captured = self._try(key, batch)
            if captured is None:
                return self._model.forward(batch, _attend_directly if shape.kind == "piecewise" else None)[0]
        if captured.pieces:
            inputs = captured.metadata
            assert inputs is not None
            metadata = self._model.metadata(batch, inputs.positions, inputs.slot_mappings)
            for piece in captured.pieces:
                piece.graph.replay()
                piece.attend(piece.q, piece.kv_cache, metadata, *piece.rest, out=piece.out)
        captured.last.replay()
        return captured.hidden

    def _try(self, key: Shape, batch: Batch) -> _Captured | None:
        """Capture `key` if this is not its first use; None: the step is to run eagerly, and nothing has run yet.

        If memory is short even after cached memory is freed, the size stays eager from now on. After any other failure
        it is tried again, until MOST_FAILURES of its kind have failed.
        """
        if not self._may_capture(key):
            return None
        if key not in self._seen:
            self._seen.add(key)
            self.notes.lines.append(f"a {key} would serve a step, which is the first of its size and loads kernels")
            return None
        memory = self._device.memory
        before, message = memory.free(), ""
        for _ in range(2):
            try:
                captured = self._captured[key] = self._capture(key, batch)
            except Exception as error:
                message = first_line(error)
                if not is_out_of_memory(error):
                    self._failed(key, f"{type(error).__name__}: {message}")
                    return None
            else:
                count = sum(shape.kind == key.kind for shape in self._captured)
                sizes = self.notes.graph_bytes
                sizes[key.kind] = sizes.get(key.kind, 0) + max(0, before - memory.free())
                total = f"{count} {key.kind} graphs: {sizes[key.kind] / 2**20:.1f} MiB"
                self.notes.lines.append(f"captured a {key} ({total})")
                return captured
            memory.empty_cache()
        self.notes.warnings.append(f"no room for a {key}, which stays eager: {message}")
        self._refused.add(key)
        return None

    def _failed(self, key: Shape, message: str) -> None:
        self._failures[key.kind, key.alone] += 1
        count = self._failures[key.kind, key.alone]
        if count < MOST_FAILURES:
            self.notes.warnings.append(f"a {key} could not be captured, and is tried again: {message}")
        else:
            kind = f"{key.kind} graphs{' of lone prompts' if key.alone else ''}"
            self.notes.warnings.append(f"no {kind} from now on, since {count} could not be captured: {message}")

    def _capture(self, key: Shape, batch: Batch) -> _Captured:
        cut = Cut(self._device, self._buffer)
        with self._device.capturing():
            try:
                cut.begin()
                hidden, metadata = self._model.forward(batch, cut if key.kind == "piecewise" else None)
                if metadata is not None:
                    metadata.cut = None  # it refers to these graphs, which would otherwise outlive their last use
                    metadata.plan = {}  # it refers to memory of the pool, which other captures may use
                return _Captured(cut.pieces, cut.end(), self._device.borrow(hidden), metadata)
            finally:
                cut.abandon()

    def _buffer(self, q: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return where attention's result lies between two pieces: all layers of a shape, and all sizes, share a
        buffer."""
        key = (shape, q.dtype)
        buffer = self._buffers.get(key)
        if buffer is None:
            size = (self.settings.most_tokens, *shape)
            buffer = self._buffers[key] = torch.empty(size, dtype=q.dtype, device=q.device)
        return buffer[: q.shape[0]]


def _pieces_of(shape: Shape) -> Shape:
    """Return the key of the pieces that serve any step of so many tokens."""
    return Shape("piecewise", False, 0, shape.num_tokens, adapted=shape.adapted)


def _attend_directly(attend: Callable[..., Tensor], *arguments: Any, shape: tuple[int, ...]) -> Tensor:
    """Call attention as it is: a `cut` for running eagerly the kernels that a capture in pieces would hold."""
    return attend(*arguments)


def _for_any_lengths(batch: Batch, shape: Shape, max_model_len: int) -> Batch:
    """Return `batch` with host integers that hold for any lengths that a replay of the whole graph may meet. In a mixed
    step any request may have any length and be a prompt, so none counts as a decode; a lone prompt is at most as long
    as its step."""
    if shape.decode:
        return replace(batch, max_seq_len=max_model_len, max_prompt_len=max_model_len, prompt_keys=0)
    longest, most = shape.num_tokens if shape.alone else max_model_len, max(2, shape.num_tokens)
    batch = replace(batch, prompt_keys=longest if shape.alone else 0)
    return replace(
        batch, max_seq_len=longest, max_prompt_len=longest, max_query_len=most, num_decodes=0, decode_only=False
    )
