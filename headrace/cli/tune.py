"""`headrace tune`: reads the flags and runs a tuning session (advice/tune)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.advice.tune.options import TuneOptions
from headrace.cli.arguments import FlagParser, build_config
from headrace.config import EngineConfig

if TYPE_CHECKING:
    from headrace.advice.tune.session import Session

EXAMPLES = """\
  headrace tune demo --input-len 16 --output-len 8 --num-prompts 8 --budget 60s
  headrace tune meta-llama/Llama-3.1-8B-Instruct --input-len 1024 --output-len 128 --request-rate 16
  headrace tune ./model -tp 2 --knobs max_num_batched_tokens,cudagraph_mode --objective throughput --budget 30m"""


def build_parser() -> FlagParser:
    """Return the parser of the command's own flags and the engine's."""
    summary = "Measure settings around the plan on this machine, and keep what is better for serve and LLM."
    parser = FlagParser("tune", summary, EXAMPLES)
    parser.add_knobs(TuneOptions)
    parser.add_knobs(EngineConfig, skip=("use_profile",))
    return parser


def main(argv: list[str]) -> int:
    """Run the command; the exit code is 0 wherever at least the plan was measured."""
    return make_session(argv).run()


def make_session(argv: list[str]) -> Session:
    """Return the session that the flags ask for. Raises ConfigError for what cannot be measured."""
    values = build_parser().parse(argv)
    options, config = build_config(TuneOptions, values), build_config(EngineConfig, values)

    from headrace.advice.tune.session import Session
    from headrace.cli.bench.offline import check_lengths, model_facts

    check_lengths(options.input_len + options.output_len, model_facts(config)[1])
    return Session(options, config)
