"""When blocks run out, the last in order gives its own back and computes again later.

That it is the last, and that tokens, scores and caches are right whoever it is, is what test_traffic.py asserts of
random histories."""

from __future__ import annotations

from typing import Any

from headrace.request import RequestStatus
from headrace.scheduler.scheduler import Scheduler

from .support import batch, make_request, make_scheduler, results, run_step


def greedy_scheduler(**changes: Any) -> Scheduler:
    """One that admits whatever fits now."""
    return make_scheduler(**{"look_ahead": False} | changes)


def two_decodes(**changes: object) -> Scheduler:
    """a and b, 3 tokens each and a block of 4, in a pool of 3: the third block goes to one of them alone."""
    scheduler = greedy_scheduler(**{"num_blocks": 3} | changes)
    scheduler.add_request(make_request("a", [1, 2, 3]))
    scheduler.add_request(make_request("b", [4, 5, 6]))
    for _ in range(2):
        run_step(scheduler)  # b is told its second token: both have 5 now, of which 4 are computed
    return scheduler


def test_a_prompt_under_way_takes_blocks_from_those_behind_it_out_of_the_same_step() -> None:
    """Under the priority policy a better prompt may still be growing while a worse request decodes already."""
    scheduler = greedy_scheduler(policy="priority", num_blocks=6, max_num_batched_tokens=8, max_model_len=30)
    scheduler.add_request(make_request("worse", [1, 2, 3], max_tokens=9, priority=1))
    run_step(scheduler)
    scheduler.add_request(make_request("better", 17, max_tokens=2, priority=0))
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"worse": 1, "better": 7}
    # worse takes its second block, leaving 2; better has 2 and wants 4
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"worse": 1, "better": 7}
    # better wants its fifth: only worse's are left, whose decode is in this very step already
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"better": 3}
    assert step.num_tokens == 3
    assert scheduler.requests["worse"].status is RequestStatus.PREEMPTED
    assert scheduler.requests["worse"].num_inflight == 0


def prompt_under_way(**params: object) -> Scheduler:
    """a decodes; b computes the first 5 of 9 prompt tokens in the next step and will lack a block in the one after,
    since a takes the last."""
    scheduler = greedy_scheduler(num_blocks=4, max_num_batched_tokens=6)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=6))
    run_step(scheduler)
    scheduler.add_request(make_request("b", list(range(20, 29)), max_tokens=2, **params))
    return scheduler


# ---- with results outstanding


def test_an_abort_of_a_preempted_request_forgets_what_it_left_in_the_cache() -> None:
    scheduler = two_decodes()
    run_step(scheduler)
    b = scheduler.requests["b"]
    assert scheduler.kv_cache.pages.pools[0].find(b.block_hashes[0]) is not None
    scheduler.abort("b", num_output_tokens_kept=0)
    assert scheduler.kv_cache.pages.pools[0].find(b.block_hashes[0]) is None
    scheduler.kv_cache.pages.check_invariant()


def test_a_step_from_before_the_preemption_registers_nothing_of_one_that_has_resumed() -> None:
    """What it has got since is not computed yet."""
    scheduler = prompt_under_way()
    chunk, preempting = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    resumed = scheduler.schedule()
    assert batch(scheduler, resumed) == {"b": 6}
    b = scheduler.requests["b"]
    scheduler.update(chunk, results(chunk))
    scheduler.update(preempting, results(preempting))
    assert b.num_registered_blocks == 0
    scheduler.update(resumed, results(resumed))
    assert b.num_registered_blocks == 1
