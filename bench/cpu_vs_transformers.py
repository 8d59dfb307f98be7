"""headrace against transformers on this CPU, side by side in one run: interleaved, median of several rounds.

    python bench/cpu_vs_transformers.py [--rounds 5] [--output-json FILE]

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
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams

PROMPT_TOKENS = 32
SMALL = LlamaConfig(
    vocab_size=2304,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=3,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
LARGE = LlamaConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    max_position_embeddings=512,
    tie_word_embeddings=False,
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
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def rate(run: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    count = run()
    if count != expected:
        raise SystemExit(f"generated {count} tokens, expected {expected}: the two sides would not do the same work")
    return count / (time.perf_counter() - start)


def compare(
    name: str, ours: Callable[[int], int], theirs: Callable[[int], int], expected: int, rounds: int
) -> dict[str, float | str]:
    """Each round gets fresh prompts (its number seeds them), the same for both; round 0 warms up."""
    rates: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        pair = (rate(lambda n=number: ours(n), expected), rate(lambda n=number: theirs(n), expected))
        if number:
            rates.append(pair)
    headrace = statistics.median(a for a, _ in rates)
    reference = statistics.median(b for _, b in rates)
    ratio = statistics.median(a / b for a, b in rates)
    print(f"{name:<52} headrace {headrace:8.1f} tok/s   transformers {reference:8.1f} tok/s   ratio {ratio:.2f}")
    return {"name": name, "headrace": headrace, "transformers": reference, "ratio": ratio}


def open_pair(config: LlamaConfig, dtype: torch.dtype, folder: Path) -> tuple[LLM, LlamaForCausalLM]:
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    llm = LLM(model=str(folder), skip_tokenizer_init=True, enable_prefix_caching=False)
    return llm, reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        llm, model = open_pair(SMALL, torch.float32, Path(folder) / "small")
        results.append(
            compare(
                "2.9M fp32, 16 prompts x 32, padded generate",
                lambda n: headrace_generate(llm, prompts_for(SMALL, 16, n), 32),
                lambda n: transformers_padded(model, prompts_for(SMALL, 16, n), 32),
                16 * 32,
                args.rounds,
            )
        )
        llm.shutdown()
        llm, model = open_pair(LARGE, torch.bfloat16, Path(folder) / "large")
        for name, count, theirs in (
            ("200M bf16, 8 prompts x 64, generate_batch", 8, transformers_batch),
            ("200M bf16, 1 prompt x 64, generate", 1, transformers_padded),
        ):
            results.append(
                compare(
                    name,
                    lambda n, count=count: headrace_generate(llm, prompts_for(LARGE, count, n), 64),
                    lambda n, count=count, theirs=theirs: theirs(model, prompts_for(LARGE, count, n), 64),
                    count * 64,
                    args.rounds,
                )
            )
        llm.shutdown()
    if args.output_json:
        args.output_json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
