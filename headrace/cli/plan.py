"""Runs `headrace plan`: makes a PlanRequest of the flags, and prints the plan as tables or as JSON.

The exit code is 3 where nothing runs as asked; then the nearest plan that does run is printed.
"""

from __future__ import annotations

import json

from headrace.cli.arguments import FlagParser, build_config
from headrace.planner.plan_request import PlanRequest

CANNOT_RUN = 3
EXAMPLES = """\
  headrace plan llama-3.1-405b --gpu mi300x --num-gpus 8 --input-len 128 --output-len 2048 --concurrency 64
  headrace plan deepseek-r1 --gpu h200 --num-gpus 8 --objective throughput --engine vllm --price-per-gpu-hour 3
  headrace plan ./model -tp 2 --json"""


def build_parser() -> FlagParser:
    parser = FlagParser("plan", "Plan a model on GPUs that need not be here: memory, settings, speed, cost.", EXAMPLES)
    parser.add_knobs(PlanRequest)
    return parser


def main(argv: list[str]) -> int:
    request = build_config(PlanRequest, build_parser().parse(argv))

    from headrace.planner.plan import make_plan

    plan = make_plan(request)
    if request.json:
        from headrace.planner.plan_json import to_json

        print(json.dumps(to_json(plan), indent=1))
    else:
        from headrace.cli.plan_tables import print_plan

        print_plan(plan)
    return 0 if plan.feasible else CANNOT_RUN
