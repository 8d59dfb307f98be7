"""Runs `headrace bench latency`: seconds of one batch from end to end, to its first token, and of a decode step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from headrace.cli.arguments import build_config
from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.cli.bench.offline import check_lengths, model_facts, sampling_params, start_engine
from headrace.cli.bench.options import LatencyOptions
from headrace.cli.bench.output import progress_bar, write_json
from headrace.config import EngineConfig

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(values: argparse.Namespace) -> int:
    options = build_config(LatencyOptions, values)
    # Every run sends the same prompts: with a prefix cache the second run would skip prefill.
    config = build_config(EngineConfig, values, enable_prefix_caching=False)
    vocab_size, max_model_len = model_facts(config)
    check_lengths(options.input_len + options.output_len, max_model_len)
    prompts = _prompts(options, config.seed, vocab_size)
    llm = start_engine(config)

    def run_batch(output_len: int) -> float:
        params = sampling_params(options, config, output_len)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    try:
        latencies, first_token_latencies = measure(run_batch, options)
    finally:
        llm.shutdown()
    result = summarize_latency(latencies, first_token_latencies, options.output_len)
    print(report(result))
    if options.output_json:
        write_json(Path(options.output_json), result)
    return 0


def _prompts(options: LatencyOptions, seed: int, vocab_size: int) -> list[list[int]]:
    maker = PromptMaker(seed, vocab_size)
    length = options.input_len
    return [
        maker.token_ids(BenchRequest(prompt_len=length, output_len=1, segments=[(i + 1, length)]))
        for i in range(options.batch_size)
    ]


def measure(run_batch: Callable[[int], float], options: LatencyOptions) -> tuple[list[float], list[float]]:
    """Return the seconds of whole runs, and of runs of a single token in between: the batch's time to first token."""
    latencies: list[float] = []
    first_token_latencies: list[float] = []
    with progress_bar("warm-up", options.num_iters_warmup, options.disable_tqdm) as on_progress:
        for done in range(options.num_iters_warmup):
            run_batch(options.output_len)
            on_progress(done + 1)
    with progress_bar("runs", options.num_iters, options.disable_tqdm) as on_progress:
        for done in range(options.num_iters):
            first_token_latencies.append(run_batch(1))
            latencies.append(run_batch(options.output_len))
            on_progress(done + 1)
    return latencies, first_token_latencies


def summarize_latency(latencies: list[float], first_token_latencies: list[float], output_len: int) -> dict[str, Any]:
    """Return vLLM's keys, ttft_ms and decode_step_ms: (median latency - median time to first token) / (output - 1)."""
    ttft = float(numpy.median(first_token_latencies))
    step = (float(numpy.median(latencies)) - ttft) / (output_len - 1) * 1000 if output_len > 1 else None
    return {
        "avg_latency": float(numpy.mean(latencies)),
        "std_latency": float(numpy.std(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(numpy.percentile(latencies, p)) for p in PERCENTILES},
        "ttft_ms": ttft * 1000,
        "decode_step_ms": step,
    }


def report(result: dict[str, Any]) -> str:
    lines = [f"Avg latency: {result['avg_latency']:.6f} seconds", f"Std latency: {result['std_latency']:.6f} seconds"]
    lines += [f"{p}% percentile latency: {value:.6f} seconds" for p, value in result["percentiles"].items()]
    lines.append(f"Time to first token: {result['ttft_ms']:.3f} ms")
    if result["decode_step_ms"] is not None:
        lines.append(f"Decode step: {result['decode_step_ms']:.3f} ms")
    return "\n".join(lines)
