"""What a step tells of rows that it could not sample from, and whose fault that was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.request import EngineCoreRequest
from headrace.sampling_params import SamplingParams
from tests.runner.harness import make_core, make_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
FORBIDS_ALL = SamplingParams(temperature=0.0, max_tokens=4, allowed_token_ids=[60], min_tokens=4)
"""Only the end token is allowed, and it is not allowed yet."""


def request(name: str, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=[5, 9], params=params, max_tokens=4, seed=0, stop_token_ids=[60]
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_told_from_requests_that_forbid_everything(value: float) -> None:
    runner = make_runner("llama", "NONE")
    model: Any = runner.model
    core = make_core(runner, num_blocks=26)
    errors: list[str | None] = []

    def run(*requests: EngineCoreRequest) -> str:
        """-> the problem of /health after them"""
        for one in requests:
            core.add_request(one)
        errors.clear()
        while core.has_work():
            stepped = core.step()
            errors.extend(output.error for output in stepped.outputs if output.finish_reason) if stepped else None
        return core.snapshot([]).stats.problem

    for number in range(6):
        assert not run(request(f"own {number}", FORBIDS_ALL))
        assert "allowed_token_ids" in (errors[0] or "")
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden: compute_logits(hidden).index_fill(1, torch.tensor([7]), value)
    for number in range(3):
        found = run(request(f"a {number}", GREEDY), request(f"b {number}", FORBIDS_ALL))
        assert ["NaN or Inf" in (error or "") for error in errors] == [True, True]
    assert "the model gave every request NaN or Inf logits" in found
    model.compute_logits = compute_logits
    assert not run(request("good", GREEDY))
    assert errors == [None]
