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


def llama(vocab_size: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )


def prompts_for(config: LlamaConfig, count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, config.vocab_size, (count, PROMPT_TOKENS), generator=generator).tolist()


def transformers_padded(model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int) -> int:
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return output.numel() - ids.numel()


def transformers_batch(model: LlamaForCausalLM, prompts: list[list[int]], new_tokens: int) -> int:
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
    return sum(len(output.generated_tokens) for output in outputs.values())


def headrace_generate(llm: LLM, prompts: list[list[int]], new_tokens: int) -> int:
    return sum(map(len, greedy_tokens(llm, prompts, new_tokens)))


Load = tuple[str, int, int, Callable[[LlamaForCausalLM, list[list[int]], int], int]]
"""name, prompts, new tokens of each, what transformers runs"""
LOADS: tuple[tuple[LlamaConfig, torch.dtype, tuple[Load, ...]], ...] = (
    (
        llama(2304, 192, 512, 6, 6, 3, tied=True),
        torch.float32,
        (("2.9M fp32, 16 prompts x 32, padded generate", 16, 32, transformers_padded),),
    ),
    (
        llama(32000, 1024, 2816, 12, 16, 8, tied=False),
        torch.bfloat16,
        (
            ("200M bf16, 8 prompts x 64, generate_batch", 8, 64, transformers_batch),
            ("200M bf16, 1 prompt x 64, generate", 1, 64, transformers_padded),
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


def compare(llm: LLM, model: LlamaForCausalLM, config: LlamaConfig, load: Load) -> dict[str, Any]:
    """Run a load on both sides. Each round has new prompts, the same for both; the first of six warms up."""
    name, count, tokens, theirs = load
    rates: list[tuple[float, float]] = []
    for number in range(6):
        prompts = prompts_for(config, count, number)
        runs = (partial(headrace_generate, llm, prompts, tokens), partial(theirs, model, prompts, tokens))
        rates.append((rate(runs[0], count * tokens), rate(runs[1], count * tokens)))
    headrace = statistics.median(a for a, _ in rates[1:])
    reference = statistics.median(b for _, b in rates[1:])
    ratio = statistics.median(a / b for a, b in rates[1:])
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
                results += [compare(llm, model, config, load) for load in loads]
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
