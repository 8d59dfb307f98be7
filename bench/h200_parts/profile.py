"""Traces of decode steps: the share of a step in which the GPU is idle, and what fills the rest."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from h200_parts.offline import Bench, Emit
from h200_parts.rows import Result
from h200_parts.trace import (
    DEVICE_CATEGORIES,
    gap_lines,
    gaps,
    idle_share,
    intervals_of,
    kernel_lines,
    step_window,
    within,
)

OUTPUT, STEPS = 112, 60
"""Tokens of a traced run, and steps of it that are looked at: late ones, when every prompt has been read."""
BATCHES = (128, 1)
LONG_GAP = 5.0
"""Microseconds: what is shorter lies between neighbours of one graph, what is longer waits for the host."""


def idle_rows(bench: Bench, emit: Emit) -> None:
    for batch in BATCHES:
        emit(idle_row(bench, batch))


def idle_row(bench: Bench, batch: int) -> Result:
    """Runs once untraced, for what is compiled or captured, and once traced."""
    import torch
    from torch.profiler import ProfilerActivity

    settings, on_gpu = bench.settings, bench.settings.device == "cuda"
    size = settings.requests(batch)
    prompts = bench.prompts(size, settings.tokens(128))
    untraced, _ = bench.run(prompts, OUTPUT)
    first, _ = bench.run(prompts, 1)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        bench.run(prompts, OUTPUT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    intervals = intervals_of(trace, DEVICE_CATEGORIES if on_gpu else {"cpu_op"})
    start, end = step_window(intervals, OUTPUT, STEPS)
    window = within(intervals, start, end)
    found = gaps(window, start, end)
    share = 100 * idle_share(window, start, end)
    long = 100 * sum(gap.length for gap in found if gap.length > LONG_GAP) / (end - start)
    step = (untraced - first) / (OUTPUT - 1) * 1000
    row = Result(
        f"idle/{bench.model.name}/{batch}",
        share,
        tokens={"prompt": size * settings.tokens(128), "output": size * OUTPUT},
        notes=[
            f"{STEPS} steps of {(end - start) / STEPS / 1000:.3f} ms traced, {step:.3f} ms untraced",
            f"{long:.2f}% in gaps longer than {LONG_GAP:g} us",
        ],
    )
    print(f"\n{row.name}: idle {share:.2f}%, {row.notes[0]}; idle most:")
    print("\n".join(gap_lines(found, STEPS)))
    print("busy most:")
    print("\n".join(kernel_lines(window, STEPS)), flush=True)
    return row
