"""`headrace tune`: from flags to a session. Loads the rest when it runs."""

from __future__ import annotations

from headrace.cli.arguments import FlagParser, build_config
from headrace.cli.tune.options import TuneOptions
from headrace.config import EngineConfig

EXAMPLES = """\
  headrace tune demo --input-len 16 --output-len 8 --num-prompts 8 --budget 60s
  headrace tune meta-llama/Llama-3.1-8B-Instruct --input-len 1024 --output-len 128 --request-rate 16
  headrace tune ./model -tp 2 --knobs max_num_batched_tokens,cudagraph_mode --objective throughput --budget 30m"""


def build_parser() -> FlagParser:
    summary = "Measure settings around the plan on this machine, and keep what is better for serve and LLM."
    parser = FlagParser("tune", summary, EXAMPLES)
    parser.add_knobs(TuneOptions)
    parser.add_knobs(EngineConfig, skip=("use_profile",))
    return parser


def main(argv: list[str]) -> int:
    values = build_parser().parse(argv)
    options, config = build_config(TuneOptions, values), build_config(EngineConfig, values)

    from headrace.cli.tune.session import Session

    return Session(options, config).run()
