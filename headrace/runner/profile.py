"""Measures how much memory and time a plan's steps take, by running made-up prompts on an empty cache of one page.

The planner decides what follows from the figures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec
import torch

from headrace.distributed.mesh import Group
from headrace.runner.memory import DeviceMemory
from headrace.runner.model_runner import ModelRunner, RunnerLimits
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput

MOST_OUTSIDE = 4 << 30
"""Bytes that kernels, libraries and communication take at most outside the allocator; what seems to be more belongs to
other processes that started meanwhile"""
MARGIN = 1 / 64
"""Share of the device, up to MOST_MARGIN bytes, that stays free where other processes leave less than our share"""
MOST_MARGIN = 1 << 30
SIZES = (2048, 1024, 768, 512, 384, 256, 128)
"""Tokens of the steps that are timed; the largest first, which loads what the others need too"""
AHEAD_SECONDS = 0.015
"""For how long the GPU is kept waiting while the host launches a step that will later run from a graph; longer where
the launch takes longer"""
CYCLES_PER_SECOND = 2_000_000_000
"""of a GPU's clock, about"""


@dataclass(frozen=True)
class MemoryUse:
    """Says in bytes where a device's memory goes."""

    standing: int
    """weights, and tables of rows"""
    step: int
    """what the largest step takes while it runs"""
    graphs: int
    """what CUDA graphs are expected to take once every size is captured"""
    outside: int
    """taken outside torch's allocator"""
    left: int
    """for the KV cache; negative: how much is missing"""

    def __str__(self) -> str:
        parts = {"weights and tables": self.standing, "the largest step": self.step, "CUDA graphs": self.graphs}
        parts |= {"libraries": self.outside, "left for the KV cache": self.left}
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items()) + " GiB"


def measure_memory(runner: ModelRunner, memory: DeviceMemory, utilization: float, free_at_start: int) -> MemoryUse:
    """Run the largest steps and return what they take.

    `utilization` is the share of the device that this process may use, `free_at_start` the bytes that were free before
    the weights were loaded. Raises the allocator's error where a step does not fit.
    """
    memory.empty_cache()
    standing = memory.allocated()
    memory.reset_peak()
    settings, limits = runner.graph_settings, runner.limits
    graphs = 0
    if settings is not None:
        chunks = min(limits.max_num_seqs, -(-settings.most_tokens // limits.max_model_len))
        largest = replace(limits, max_num_batched_tokens=settings.most_tokens, max_num_seqs=chunks)
        _run_largest_step(runner, largest, samples=False)
        pool = memory.peak() - standing
        graphs = pool + settings.bytes_beside_pool(runner.shape.num_layers)
    _run_largest_step(runner, limits, samples=True)
    peak = memory.peak()
    memory.empty_cache()
    free, reserved = memory.free(), memory.reserved()
    outside = min(max(0, free_at_start - free - reserved), MOST_OUTSIDE)
    by_share = int(memory.total * utilization) - peak - outside - graphs
    by_free = free + reserved - peak - graphs - min(int(memory.total * MARGIN), MOST_MARGIN)
    return MemoryUse(standing, peak - standing, graphs, outside, min(by_share, by_free))


def measure_step_times(runner: ModelRunner, group: Group) -> list[tuple[int, float]]:
    """Return the prompt tokens of steps and the milliseconds that these take, smallest first, within the limits.

    It runs before there are graphs; where steps will run from graphs, the host's time for launching them is left out.
    Block 0 of the cache is overwritten, and every row is free before and afterwards. All ranks of `group` run the same
    steps, whatever their times; it takes about 0.4 s for 8 billion weights.
    """
    limits = runner.limits
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    ahead = 0.0 if runner.graph_settings is None else AHEAD_SECONDS
    times = [(size, _milliseconds(runner, group, size, ahead)) for size in SIZES if size <= most]
    _free_rows(runner)
    return times[::-1]


def _run_largest_step(runner: ModelRunner, limits: RunnerLimits, samples: bool) -> None:
    """Run max_num_batched_tokens tokens in as few prompts as max_model_len allows, and one token in each other row,
    with its drafts."""
    counts: list[int] = []
    left, decode_len = limits.max_num_batched_tokens, 1 + runner.num_drafts
    for row in range(limits.max_num_seqs):
        rows_after = limits.max_num_seqs - row - 1
        count = min(limits.max_model_len, max(decode_len, left - rows_after * decode_len), left)
        if count == 0:
            break
        counts.append(count)
        left -= count
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=10, max_tokens=None, seed=0)
    slot = -1 if runner.adapters is None else 0
    step = _made_up_prompts(sorted(counts), limits.vocab_size, params, samples, slot)
    if samples and runner.num_drafts:  # a prompt's last tokens may be taken for drafts as well
        drafts = [min(count - 1, runner.num_drafts) for count in sorted(counts)]
        step = msgspec.structs.replace(step, num_drafts=drafts, num_guesses=runner.num_drafts)
    runner.execute(step).result()
    _free_rows(runner)


def _milliseconds(runner: ModelRunner, group: Group, num_tokens: int, ahead: float) -> float:
    """Time a step of `num_tokens` tokens in as few prompts as max_model_len allows.

    The first run loads kernels and fills the rows; the second is timed, and a third where the second took any rank
    longer to launch than its GPU had been kept waiting.
    """
    limits, longest = runner.limits, runner.limits.max_model_len
    counts = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
    params = SamplingParams(temperature=0.0, max_tokens=None, seed=0)
    step = _made_up_prompts(counts, limits.vocab_size, params)
    runner.execute(step).result()
    step = msgspec.structs.replace(step, new_rows=[], freed_rows=[], block_updates=[])
    milliseconds, launching = _timed(runner, step, ahead)
    if ahead and ahead < (slowest := group.largest(launching, runner.device)):
        milliseconds, _ = _timed(runner, step, 1.5 * slowest)
    return milliseconds


def _timed(runner: ModelRunner, step: SchedulerOutput, ahead: float) -> tuple[float, float]:
    """Return (milliseconds that the GPU took, seconds that the host took to launch the step)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(int(ahead * CYCLES_PER_SECOND))
    start.record()
    began = time.perf_counter()
    pending = runner.execute(step)
    launching = time.perf_counter() - began
    end.record()
    pending.result()
    end.synchronize()
    return start.elapsed_time(end), launching


def _made_up_prompts(
    counts: list[int], vocab_size: int, params: SamplingParams, samples: bool = True, adapter_slot: int = -1
) -> SchedulerOutput:
    """Return a step of whole prompts of so many tokens, all of whose blocks are block 0. Their ids differ, so that a
    mixture of experts uses all experts."""
    rows = list(range(len(counts)))
    ids = [index * 7919 % vocab_size for index in range(max(counts))]
    return SchedulerOutput(
        step=0,
        new_rows=[
            NewRow(row, ids[:count], params, [], adapter_slot=adapter_slot)
            for row, count in zip(rows, counts, strict=True)
        ],
        freed_rows=rows,
        block_updates=[BlockUpdate(row, 0, [0]) for row in rows],
        rows=rows,
        num_computed_tokens=[0] * len(rows),
        num_scheduled_tokens=counts,
        samples=[samples] * len(rows),
    )


def _free_rows(runner: ModelRunner) -> None:
    runner.execute(SchedulerOutput(0, freed_rows=list(range(runner.limits.max_num_seqs))))
