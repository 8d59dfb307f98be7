"""Parses the flags of `headrace bench`, then imports the chosen benchmark alone."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from headrace.cli.arguments import FlagParser
from headrace.cli.bench.options import DatasetOptions, LatencyOptions, ServeBenchOptions, ThroughputOptions
from headrace.config import EngineConfig
from headrace.errors import ConfigError


@dataclass(frozen=True)
class Bench:
    """Describes one benchmark for the command line."""

    summary: str
    options: tuple[type, ...]
    examples: str
    engine: bool = False
    """It runs an engine of its own, so it takes EngineConfig's flags."""


BENCHES = {
    "latency": Bench(
        "End-to-end latency of one batch of random prompts, and the time of a decode step.",
        (LatencyOptions,),
        """\
  headrace bench latency demo --batch-size 1 --input-len 128 --output-len 128
  headrace bench latency --model ./config-only --load-format dummy --skip-tokenizer-init --output-json out.json""",
        engine=True,
    ),
    "throughput": Bench(
        "Offline throughput over many prompts.",
        (ThroughputOptions, DatasetOptions),
        """\
  headrace bench throughput demo --num-prompts 100 --random-input-len 128 --random-output-len 128
  headrace bench throughput ./model --dataset ShareGPT.json --num-prompts 1000 --output-json out.json""",
        engine=True,
    ),
    "serve": Bench(
        "A running OpenAI-compatible server under load: TTFT, TPOT, ITL, E2EL.",
        (ServeBenchOptions, DatasetOptions),
        """\
  headrace bench serve --num-prompts 100 --random-input-len 128 --random-output-len 128 --ignore-eos
  headrace bench serve --base-url http://host:8000 --request-rate 4 --burstiness 0.5 --max-concurrency 64
  headrace bench serve --dataset-path AzureLLMInferenceTrace_conv.csv --num-prompts 500 --trace-speed 2""",
    ),
}
HELP = """\
usage: headrace bench {names} [MODEL] [flags]

benchmarks:
{benches}

examples:
{examples}"""


def build_parser(name: str) -> FlagParser:
    bench = BENCHES[name]
    parser = FlagParser(f"bench {name}", bench.summary, bench.examples)
    for options in bench.options:
        parser.add_knobs(options)
    if bench.engine:
        # Dataset and engine share --seed. With repeated prompts a prefix cache would distort the result.
        skip: tuple[str, ...] = ("seed",) if DatasetOptions in bench.options else ()
        parser.add_knobs(EngineConfig, skip=skip, enable_prefix_caching=False)
    return parser


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(
            HELP.format(
                names="{" + ",".join(BENCHES) + "}",
                benches="\n".join(f"  {name:10}  {bench.summary}" for name, bench in BENCHES.items()),
                examples="\n".join(bench.examples.splitlines()[0] for bench in BENCHES.values()),
            )
        )
        return 0
    if argv[0] not in BENCHES:
        near = difflib.get_close_matches(argv[0], BENCHES, 1)
        hint = f"did you mean {near[0]}?" if near else f"benchmarks are {', '.join(BENCHES)}"
        raise ConfigError(f"unknown benchmark {argv[0]!r}; {hint}")
    values: Any = build_parser(argv[0]).parse(argv[1:])
    return int(importlib.import_module(f"headrace.cli.bench.{argv[0]}").run(values))
