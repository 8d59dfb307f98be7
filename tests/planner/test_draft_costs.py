"""What guessing tokens costs and gives, as predicted: per step, in a plan, and in the map of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.planner.catalogue import find_model
from headrace.planner.chips import CHIPS
from headrace.planner.deployment import Deployment
from headrace.planner.draft_costs import DraftCosts
from headrace.planner.parallel import Parallel
from headrace.planner.plan import Plan, make_plan
from headrace.planner.plan_request import PlanRequest
from headrace.planner.shapes import ModelShape

LENGTHS = (0, 2, 3)


def costs(draft: ModelShape | None) -> DraftCosts:
    model = find_model("llama-3.1-8b")
    return DraftCosts(Deployment(model, CHIPS["h200"], Parallel(), "bf16", 2, "headrace", draft=draft))


def one_layer() -> ModelShape:
    model = find_model("llama-3.1-8b")
    return replace(model, spec=replace(model.spec, layers=model.spec.layers[:1]))


def test_steps_with_guesses_are_those_that_an_h200_took() -> None:
    """8 requests in 4.23 ms without guesses and in 4.77 ms with 3 each (bench/results/drafts.json)."""
    found = costs(None)
    assert 1000 * found(8, 128, 0) == pytest.approx(4.23, rel=0.1)
    assert 1000 * found(8, 128, 3) == pytest.approx(4.77, rel=0.15)


def test_guessing_pays_for_few_requests_and_costs_many() -> None:
    found = costs(one_layer())
    gains = [found.gain(requests, 512, 3) for requests in (1, 8, 32, 128, 512)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[-1] < 0.8
    most = found.pays_up_to(512, LENGTHS)
    assert 32 < most < 256
    assert any(found.gain(most, 512, length) > 1 for length in LENGTHS)
    assert found.pays_up_to(512, LENGTHS, rate=0.0) == 0
    assert found.pays_up_to(512, LENGTHS, rate=0.4) < most < found.pays_up_to(512, LENGTHS, rate=0.8)
    assert found.describe(512, LENGTHS, rate=0.0) == "predicted never to pay where 0% of guesses are right"


def test_what_was_missed_costs_what_a_prompt_of_it_does() -> None:
    found = costs(one_layer())
    behind = [found(32, 512, 2, lag) for lag in (0, 10, 1000)]
    assert behind == sorted(behind)
    assert behind[1] < 1.2 * behind[0]
    assert costs(None)(32, 512, 2, 1000) == costs(None)(32, 512, 2)


def plan(served: str, gpus: int, **given: object) -> Plan:
    return make_plan(PlanRequest(model=served, gpu="h200", num_gpus=gpus, speculative_config=dict(given)))


def test_a_plan_says_what_guessing_gives_and_holds_what_guesses() -> None:
    alone, beside = plan("llama-3.1-70b", 2), plan("llama-3.1-70b", 2, model="llama-3.1-8b")
    assert alone.memory is not None
    assert beside.memory is not None
    assert "draft" not in alone.memory.weights
    assert beside.memory.weights["draft"] == pytest.approx(16.06e9 / 2, rel=0.001)
    more = beside.memory.kv_bytes_per_token / alone.memory.kv_bytes_per_token
    assert more == pytest.approx(1 + 32 / 80, rel=0.01)
    why = beside.decision("speculative_config").reason
    assert why.startswith("given; where 60% of guesses are right, 1.")
    assert "paying up to" in why
    assert any(notice.startswith("guesses of tokens are not in the prediction: where") for notice in beside.notices)
    unknown = plan("llama-3.1-8b", 1, model="a/model-of-which-nothing-is-known")
    assert "not predicted" in unknown.decision("speculative_config").reason
