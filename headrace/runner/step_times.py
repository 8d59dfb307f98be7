"""How long steps of prompts take on this GPU, measured at load on made-up tokens.

From these the planner decides how much of a prompt may share a step with running decodes. Reports; decides nothing.
"""

from __future__ import annotations

import time

import msgspec
import torch

from headrace.runner.model_runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.step import BlockUpdate, NewRow, SchedulerOutput

SIZES = (2048, 1024, 768, 512, 384, 256, 128)
"""tokens; the largest first, which loads what the others need too"""
AHEAD_SECONDS = 0.015
"""For so long the GPU is kept waiting while the host launches a step whose graph is not captured yet; longer where that
was too short"""
CYCLES_PER_SECOND = 2_000_000_000
"""of a GPU's clock, about"""


def measure_step_times(runner: ModelRunner) -> list[tuple[int, float]]:
    """(tokens of prompts in a step, milliseconds it takes), smallest first, for the sizes that the limits allow.

    Before there are graphs; where steps will run from graphs, the host's time for launching them is left out. On an
    empty cache of which block 0 may be overwritten, and with every row free; leaves them so. Takes some 0.4 s for 8
    billion weights. All ranks run it alike.
    """
    limits = runner.limits
    most = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    ahead = 0.0 if runner.graph_settings is None else AHEAD_SECONDS
    times = [(size, _milliseconds(runner, _prompts(runner, size), ahead)) for size in SIZES if size <= most]
    runner.execute(SchedulerOutput(0, [], list(range(limits.max_num_seqs)), [], [], [], [], []))
    return times[::-1]


def _milliseconds(runner: ModelRunner, step: SchedulerOutput, ahead: float) -> float:
    """Of the second run; the first loads kernels and fills the rows. Of a third where the second took longer to launch
    than the GPU had been kept waiting."""
    runner.execute(step).result()
    step = msgspec.structs.replace(step, new_rows=[], freed_rows=[], block_updates=[])
    found, launching = _timed(runner, step, ahead)
    if 0 < ahead < launching:
        found, _ = _timed(runner, step, 1.5 * launching)
    return found


def _timed(runner: ModelRunner, step: SchedulerOutput, ahead: float) -> tuple[float, float]:
    """(milliseconds of the GPU, seconds that the host took to launch them)"""
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


def _prompts(runner: ModelRunner, num_tokens: int) -> SchedulerOutput:
    """A step of `num_tokens` tokens in as few prompts as max_model_len allows, which all end in it; their blocks are
    all block 0. The ids differ, so that a mixture of experts uses them all."""
    limits = runner.limits
    longest = limits.max_model_len
    counts = [min(longest, num_tokens - first) for first in range(0, num_tokens, longest)]
    rows = list(range(len(counts)))
    params = SamplingParams(temperature=0.0, max_tokens=None, seed=0)
    ids = [index * 7919 % limits.vocab_size for index in range(counts[0])]
    return SchedulerOutput(
        step=0,
        new_rows=[NewRow(row, ids[:count], params, []) for row, count in zip(rows, counts, strict=True)],
        freed_rows=rows,
        block_updates=[BlockUpdate(row, 0, [0]) for row in rows],
        rows=rows,
        num_computed_tokens=[0] * len(rows),
        num_scheduled_tokens=counts,
        samples=[True] * len(rows),
    )
