"""Traces steps: the GPU's idle share of a decode step, which kernels fill the rest, and how long attention takes."""

from __future__ import annotations

import json
import re
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from h200_parts.bounds import decode_attention, prompt_attention
from h200_parts.engines import runner_of, watched
from h200_parts.offline import Bench
from h200_parts.rows import Result
from h200_parts.trace import DEVICE_CATEGORIES, Interval, gap_lines, gaps, intervals_of, kernel_lines, short_name

OUTPUT, STEPS = 112, 60
"""Tokens of a traced run, and how many of its steps are looked at."""
FULL_STEPS = 8
"""Steps of the whole batch before those, in which graphs are captured."""
ATTENTION_OUTPUT, ATTENTION_STEPS = 512, 8
"""The same where attention is timed: the first of some long prompts waits with as many tokens for the last."""
KERNEL = re.compile(r"_\w+_kernel")
LONG_GAP = 5.0
"""Microseconds: shorter gaps lie between neighbours of one graph, in longer ones the GPU waits for the host."""


def idle_rows(bench: Bench) -> None:
    """Emit the idle share at two batch sizes; print its longest gaps and the kernels that cost most."""
    for batch in sorted({min(bench.model.batches), max(bench.model.batches)}, reverse=True):
        bench.emit(idle_row(bench, f"idle/{bench.model.name}/{batch}", batch))


def idle_row(bench: Bench, name: str, batch: int, **requests: Any) -> Result:
    """Run once untraced, so that all is compiled and captured, and once traced. `requests`: what `LLM.generate` is told
    of them besides."""
    settings = bench.settings
    size = settings.requests(batch)
    prompts = bench.prompts(size, settings.tokens(128))
    untraced, _ = bench.run(prompts, OUTPUT, **requests)
    first, _ = bench.run(prompts, 1, **requests)
    ran = decoding(bench, prompts, OUTPUT, STEPS, **requests)
    start, end = ran[0].start, max(one.end for one in ran)
    idle = gaps(ran, start, end)
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
    print_kernels(ran, STEPS)
    tokens = {"prompt": size * settings.tokens(128), "output": size * OUTPUT}
    return Result(name, share, tokens=tokens, notes=notes)


def attention_rows(bench: Bench) -> None:
    """Emit how long the kernels that read caches take in all layers: in a decode step, and while prompts are read."""
    settings, model = bench.settings, bench.model
    for requests, tokens in model.decodes:
        prompts = bench.prompts(settings.requests(requests), settings.tokens(tokens))
        # a toy's first prompt waits too, for fewer tokens
        ran = decoding(bench, prompts, settings.tokens(ATTENTION_OUTPUT) + 3 * FULL_STEPS, ATTENTION_STEPS)
        floor = decode_attention(bench.cost, bench.ceilings, len(prompts), len(prompts[0]) + 2 * FULL_STEPS)
        emit_attention(bench, f"decode-{requests}x{tokens}", prompts, ran, ATTENTION_STEPS, floor)
    for requests, tokens in model.prompts:
        prompts = bench.prompts(settings.requests(requests), settings.tokens(tokens))
        bench.run(prompts, 1)
        with profiler(bench) as trace:
            bench.run(prompts, 1)
        floor = prompt_attention(bench.cost, bench.ceilings, len(prompts), len(prompts[0]))
        emit_attention(bench, f"prompt-{requests}x{tokens}", prompts, traced(bench, trace), 1, floor)


def emit_attention(
    bench: Bench, what: str, prompts: list[list[int]], ran: list[Interval], steps: int, floor: float
) -> None:
    """Emit the milliseconds that kernels which read caches took among those that `ran` in so many steps; a toy has
    none, so there all count."""
    name, known = f"attention/{bench.model.name}/{what}", attention_kernels()
    print(f"\n{name}:")
    print_kernels(ran, steps)
    lengths = [(one.end - one.start) / steps / 1000 for one in ran]
    attention = [each for each, one in zip(lengths, ran, strict=True) if short_name(one.name) in known]
    value = sum(lengths if bench.settings.smoke else attention)
    notes = [f"all kernels {sum(lengths):.3f} ms"]
    bench.emit(Result(name, value, tokens={"prompt": sum(map(len, prompts))}, bound=1000 * floor, notes=notes))


def attention_kernels() -> set[str]:
    """Return the names of the kernels that read caches."""
    modules = ("attention", "decode", "prefill", "latent", "latent_prompt", "index")
    return {
        name for one in modules for name in vars(import_module(f"headrace.kernels.{one}")) if KERNEL.fullmatch(name)
    }


def print_kernels(ran: list[Interval], steps: int) -> None:
    print("kernels that cost most:")
    print("\n".join(kernel_lines(ran, steps)), flush=True)


def profiler(bench: Bench) -> Any:
    """Return what traces the device while it is entered."""
    on_gpu = bench.settings.device == "cuda"
    return profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])


def traced(bench: Bench, trace: Any) -> list[Interval]:
    """Return what ran while `trace` was on, in order of its start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        read = json.loads(path.read_text())
    return intervals_of(read, DEVICE_CATEGORIES if bench.settings.device == "cuda" else {"cpu_op"})


def decoding(bench: Bench, prompts: list[list[int]], output_len: int, steps: int, **requests: Any) -> list[Interval]:
    """Return what runs in `steps` decode steps of the whole batch, in order of its start; `requests` as above. Raises
    ValueError where there are not as many."""
    trace, whole = profiler(bench), 0

    def launched(step: Any) -> None:
        nonlocal whole
        if not len(step.rows) == len(prompts) == step.num_tokens:
            return
        whole += 1
        if whole in (FULL_STEPS, FULL_STEPS + steps):
            if bench.settings.device == "cuda":
                torch.cuda.synchronize()
            (trace.start if whole == FULL_STEPS else trace.stop)()

    with watched(runner_of(bench.llm), launched):
        bench.run(prompts, output_len, **requests)
    if whole < FULL_STEPS + steps:
        raise ValueError(f"only {whole} of {output_len} steps were of all {len(prompts)} requests")
    return traced(bench, trace)
