"""With pipeline stages, steps take turns with the running requests, so that each stage has a step to compute."""

from __future__ import annotations

from collections import deque

import pytest

from headrace.scheduler.scheduler import Scheduler
from headrace.step import SchedulerOutput
from tests.scheduler.support import make_request, make_scheduler, results, run_step


def run(scheduler: Scheduler, stages: int, most: int = 10_000) -> tuple[list[SchedulerOutput], float]:
    """Let a pipeline whose stages take a step 1 + tokens / 8 each run everything; return the steps, and the share
    of the time until the last one was done in which the last stage computed."""
    under_way: deque[tuple[SchedulerOutput, float]] = deque()
    steps, busy, free, sampled, now = [], 0.0, [0.0] * stages, {}, 0.0
    while scheduler.has_work() and len(steps) < most:
        step = scheduler.schedule() if len(under_way) <= stages else None
        if step is None:
            step, now = under_way.popleft()
            scheduler.update(step, results(step))
            continue
        steps.append(step)
        cost = 1 + step.num_tokens / 8
        ready = max([now, *(sampled.get(row, 0.0) for row in step.rows)])  # tokens come back without the host
        for stage in range(stages):
            ready = free[stage] = max(ready, free[stage]) + cost
        busy += cost
        for row, samples in zip(step.rows, step.samples, strict=True):
            if samples:
                sampled[row] = ready
        under_way.append((step, ready))
    return steps, busy / free[-1]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_busy_at_full_load(stages: int) -> None:
    """Bubbles are less than 15%, though all requests come at once and end at different times."""
    scheduler = make_scheduler(
        max_num_seqs=32, num_blocks=32 * 20, max_model_len=80, num_stages=stages, look_ahead=False
    )  # fmt: skip
    for number in range(160):
        scheduler.add_request(make_request(str(number), [number] * (5 + number % 7), max_tokens=20 + number * 5 % 40))
    steps, busy = run(scheduler, stages, most=400)
    assert busy > 0.85
    full = [len(step.rows) for step in steps[4 * stages : 200]]
    assert max(full) <= 2 * min(full) + 2, "steps are about alike"


def test_requests_take_turns_and_wait_for_their_token() -> None:
    scheduler = make_scheduler(num_stages=2)
    for name in ("a", "b", "c"):
        scheduler.add_request(make_request(name, 3, max_tokens=6))
    run_step(scheduler)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert sorted(first.rows + second.rows) == sorted({*first.rows, *second.rows})
    assert (len(first.rows), len(second.rows)) == (2, 1)
    assert third.rows == first.rows, "two steps later its tokens are back on the first stage"


def test_one_request_goes_on_without_the_host_and_does_not_fill_the_queue() -> None:
    scheduler = make_scheduler(num_stages=4)
    scheduler.add_request(make_request("a", 3, max_tokens=6))
    assert scheduler.schedule() is not None
    second = scheduler.schedule()
    assert second is not None
    assert second.num_computed_tokens == [3]
    assert scheduler.schedule() is None
