"""Measures what a parser costs for each token: microseconds, over an answer of 2,000 tokens fed one at a time.

    python bench/parsers.py [--json FILE]

Each format reads plain text, and calls with long arguments written as its family writes them. No GPU and no model is
needed. The best of several runs counts, so that other work on the machine does not.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from pathlib import Path

from headrace.parsers.output_parser import OutputParser
from headrace.parsers.table import REASONING_FORMATS, TOOL_FORMATS

TOKENS = 2000
WORDS = [" the", " a", " of", "quick", ".", " and", "\n", " a < b", " foo", ", ", " [1]", " {x}", " 17"]
CODE = "def area(width, height):\\n    return width * height\\n\\n"
CALLS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""What stands before and behind a long text in a call, by format."""


def plain_tokens(rng: random.Random) -> list[str]:
    """An answer without calls; a few of its characters could begin one."""
    return rng.choices(WORDS, weights=[6, 6, 6, 6, 4, 6, 1, 1, 6, 6, 1, 1, 2], k=TOKENS)


def call_tokens(before: str, after: str) -> list[str]:
    """A call whose argument is a long piece of code, in pieces of four characters."""
    code = (CODE * (TOKENS * 4 // len(CODE) + 1))[: TOKENS * 4 - len(before) - len(after)]
    text = before + code + after
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def microseconds(name: str, tokens: list[str]) -> float:
    """The time for each token, of the fastest of seven runs."""
    times = []
    for _ in range(7):
        parser = OutputParser(TOOL_FORMATS[name], REASONING_FORMATS["qwen3"], (), False)
        start = time.perf_counter()
        for token in tokens:
            parser.feed(token)
        parser.finish(cut=False)
        times.append(time.perf_counter() - start)
    return min(times) / len(tokens) * 1e6


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="where to write the results")
    args = options.parse_args()
    rng = random.Random(0)
    plain = plain_tokens(rng)
    rows = {}
    print(f"{'format':16}{'plain':>8}{'call':>8}   us a token")
    for name, around in CALLS.items():
        answers = {"plain": plain, "call": call_tokens(*around)}
        rows[name] = {kind: round(microseconds(name, tokens), 2) for kind, tokens in answers.items()}
        print(f"{name:16}{rows[name]['plain']:8.2f}{rows[name]['call']:8.2f}")
    if args.json:
        machine = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
        args.json.write_text(json.dumps({"tokens": TOKENS, "machine": machine, "us_per_token": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
