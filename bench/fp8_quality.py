"""What do 8-bit weights, activations and caches cost in quality?

    python bench/fp8_quality.py [--device cuda] [--models demo,8b4l] [--json FILE]

Teacher-forced against the same engine in 16 bits: ||logits - theirs|| / ||theirs||, and by how much the perplexity of
the tokens grows. `demo` is the demo model on a few stories, `8b4l` four layers of Llama-3.1-8B's shape with random
weights that prefer some token (h200_parts/numerics.py), on tokens of its own. On a CPU, `8b4l` is a toy of that kind.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from h200_parts.forced import Sequence, run, stepped_core
from h200_parts.numerics import NEW_TOKENS, VARIANTS, compare, write_random_model
from h200_parts.settings import Settings

from headrace.config import EngineConfig
from headrace.engine.tokenizer import Tokenizer
from headrace.hub import resolve_model_folder

OPENING = 4
"""tokens of a story that are given; the others are asked for"""
STORIES = """
Once upon a time, there was a little dog named Max. Max loved to play with his red ball in the garden. One day, the ball
rolled under a big tree. Max looked and looked, but he could not find it. Then a bird came and said, "I can help you!"

One day, Lily and her mom went to the park. Lily saw a boy who was sad because his kite was broken. She asked her mom if
they could help him. They fixed the kite with some tape, and the boy smiled. They all played until the sun went down.

There was a small fish who lived in a blue lake. The fish wanted to see the moon. Every night it swam up to the top of
the water and looked at the sky. A frog sat on a leaf and asked what it was doing. They became good friends.

Tom had a new truck. It was big and yellow. He took it to the beach to dig in the sand. A girl came and asked if she
could play too. Tom did not want to share, but then he saw that she was alone. They built a castle together.
"""

Prompts = list[list[int]]


def measure(
    folder: Path, knobs: dict[str, Any], batches: list[Prompts], told: list[Prompts] | None
) -> list[dict[str, Any]]:
    """A row a variant. `told`: how the prompts go on; None: as the model in 16 bits says."""

    def sequences(changes: dict[str, Any], forced: list[Prompts] | None) -> list[Sequence]:
        with stepped_core(EngineConfig(model=str(folder), **knobs | changes), folder) as core:
            found: list[Sequence] = []
            for index, prompts in enumerate(batches):
                tokens = None if forced is None else forced[index]
                found += run(core, prompts, NEW_TOKENS if tokens is None else len(tokens[0]), tokens)
        return found

    reference = sequences({}, told)
    if told is None:
        tokens = iter(reference)
        told = [[next(tokens).tokens for _ in prompts] for prompts in batches]
    return [{"variant": name} | asdict(compare(sequences(knob, told), reference)) for name, knob in VARIANTS.items()]


def demo_texts(folder: Path) -> tuple[Prompts, Prompts]:
    """-> (openings, how they go on), all of one length."""
    tokenizer = Tokenizer.from_folder(folder)
    stories = [list(tokenizer.encode(" ".join(text.split()))) for text in STORIES.strip().split("\n\n")]
    length = min(map(len, stories))
    return [ids[:OPENING] for ids in stories], [ids[OPENING:length] for ids in stories]


def random_prompts(vocab_size: int, longest: int) -> list[Prompts]:
    """A batch of one, and one of 32."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (33,), generator=generator).tolist()
    prompts = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [prompts[:1], prompts[1:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", default="demo,8b4l")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    knobs = {"device": args.device, "enable_prefix_caching": False, "gpu_memory_utilization": 0.3}
    knobs |= {"dtype": args.dtype, "kv_cache_dtype": args.dtype}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for model in args.models.split(","):
            told: list[Prompts] | None = None
            if model == "demo":
                folder, length = resolve_model_folder("demo"), 256
                openings, rest = demo_texts(folder)
                batches, told = [openings], [rest]
            else:
                folder = write_random_model(Path(work) / model, Settings(Path(work), smoke=args.device == "cpu"))
                vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
                length, batches = 1024, random_prompts(vocab_size, 512 if args.device == "cuda" else 16)
            sizes = {"max_model_len": length, "num_gpu_blocks_override": 4096 if args.device == "cuda" else 512}
            rows += [{"model": model} | row for row in measure(folder, knobs | sizes, batches, told)]
    print(f"{'model':8}{'variant':14}{'logit error':>12}{'perplexity':>12}{'positions':>11}")
    for row in rows:
        print(
            f"{row['model']:8}{row['variant']:14}{row['error']:12.4f}{row['perplexity_change']:+12.2%}"
            f"{row['positions']:11d}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
