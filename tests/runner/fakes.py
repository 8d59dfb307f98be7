"""Graphs without a GPU: a recorder of operations whose replay runs them again into the same tensors, and kernels and
attention that it sees as one operation each, since they look at values on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels.attention import paged_attention_reference
from headrace.kernels.batch import prepare_batch_reference
from headrace.kernels.paged import Sequences
from headrace.kernels.sampling import gumbel_argmax_reference
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.runner.cuda_graph import Shape
from headrace.runner.memory import HostMemory

KERNELS = replace(
    REFERENCE_KERNELS,
    prepare_batch=lambda *arguments: torch.ops.headrace_test.prepare_batch(*arguments),
    gumbel_argmax=lambda *arguments: torch.ops.headrace_test.gumbel_argmax(*arguments),
)


@torch.library.custom_op("headrace_test::prepare_batch", mutates_args=())
def prepare_batch(
    rows: Tensor,
    num_computed: Tensor,
    query_start_loc: Tensor,
    token_table: Tensor,
    block_table: Tensor,
    block_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    ids, positions, slots = prepare_batch_reference(
        rows, num_computed, query_start_loc, token_table, block_table, block_size, num_tokens
    )
    return ids.clone(), positions.clone(), slots.clone()


@torch.library.custom_op("headrace_test::gumbel_argmax", mutates_args=())
def gumbel_argmax(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, floor: Tensor | None = None
) -> Tensor:
    return gumbel_argmax_reference(logits, temperature, seeds, positions, floor)


@torch.library.custom_op("headrace_test::attention", mutates_args=())
def attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None,
) -> Tensor:
    assert int(query_start_loc[-1]) == q.shape[0]
    assert int(seq_lens.max()) <= max_seq_len
    assert int(query_start_loc.diff().max()) <= max_query_len
    sequences = Sequences(block_table, rows, query_start_loc, seq_lens)
    return paged_attention_reference(q, kv_cache, sequences, scale, sliding_window)


class AttentionInGraphs:
    """Like TRITON_ATTN: depends on nothing but host integers and device tensors."""

    name = "TEST"

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert metadata.query_start_loc.shape[0] == metadata.rows.shape[0] + 1 == metadata.num_reqs + 1
        attended: Tensor = torch.ops.headrace_test.attention(
            q,
            kv_cache,
            *metadata.sequences(spec.group),
            spec.scale,
            metadata.max_query_len,
            metadata.max_seq_len,
            spec.sliding_window,
        )
        return attended if out is None else out.copy_(attended)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in _tensors(entry)]
    return []


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [tensor for tensor in _tensors([*args, *(kwargs or {}).values()]) if not tensor.is_mkldnn]
        given = {tensor.untyped_storage().data_ptr() for tensor in taken}  # packed weights have no storage to look at
        made = [None if t.untyped_storage().data_ptr() in given else t for t in _tensors(result)]
        self.calls.append((func, args, kwargs or {}, made))
        return result


class RecordedGraph:
    """Replays into the tensors of its capture, which hold nothing of use until then."""

    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self._recording = _Recording()
        self.replays = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert pool is self._device.pool
        assert not self._device.under_way, "one capture at a time"
        self._device.fail_if_told()
        self._device.under_way = True
        self._recording.__enter__()

    def capture_end(self) -> None:
        self._recording.__exit__(None, None, None)
        self._device.under_way = False
        assert self._recording.calls, "an empty graph"
        for _, _, _, made in self._recording.calls:
            for tensor in made:
                if tensor is not None and tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        self._device.memory.used += 1000

    def replay(self) -> None:
        assert not self._device.under_way
        self.replays += 1
        for owner, tensor in self._device.borrowed:
            if owner is not self and tensor.is_floating_point():
                tensor.fill_(float("nan"))
        for func, args, kwargs, made in self._recording.calls:
            for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class RecordedMemory(HostMemory):
    """Counts bytes that captures took, and how often cached memory was freed."""

    def __init__(self) -> None:
        self.total = 1 << 30
        self.used = 0
        self.emptied = 0

    def free(self) -> int:
        return self.total - self.used

    def empty_cache(self) -> None:
        self.emptied += 1


class RecordingDevice:
    """`failures`: how many of the next captures find no memory. What is borrowed of one graph's memory is lost when
    another is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.pool = object()
        self.under_way = False
        self.memory = RecordedMemory()
        self.failures = 0
        self.graphs: list[RecordedGraph] = []
        self.borrowed: list[tuple[RecordedGraph, Tensor]] = []

    def new_graph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph(self))
        return self.graphs[-1]

    def capturing(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def borrow(self, tensor: Tensor) -> Tensor:
        self.borrowed.append((self.graphs[-1], tensor))
        return tensor

    def fail_if_told(self) -> None:
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore words")


def shapes_of(graphs: Any) -> set[Shape]:
    return set(graphs._captured)
