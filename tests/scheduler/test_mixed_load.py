"""Prompts beside running decodes: how large a step may be. tests/planner/test_simulate.py says what it is for."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.scheduler.config import BACKLOG_FACTOR, BACKLOG_STEPS
from headrace.scheduler.plan import StepPlan
from headrace.scheduler.scheduler import Scheduler

from .support import batch, make_request, make_scheduler, run_step

KNEE = 16


def mixed(**changes: object) -> Scheduler:
    """Room for everything; a step with decodes has `KNEE` tokens."""
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 512, "num_blocks": 4096}
    return make_scheduler(**{**settings, "mixed_step_tokens": KNEE, "enable_prefix_caching": False, **changes})


def decoding(scheduler: Scheduler, count: int) -> None:
    for index in range(count):
        scheduler.add_request(make_request(f"d{index}", 1, max_tokens=400))
    run_step(scheduler)


def prompt_tokens(scheduler: Scheduler) -> int:
    step, _ = run_step(scheduler)
    decodes = sum(request_id[0] == "d" for request_id in batch(scheduler, step))
    return step.num_tokens - decodes


def test_without_decodes_prompts_have_the_whole_budget() -> None:
    scheduler = mixed()
    scheduler.add_request(make_request("p", 300))
    assert [run_step(scheduler)[0].num_tokens for _ in range(2)] == [256, 44]


def test_beside_decodes_a_prompt_is_cut_to_the_mixed_step() -> None:
    scheduler = mixed()
    decoding(scheduler, 3)
    scheduler.add_request(make_request("p", 40))
    assert [prompt_tokens(scheduler) for _ in range(5)] == [13, 13, 13, 1, 1]  # the last: its own decode


def test_many_decodes_leave_prompts_half_of_a_mixed_step() -> None:
    scheduler = mixed()
    decoding(scheduler, 20)
    scheduler.add_request(make_request("p", 40))
    assert prompt_tokens(scheduler) == KNEE // 2


def test_the_token_budget_stays_the_hard_limit() -> None:
    scheduler = mixed(max_num_batched_tokens=33)
    decoding(scheduler, 31)
    scheduler.add_request(make_request("p", 400))
    assert prompt_tokens(scheduler) == 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_backlog_raises_the_mixed_step(waits: bool) -> None:
    """Whether its tokens wait, or are what is left of one long prompt."""
    scheduler = mixed()
    decoding(scheduler, 1)
    lengths = [60] * 5 if waits else [300]
    for index, length in enumerate(lengths):
        scheduler.add_request(make_request(f"p{index}", length))
    step, _ = run_step(scheduler)
    assert step.num_tokens == 300 // BACKLOG_STEPS
    step, _ = run_step(scheduler)
    assert step.num_tokens == (301 - 300 // BACKLOG_STEPS) // BACKLOG_STEPS


def test_a_backlog_that_would_raise_it_a_little_does_not() -> None:
    scheduler = mixed()
    decoding(scheduler, 1)
    scheduler.add_request(make_request("p", BACKLOG_STEPS * BACKLOG_FACTOR * KNEE))
    assert [run_step(scheduler)[0].num_tokens for _ in range(3)] == [BACKLOG_FACTOR * KNEE, KNEE, KNEE]


def test_preempted_requests_count_among_the_backlog() -> None:
    scheduler = mixed()
    decoding(scheduler, 1)
    scheduler.add_request(make_request("p", 300))
    run_step(scheduler)
    waiting = scheduler.requests["p"]
    scheduler._preempt(waiting, StepPlan())
    assert prompt_tokens(scheduler) == 300 // BACKLOG_STEPS - 1


def test_prompts_that_may_not_be_cut_run_beside_decodes() -> None:
    scheduler = mixed(enable_chunked_prefill=False, max_num_batched_tokens=512)
    decoding(scheduler, 3)
    scheduler.add_request(make_request("p", 200))
    assert prompt_tokens(scheduler) == 200


def test_a_mixed_step_has_a_token_at_least() -> None:
    with pytest.raises(ConfigError, match="mixed_step_tokens must be at least 1, got 0"):
        mixed(mixed_step_tokens=0)
