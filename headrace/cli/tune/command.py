"""`headrace tune`: its flags. Loads the rest when it runs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.cli.arguments import FlagParser, build_config
from headrace.config import EngineConfig, check_knobs, knob

EXAMPLES = """\
  headrace tune demo --input-len 16 --output-len 8 --num-prompts 8 --budget 60s
  headrace tune meta-llama/Llama-3.1-8B-Instruct --input-len 1024 --output-len 128 --request-rate 16
  headrace tune ./model -tp 2 --knobs max_num_batched_tokens,cudagraph_mode --objective throughput --budget 30m"""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    input_len: int = knob(1024, "Tokens of a prompt.", minimum=1, group="tuning")
    output_len: int = knob(128, "Tokens of an answer.", minimum=1, group="tuning")
    num_prompts: int = knob(200, "Requests of each measurement.", minimum=1, group="tuning")
    request_rate: float | None = knob(
        None,
        "Measure waiting times at this many requests a second too; default: under full load alone.",
        minimum=1e-9,
        group="tuning",
    )
    concurrency: int | None = knob(
        None,
        "Most requests in flight under full load; default: all at once.",
        minimum=1,
        aliases=("--max-concurrency",),
        group="tuning",
    )
    budget: str = knob("10m", "Start no trial that would end after this (90s, 10m, 1h).", group="tuning")
    knobs: str | None = knob(
        None,
        "What to vary, separated by commas: max_num_batched_tokens, max_num_seqs, cudagraph_mode, kv_cache_dtype, "
        "attention_backend; default: all, but kv_cache_dtype, which rounds, wins only if it is named here.",
        group="tuning",
    )
    output: str | None = knob(
        None, "Folder of trials.jsonl, report.html and pareto.png; default: in the cache folder.", group="tuning"
    )
    fresh: bool = knob(False, "Measure anew what an earlier run has measured.", group="tuning")
    json: bool = knob(False, "Print JSON.", group="tuning")

    def __post_init__(self) -> None:
        check_knobs(self)


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
