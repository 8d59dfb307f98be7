"""Compares the tokens of the five graph modes, over traffic with chunks, sampling, prefix hits and preemptions."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

import headrace.models.filling as filling
from h200_parts.engines import runner_of
from h200_parts.models import EIGHT_B
from h200_parts.run import Run
from headrace import LLM, SamplingParams
from headrace.config import GRAPH_MODES

BIG = EIGHT_B | {"num_hidden_layers": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
BIG |= {"bos_token_id": 0, "eos_token_id": 1}
Tokens = list[Sequence[int]]


def graph_cases(run: Run) -> None:
    """Compare the modes on the demo model in fp32, and on layers of the 8B in fp32 and bf16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    compare_modes(run, "demo fp32", "demo", "float32", 2048, 300, {"num_gpu_blocks_override": 200})
    if run.smoke:
        return
    filling.DUMMY_RANGE = 0.03  # large enough that other sums give other tokens
    big = {"load_format": "dummy", "num_gpu_blocks_override": 400}
    for dtype in ("float32", "bfloat16"):
        name = f"8B of 4 layers {'fp32' if dtype == 'float32' else 'bf16'}"
        compare_modes(run, name, run.settings.write_config("8b4l", BIG), dtype, 32000, 500, big)


def compare_modes(run: Run, name: str, model: str, dtype: str, vocab: int, longest: int, knobs: dict[str, Any]) -> None:
    """Add a case a mode: its tokens are those of NONE. In bf16 it passes anyway, and says how many are equal."""
    prompts, params = traffic(vocab, longest, 6 if run.smoke else 60)
    expected: Tokens = []
    for mode in GRAPH_MODES:
        settings = {"dtype": dtype, "compilation_config": {"cudagraph_mode": mode}, **knobs}
        tokens = run_mode(run, f"{name} {mode}", model, settings, prompts, params)
        expected = expected or tokens
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        ok = equal == len(tokens) or dtype != "float32"
        run.case(f"{name} {mode}", ok, f"{equal} of {len(tokens)} requests as with NONE")


def traffic(vocab: int, longest: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts of many lengths, a third with a common prefix, and how each is sampled."""
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
                stop_token_ids=[0],  # may end it at any token, so the scheduler fills a small pool, and preempts
                prompt_logprobs=0 if number % 20 == 5 else None,
            )
        )
    return prompts, params


def run_mode(
    run: Run,
    name: str,
    model: str,
    settings: dict[str, Any],
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> Tokens:
    """Return the tokens of three rounds: graph sizes are met, captured and replayed."""
    began = time.monotonic()
    limits: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 300, "skip_tokenizer_init": True}
    with LLM(model, **limits, **run.settings.place(0.4), **settings) as llm:
        start = time.monotonic() - began
        tokens: Tokens = []
        for _ in range(3):
            tokens += [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.stats()
        memory = {kind: f"{size / 2**20:.1f} MiB" for kind, size in runner_of(llm).notes.graph_bytes.items()}
        run.note(
            f"{name}: start {start:.1f} s, graphs {memory}, {stats.num_preemptions} preemptions, "
            f"{stats.prefix_cache_hits} tokens from the cache"
        )
    return tokens
