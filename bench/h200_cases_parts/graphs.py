"""Five graph modes and eager, over traffic with chunks, decodes, sampling, prompt logprobs, cache hits and preemptions.

Also says what each mode takes: the start, the first token of a prompt, a token, and the graphs' memory.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

import headrace.models.loader as loader
from h200_cases_parts.report import EIGHT_B, Report
from headrace import LLM, SamplingParams

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
BIG = EIGHT_B | {"num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
BIG |= {"bos_token_id": 0, "eos_token_id": 1}
Tokens = list[Sequence[int]]


def graph_cases(report: Report) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    demo = {"num_gpu_blocks_override": 200}
    compare(report, "demo fp32", "demo", "float32", 2048, 300, demo)
    if report.smoke:
        return
    loader.DUMMY_RANGE = 0.03  # so that tokens tell
    big = {"load_format": "dummy", "num_gpu_blocks_override": 400}
    for dtype in ("float32", "bfloat16"):
        name = f"8B of 4 layers {'fp32' if dtype == 'float32' else 'bf16'}"
        compare(report, name, report.model("8b4l", BIG), dtype, 32000, 500, big)


def compare(report: Report, name: str, model: str, dtype: str, vocab: int, longest: int, knobs: dict[str, Any]) -> None:
    expected: Tokens = []
    for mode in MODES:
        tokens = run_mode(report, f"{name} {mode}", model, mode, dtype, vocab, longest, knobs)
        expected = expected or tokens
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        ok = equal == len(tokens) or dtype != "float32"
        report.case(f"{name} {mode}", ok, f"{equal} of {len(tokens)} requests as with NONE")


def traffic(vocab: int, longest: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of many lengths, a third with a common beginning, and how each is sampled."""
    rng = random.Random(5)
    shared = [rng.randrange(2, vocab) for _ in range(100)]
    prompts, params = [], []
    for number in range(count):
        prompt = [rng.randrange(2, vocab) for _ in range(rng.choice((1, 3, 17, 60, 128, longest)))]
        prompts.append(shared + prompt[:40] if number % 3 == 0 else prompt)
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(5, 60),
                temperature=1.0 if number % 4 == 1 else 0.0,
                seed=number,
                ignore_eos=True,
                stop_token_ids=[0],  # might end it at any token: so a small pool is filled, and some are preempted
                prompt_logprobs=0 if number % 20 == 5 else None,
            )
        )
    return prompts, params


def run_mode(
    report: Report, name: str, model: str, mode: str, dtype: str, vocab: int, longest: int, knobs: dict[str, Any]
) -> Tokens:
    """Tokens of three rounds: sizes come up, are captured, are replayed."""
    began = time.monotonic()
    place: dict[str, Any] = {"device": "cpu", "cpu_threads": 1} if report.smoke else {"gpu_memory_utilization": 0.4}
    with LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        compilation_config={"cudagraph_mode": mode},
        max_num_seqs=24,
        max_num_batched_tokens=300,
        **place,
        **knobs,
    ) as llm:
        start = time.monotonic() - began
        prompts, params = traffic(vocab, longest, 6 if report.smoke else 60)
        tokens: Tokens = []
        for _ in range(3):
            tokens += [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.stats()
        first, step = latency(llm, vocab, 4 if report.smoke else 9)
        memory = {kind: f"{size / 2**20:.1f} MiB" for kind, size in runner_of(llm).notes.graph_bytes.items()}
        report.note(
            f"{name}: start {start:.1f} s, first token of 128 {1e3 * first:.2f} ms, a token {1e3 * step:.3f} ms, "
            f"graphs {memory}, {stats.num_preemptions} preemptions, {stats.prefix_cache_hits} tokens from the cache"
        )
    return tokens


def latency(llm: LLM, vocab: int, turns: int) -> tuple[float, float]:
    """Seconds, medians: (first token of a prompt of 128, a token of 65)."""
    firsts: list[float] = []
    steps: list[float] = []
    for number in range(turns):
        prompt = [2 + (number * 131 + i * 7) % (vocab - 2) for i in range(128)]
        for count, times in ((1, firsts), (65, steps)):
            before = time.perf_counter()
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            llm.generate([prompt], params, use_tqdm=False)
            times.append((time.perf_counter() - before) / count)
    return statistics.median(firsts[3:]), statistics.median(steps[3:])


def runner_of(llm: LLM) -> Any:
    """The model runner of an engine in this process."""
    client: Any = llm._client
    return client._core._executor._worker.runner
