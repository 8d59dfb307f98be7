"""Prompts beside running decodes: how large a step may be, and what that does to latency on a simulated GPU."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from headrace.errors import ConfigError
from headrace.scheduler.config import BACKLOG_FACTOR, BACKLOG_STEPS
from headrace.scheduler.plan import StepPlan
from headrace.scheduler.scheduler import Scheduler

from .support import batch, make_request, make_scheduler, results, run_step

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


# ---- on a simulated GPU


def milliseconds(num_tokens: int) -> float:
    """A step of 8 billion weights in bf16: reading them, or multiplying with them, whichever takes longer."""
    return max(4.6, 0.0245 * num_tokens) + 0.3


@dataclass
class Served:
    first_token: list[float] = field(default_factory=list)
    """milliseconds from arrival to first token"""
    between_tokens: list[float] = field(default_factory=list)
    """milliseconds"""
    num_tokens: int = 0
    milliseconds: float = 0.0


def serve(arrivals: list[float], prompt: int, output: int, mixed_step_tokens: int | None) -> Served:
    """`arrivals` in milliseconds, ascending. A step is scheduled while the one before it runs, as the core does."""
    scheduler = mixed(
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        block_size=16,
        num_blocks=60_000,
        mixed_step_tokens=mixed_step_tokens,
    )
    served, seen_at, arrived = Served(), {}, {}
    waiting, in_flight = deque(enumerate(arrivals)), deque()
    now = free_at = 0.0
    while waiting or scheduler.has_work():
        while waiting and waiting[0][1] <= now:
            index, at = waiting.popleft()
            arrived[f"{index:05}"] = at
            scheduler.add_request(make_request(f"{index:05}", prompt, output))
        if len(in_flight) < 2 and (step := scheduler.schedule()) is not None:
            free_at = max(now, free_at) + milliseconds(step.num_tokens)
            in_flight.append((step, free_at))
        elif in_flight:
            step, now = in_flight.popleft()
            for done in scheduler.update(step, results(step)):
                served.num_tokens += 1
                if done.request_id in seen_at:
                    served.between_tokens.append(now - seen_at[done.request_id])
                else:
                    served.first_token.append(now - arrived[done.request_id])
                seen_at[done.request_id] = now
        else:
            now = waiting[0][1]
    served.milliseconds = now
    return served


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


def test_under_mixed_load_decodes_keep_their_pace_and_prompts_lose_nothing() -> None:
    draw, at, arrivals = random.Random(1), 0.0, []
    for _ in range(400):
        at += draw.expovariate(16 / 1000)
        arrivals.append(at)
    whole, cut = (serve(arrivals, 1024, 128, size) for size in (None, 384))
    for name, served in (("whole budget", whole), ("384 tokens", cut)):
        first = [round(percentile(served.first_token, percent)) for percent in (50, 99)]
        print(f"\n{name}: TTFT p50/p99 {first}, ITL p99 {percentile(served.between_tokens, 99):.1f} ms")
    assert percentile(whole.between_tokens, 99) > 40
    assert percentile(cut.between_tokens, 99) < 12
    assert percentile(cut.first_token, 99) < percentile(whole.first_token, 99)
    assert percentile(cut.first_token, 50) < 1.1 * percentile(whole.first_token, 50)


def test_many_prompts_at_once_lose_no_throughput() -> None:
    whole, cut = (serve([0.0] * 1000, 128, 256, size) for size in (None, 384))
    rates = [served.num_tokens / served.milliseconds * 1000 for served in (whole, cut)]
    print(f"\n1000 prompts at once: {rates[0]:.0f} tokens/s with the whole budget, {rates[1]:.0f} cut")
    assert rates[1] > 0.98 * rates[0]


def test_first_tokens_of_a_burst_come_one_after_the_other() -> None:
    """5 prompts of 1024 tokens beside 8 decodes: 126 ms of work."""
    burst = serve([0.0] * 8 + [1000.0] * 5, 1024, 400, 384)
    print(f"\nburst: {[round(time) for time in burst.first_token[8:]]} ms")
    assert percentile(burst.first_token[8:], 50) < 100
    assert max(burst.first_token[8:]) < 150
