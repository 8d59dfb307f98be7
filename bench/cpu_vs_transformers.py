"""Compares headrace with transformers on this CPU, interleaved in one run: medians of five rounds.

    python bench/cpu_vs_transformers.py [--output-json FILE]

Prints tokens a second of both and their ratio for three loads: a 2.9M fp32 Llama with 16 prompts against the padded
`generate`, a 200M bf16 Llama with 8 prompts against `generate_batch`, and one prompt on it against `generate`.
Random weights (speed does not depend on them), greedy, 32 prompt tokens. Both see the same threads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from h200_parts.engines import greedy_tokens
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from headrace import LLM

PROMPT_TOKENS = 32
Prompts = list[list[int]]


def padded(model: LlamaForCausalLM, prompts: Prompts, new_tokens: int) -> int:
    """Return how many tokens transformers made, of prompts side by side."""
    ids = torch.tensor(prompts)
    exactly: Any = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **exactly).numel() - ids.numel()


def in_batch(model: LlamaForCausalLM, prompts: Prompts, new_tokens: int) -> int:
    """Return the same by continuous batching."""
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


def ours(llm: LLM, prompts: Prompts, new_tokens: int) -> int:
    return sum(map(len, greedy_tokens(llm, prompts, new_tokens)))


Load = tuple[str, int, int, Callable[[LlamaForCausalLM, Prompts, int], int]]
"""name, prompts, new tokens of each, what transformers runs"""
SMALL = LlamaConfig(
    vocab_size=2304, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
LARGE = LlamaConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=12, num_attention_heads=16,
    num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
LOADS: tuple[tuple[LlamaConfig, torch.dtype, tuple[Load, ...]], ...] = (
    (SMALL, torch.float32, (("2.9M fp32, 16 prompts x 32, padded generate", 16, 32, padded),)),
    (
        LARGE,
        torch.bfloat16,
        (
            ("200M bf16, 8 prompts x 64, generate_batch", 8, 64, in_batch),
            ("200M bf16, 1 prompt x 64, generate", 1, 64, padded),
        ),
    ),
)


def rate(run: Callable[[], int], expected: int) -> float:
    """Return tokens a second. Raises SystemExit where the run made another number of tokens than `expected`."""
    start = time.perf_counter()
    count = run()
    if count != expected:
        raise SystemExit(f"generated {count} tokens, expected {expected}: the two sides would not do the same work")
    return count / (time.perf_counter() - start)


def compare(llm: LLM, model: LlamaForCausalLM, vocab_size: int, load: Load) -> dict[str, Any]:
    """Run a load on both sides. Each round has new prompts, the same for both; the first of six warms up."""
    name, count, tokens, theirs = load
    rates: list[tuple[float, float]] = []
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        prompts = torch.randint(3, vocab_size, (count, PROMPT_TOKENS), generator=generator).tolist()
        runs = (partial(ours, llm, prompts, tokens), partial(theirs, model, prompts, tokens))
        rates.append((rate(runs[0], count * tokens), rate(runs[1], count * tokens)))
    headrace, reference, ratio = map(statistics.median, zip(*((a, b, a / b) for a, b in rates[1:]), strict=True))
    print(f"{name:<52} headrace {headrace:8.1f} tok/s   transformers {reference:8.1f} tok/s   ratio {ratio:.2f}")
    return {"name": name, "headrace": headrace, "transformers": reference, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    results = []
    for config, dtype, loads in LOADS:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            made: Any = LlamaForCausalLM(config)
            made.to(dtype).save_pretrained(folder)
            model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            with LLM(model=folder, skip_tokenizer_init=True, enable_prefix_caching=False) as llm:
                results += [compare(llm, model, config.vocab_size, load) for load in loads]
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
