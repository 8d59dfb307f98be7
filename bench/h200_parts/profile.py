"""Traces decode steps: the share of a step in which the GPU is idle, and which kernels fill the rest."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from h200_parts.offline import Bench
from h200_parts.rows import Result
from h200_parts.trace import DEVICE_CATEGORIES, gap_lines, gaps, intervals_of, kernel_lines, step_window, within

OUTPUT, STEPS = 112, 60
"""Tokens of a traced run, and how many of its steps are looked at: late ones, after every prompt has been read."""
BATCHES = (128, 1)
LONG_GAP = 5.0
"""Microseconds: shorter gaps lie between neighbours of one graph, in longer ones the GPU waits for the host."""


def idle_rows(bench: Bench) -> None:
    """Emit the idle share at each batch size; print its longest gaps and the kernels that cost most."""
    for batch in BATCHES:
        bench.emit(idle_row(bench, f"idle/{bench.model.name}/{batch}", batch))


def idle_row(bench: Bench, name: str, batch: int, **requests: Any) -> Result:
    """Run once untraced, so that all is compiled and captured, and once traced. `requests`: what `LLM.generate` is told
    of them besides."""
    import torch
    from torch.profiler import ProfilerActivity

    settings, on_gpu = bench.settings, bench.settings.device == "cuda"
    size = settings.requests(batch)
    prompts = bench.prompts(size, settings.tokens(128))
    untraced, _ = bench.run(prompts, OUTPUT, **requests)
    first, _ = bench.run(prompts, 1, **requests)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        bench.run(prompts, OUTPUT, **requests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    intervals = intervals_of(trace, DEVICE_CATEGORIES if on_gpu else {"cpu_op"})
    start, end = step_window(intervals, OUTPUT, STEPS)
    window = within(intervals, start, end)
    idle = gaps(window, start, end)
    share, long = (
        100 * sum(gap.length for gap in idle if gap.length > least) / (end - start) for least in (0.0, LONG_GAP)
    )
    step = (untraced - first) / (OUTPUT - 1) * 1000
    notes = [
        f"{STEPS} steps of {(end - start) / STEPS / 1000:.3f} ms traced, {step:.3f} ms untraced",
        f"{long:.2f}% in gaps longer than {LONG_GAP:g} us",
    ]
    print(f"\n{name}: idle {share:.2f}%, {notes[0]}; longest gaps:")
    print("\n".join(gap_lines(idle, STEPS)))
    print("kernels that cost most:")
    print("\n".join(kernel_lines(window, STEPS)), flush=True)
    tokens = {"prompt": size * settings.tokens(128), "output": size * OUTPUT}
    return Result(name, share, tokens=tokens, notes=notes)
