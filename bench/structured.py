"""Measures what grammars cost: output tokens per second and step times of one schema in every request, and of as many
schemas as requests, beside the same requests without; and the first token of a request whose schema is new.

    python bench/structured.py [MODEL]                                        the demo model on a CPU
    python bench/structured.py --make-8b --tokenizer DIR --in-flight 128      random weights of Llama-3.1-8B's shapes,
                                                                              with the vocabulary of DIR's tokenizer

All requests begin at once in the engine's core, in this process, and write --tokens tokens each: the schema asks for a
list that never needs to end. Each figure is the median of --repeats runs that take turns. A step's time is that from
one result to the next, for steps of decodes alone; ratios are to the runs without grammars. Prints a table; --json
writes it to a file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from h200_parts.models import LLAMA_8B

from headrace.config import EngineConfig
from headrace.engine.async_engine import model_folder
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.tokenizer import load_tokenizer
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs.schema import grammar_of_schema

PROMPT_TOKENS = 64
LIST: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""the schema of one list that never needs to end"""


def grammar_of(schema: dict[str, Any]) -> str:
    """Return the grammar that a client gets for a JSON schema, as the engine's core takes it."""
    return grammar_of_schema(schema, "schema").to_text()


def fresh_schema(rng: random.Random) -> dict[str, Any]:
    """Return a schema like LIST that was never seen: twelve properties with new names, types and values."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": rng.randint(5, 60)},
        lambda: {"type": "integer", "minimum": rng.randint(-1000, 0)},
        lambda: {"enum": [f"value {rng.random()}" for _ in range(rng.randint(2, 9))]},
        lambda: {"type": "array", "items": {"type": "boolean"}, "maxItems": rng.randint(1, 9)},
        lambda: {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
    ]
    properties = {f"field_{rng.getrandbits(32)}": rng.choice(kinds)() for _ in range(12)}
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {**LIST, "items": item}


@dataclass(frozen=True)
class Measured:
    """Holds one run's figures; times in milliseconds."""

    tokens_per_second: float
    step_p50: float
    step_p99: float
    step_p999: float
    masks_p50: float
    """Making the masks of a step, while the device computes its forward."""
    masks_p99: float
    first_token: float


class Bench:
    """Runs requests on one engine core."""

    def __init__(self, core: EngineCore, vocab_size: int, num_tokens: int) -> None:
        self.core, self.num_tokens = core, num_tokens
        self.rng = random.Random(0)
        self.vocab_size = vocab_size
        self._number = 0

    def run(self, grammars: list[str], num_tokens: int | None = None) -> Measured:
        """Run a request for each grammar, all at once; an empty one is none."""
        num_tokens = num_tokens or self.num_tokens
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0)
        began = time.perf_counter()
        for grammar in grammars:
            self._number += 1
            prompt = [self.rng.randrange(self.vocab_size) for _ in range(PROMPT_TOKENS)]
            request = EngineCoreRequest(
                request_id=str(self._number), prompt_token_ids=prompt, params=params, max_tokens=num_tokens,
                seed=self._number, grammar=grammar,
            )  # fmt: skip
            self.core.add_request(request)
        times, masks, first, tokens, last = list[float](), list[float](), 0.0, 0, time.perf_counter()
        masked, begun = self.core.snapshot([]).stats.mask_seconds, set[str]()
        while self.core.has_work():
            if (stepped := self.core.step()) is None:
                continue
            now, outputs = time.perf_counter(), stepped.outputs
            if failed := [output.error for output in outputs if output.error]:
                raise RuntimeError(f"a request failed: {failed[0]}")
            if outputs:
                tokens += sum(len(output.new_token_ids) for output in outputs)
                first = first or now - began
                if len(outputs) == len(grammars) == len(begun):
                    times.append(now - last)
                    masks.append(stepped.stats.mask_seconds - masked)
                masked = stepped.stats.mask_seconds
                begun |= {output.request_id for output in outputs}
                last = now
        typical, most, all_but_one = (share_of(times, share) for share in (0.5, 0.99, 0.999))
        of_masks = share_of(masks, 0.5), share_of(masks, 0.99)
        return Measured(tokens / (last - began), typical, most, all_but_one, *of_masks, 1e3 * first)


def share_of(times: list[float], share: float) -> float:
    """Return the time in milliseconds that no more than such a share of them stay below; 0 of none."""
    return 1e3 * sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


def middle(runs: list[Measured]) -> Measured:
    """Return the median of each figure."""
    return Measured(*(median(getattr(run, name) for run in runs) for name in Measured.__dataclass_fields__))


def measure(bench: Bench, in_flight: int, schemas: int, repeats: int) -> dict[str, Measured]:
    """Return the figures of each kind of traffic; the kinds take turns."""
    one, rng = grammar_of(LIST), random.Random()
    kinds: dict[str, Callable[[], Measured]] = {
        f"plain, {in_flight}": lambda: bench.run([""] * in_flight),
        f"one schema, {in_flight}": lambda: bench.run([one] * in_flight),
        f"plain, {schemas}": lambda: bench.run([""] * schemas),
        f"{schemas} schemas": lambda: bench.run([grammar_of(fresh_schema(rng)) for _ in range(schemas)]),
        "plain, alone": lambda: bench.run([""], 2),
        "a new schema, alone": lambda: bench.run([grammar_of(fresh_schema(rng))], 2),
    }
    for run in kinds.values():  # captures graphs and compiles what is compiled once
        run()
    runs: dict[str, list[Measured]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, run in kinds.items():
            runs[name].append(run())
    return {name: middle(found) for name, found in runs.items()}


def table(found: dict[str, Measured]) -> str:
    """Return the figures as Markdown, each second line with its ratio to the line before it."""
    lines = ["| traffic | output tok/s | step p50 | p99 | p99.9 | masks p50 | p99 | first token |"]
    lines.append("|---|" + "--:|" * 7)
    plain: Measured | None = None
    for name, now in found.items():
        cells = [f"{now.tokens_per_second:.0f}", f"{now.step_p50:.2f} ms", f"{now.step_p99:.2f} ms"]
        cells += [f"{now.step_p999:.2f} ms", f"{now.masks_p50:.2f} ms", f"{now.masks_p99:.2f} ms"]
        cells.append(f"{now.first_token:.2f} ms")
        if name.startswith("plain"):
            plain = now
        elif plain is not None:
            cells[0] += f" ({now.tokens_per_second / plain.tokens_per_second:.1%})"
            cells[3] += f" ({now.step_p999 / (plain.step_p999 or 1.0):.2f} x)"
            cells[6] += f" ({now.first_token - plain.first_token:+.2f})"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--make-8b", action="store_true", help="random weights of Llama-3.1-8B's shapes")
    parser.add_argument("--tokenizer", help="folder of the tokenizer whose vocabulary the model is to have")
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--schemas", type=int, default=24, help="different schemas at once")
    parser.add_argument("--tokens", type=int, default=64, help="that each request writes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-structured-") as work:
        rows = max(options.in_flight, options.schemas)
        settings: dict[str, Any] = {"model": options.model, "tokenizer": options.tokenizer, "max_num_seqs": rows}
        if options.make_8b:
            vocab = {"vocab_size": 151936} if options.tokenizer else {}
            (Path(work) / "config.json").write_text(json.dumps(LLAMA_8B | vocab))
            settings |= {"model": work, "load_format": "dummy", "dtype": "bfloat16", "max_model_len": 8192}
        config = EngineConfig(**settings, enable_prefix_caching=False)
        folder = model_folder(config)
        tokenizer = load_tokenizer(config, folder)
        core = build_core(config, folder, False, tokenizer=tokenizer)
        try:
            bench = Bench(core, 256, options.tokens)
            found = measure(bench, options.in_flight, options.schemas, options.repeats)
            stats = core.snapshot([]).stats
        finally:
            core.shutdown()
    print(table(found))
    print(f"{stats.num_grammars} grammars compiled; masks were made for {stats.mask_seconds:.2f} s")
    if options.json:
        options.json.write_text(json.dumps({name: vars(run) for name, run in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
