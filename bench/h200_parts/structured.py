"""Measures what grammars cost: output tokens a second and step times of one schema in every request, and of as many
schemas as requests, beside the same requests without; and the first token of a request whose schema is new.

All requests begin at once in the engine's core, in this process, and write as many tokens each: the schema asks for a
list that never needs to end. The kinds of traffic take turns; a figure is the median of its runs. A step's time is that
from one result to the next, for steps of decodes alone.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import tokenizers

from h200_parts.models import MODELS
from h200_parts.rows import Result
from h200_parts.run import Run
from headrace.config import EngineConfig
from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.tokenizer import Tokenizer
from headrace.hub import resolve_model_folder
from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from headrace.structured_outputs.schema import grammar_of_schema

IN_FLIGHT, SCHEMAS = 128, 200
"""Requests of one schema, and of a schema each."""
PROMPT_TOKENS, TOKENS = 64, 64
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


class Measured(NamedTuple):
    """Holds one run's figures; times in milliseconds."""

    tokens_per_second: float
    first_token: float
    step_p50: float
    step_p99: float
    step_p999: float
    masks_p50: float
    """making the masks of a step, while the device computes its forward"""
    masks_p99: float

    def __str__(self) -> str:
        steps = f"steps p50 / p99 / p99.9 {self.step_p50:.2f} / {self.step_p99:.2f} / {self.step_p999:.2f} ms"
        masks = f"masks p50 / p99 {self.masks_p50:.2f} / {self.masks_p99:.2f} ms"
        return f"{self.tokens_per_second:.0f} tok/s, {steps}, {masks}"


def run_grammars(core: EngineCore, grammars: list[str], num_tokens: int) -> Measured:
    """Run a request for each grammar, all at once; an empty one is none."""
    params, draw = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=1.0), random.Random(0)
    began = last = time.perf_counter()
    for number, grammar in enumerate(grammars):
        prompt = [draw.randrange(256) for _ in range(PROMPT_TOKENS)]
        request = EngineCoreRequest(
            request_id=str(number), prompt_token_ids=prompt, params=params, max_tokens=num_tokens, seed=number,
            grammar=grammar,
        )  # fmt: skip
        core.add_request(request)
    times, masks, first, tokens, begun = list[float](), list[float](), 0.0, 0, set[str]()
    masked = core.snapshot([]).stats.mask_seconds
    while core.has_work():
        if (stepped := core.step()) is None or not (outputs := stepped.outputs):
            continue
        now = time.perf_counter()
        if failed := [output.error for output in outputs if output.error]:
            raise RuntimeError(f"a request failed: {failed[0]}")
        tokens += sum(len(output.new_token_ids) for output in outputs)
        first = first or 1e3 * (now - began)
        if len(outputs) == len(grammars) == len(begun):
            times.append(1e3 * (now - last))
            masks.append(1e3 * (stepped.stats.mask_seconds - masked))
        begun |= {output.request_id for output in outputs}
        masked, last = stepped.stats.mask_seconds, now
    steps = numpy.percentile(times or [0.0], (50, 99, 99.9)).tolist()
    return Measured(tokens / (last - began), first, *steps, *numpy.percentile(masks or [0.0], (50, 99)).tolist())


def structured_rows(run: Run) -> None:
    """Emit rows of the 8B with the vocabulary of --tokenizer or, without one, of the demo model."""
    run.measure_chip()
    settings = run.settings
    folder = Path(settings.tokenizer or resolve_model_folder("demo"))
    entries = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    config = MODELS["bf16"].shape(run.smoke)
    config |= {"vocab_size": max(config["vocab_size"], -(-entries // 128) * 128)}
    model = settings.write_config("structured", config)
    engine = EngineConfig(**settings.engine_knobs(MODELS["bf16"]) | {"model": model})
    core = build_core(engine, Path(model), False, tokenizer=Tokenizer.from_folder(folder))
    some, many, rng = settings.requests(IN_FLIGHT), settings.requests(SCHEMAS), random.Random()
    traffic: dict[str, Callable[[], list[str]]] = {
        "plain": lambda: [""] * some,
        "one schema": lambda: [grammar_of(LIST)] * some,
        "plain of many": lambda: [""] * many,
        "many schemas": lambda: [grammar_of(fresh_schema(rng)) for _ in range(many)],
        "plain alone": lambda: [""],
        "new schema alone": lambda: [grammar_of(fresh_schema(rng))],
    }
    runs: dict[str, list[Measured]] = {name: [] for name in traffic}
    try:
        for _ in range(1 + settings.repeats):  # one captures graphs and compiles what is compiled once
            for name, made in traffic.items():
                runs[name].append(run_grammars(core, made(), settings.tokens(TOKENS)))
    finally:
        core.shutdown()
    found = {name: Measured(*numpy.median(each[1:], axis=0).tolist()) for name, each in runs.items()}
    for row, with_schemas, without in (("one", "one schema", "plain"), ("many", "many schemas", "plain of many")):
        ours, plain = found[with_schemas], found[without]
        notes = [f"{with_schemas}: {ours}", f"{without}: {plain}"]
        share = 100 * ours.tokens_per_second / plain.tokens_per_second
        run.emit(Result(f"structured/{row}", share, notes=notes))
        run.emit(Result(f"structured/{row}/p99.9", ours.step_p999 / (plain.step_p999 or 1.0)))
    later = found["new schema alone"].first_token - found["plain alone"].first_token
    run.emit(Result("structured/first-token", later))
