"""What a plan takes of a device's memory, measured by running its largest steps on an empty cache of one block.

Reports; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.runner.memory import DeviceMemory
from headrace.runner.model_runner import ModelRunner, RunnerLimits
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput

MOST_OUTSIDE = 4 << 30
"""Kernels, libraries and communication beside the allocator take no more; if there seems to be, others started too."""
MARGIN = 1 / 64
"""Share of the device, up to MOST_MARGIN bytes, that stays free where others bound what is ours, not our share"""
MOST_MARGIN = 1 << 30


@dataclass(frozen=True)
class MemoryUse:
    """In bytes."""

    standing: int
    """weights, and tables of rows"""
    step: int
    """what the largest step takes for as long as it runs"""
    graphs: int
    """what CUDA graphs are expected to take, of those that can be captured"""
    outside: int
    """taken beside torch's allocator"""
    left: int
    """for the KV cache; below 0: what is missing"""

    def __str__(self) -> str:
        parts = {"weights and tables": self.standing, "the largest step": self.step, "CUDA graphs": self.graphs}
        parts |= {"libraries": self.outside, "left for the KV cache": self.left}
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items()) + " GiB"


def measure_memory(runner: ModelRunner, memory: DeviceMemory, utilization: float, free_at_start: int) -> MemoryUse:
    """`utilization`: share of the device that may be ours; `free_at_start`: bytes, before the weights were loaded.

    Raises what the allocator raises where a step does not fit.
    """
    memory.give_back()
    standing = memory.allocated()
    memory.reset_peak()
    settings, limits = runner.graph_settings, runner.limits
    graphs = 0
    if settings is not None:
        chunks = min(limits.max_num_seqs, -(-settings.most_tokens // limits.max_model_len))
        largest = replace(limits, max_num_batched_tokens=settings.most_tokens, max_num_seqs=chunks)
        _run(runner, _largest_step(largest, samples=False))
        pool = memory.peak() - standing
        graphs = pool + settings.bytes_beside(runner.shape.num_layers)
    _run(runner, _largest_step(limits, samples=True))
    peak = memory.peak()
    memory.give_back()
    free, reserved = memory.free(), memory.reserved()
    outside = min(max(0, free_at_start - free - reserved), MOST_OUTSIDE)
    by_share = int(memory.total * utilization) - peak - outside - graphs
    by_free = free + reserved - peak - graphs - min(int(memory.total * MARGIN), MOST_MARGIN)
    return MemoryUse(standing, peak - standing, graphs, outside, min(by_share, by_free))


def _run(runner: ModelRunner, step: SchedulerOutput) -> None:
    runner.execute(step).result()
    rows = list(range(runner.limits.max_num_seqs))
    runner.execute(SchedulerOutput(0, [], rows, [], [], [], [], []))


def _largest_step(limits: RunnerLimits, samples: bool) -> SchedulerOutput:
    """max_num_batched_tokens tokens in as few sequences as max_model_len allows, the rest of the rows one token each,
    all of them sampling or none; every row's blocks point at block 0, so one block of cache is enough."""
    counts: list[int] = []
    left = limits.max_num_batched_tokens
    for row in range(limits.max_num_seqs):
        rows_after = limits.max_num_seqs - row - 1
        count = min(limits.max_model_len, max(1, left - rows_after), left)
        if count == 0:
            break
        counts.append(count)
        left -= count
    counts.sort()
    rows = list(range(len(counts)))
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=10, max_tokens=None, seed=0)
    return SchedulerOutput(
        step=0,
        new_rows=[NewRow(row, [0], params, []) for row in rows],
        freed_rows=[],
        block_updates=[BlockUpdate(row, 0, [0]) for row in rows],
        rows=rows,
        num_computed_tokens=[0] * len(rows),
        num_scheduled_tokens=counts,
        samples=[samples] * len(rows),
    )
