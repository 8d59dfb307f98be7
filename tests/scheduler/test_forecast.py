"""Requests are admitted with an eye on what the running ones will still want."""

from __future__ import annotations

import random

import pytest

from headrace.cache_groups import CacheGroup, CacheKind, CacheLayout, same_layout
from headrace.request import EngineCoreOutput, Request
from headrace.scheduler.forecast import Demand, LengthForecast, MemoryForecast
from headrace.scheduler.scheduler import Scheduler

from .support import make_request, make_scheduler, run_step, run_to_end


def request(max_tokens: int, outputs: int = 0, *, open_ended: bool = True) -> Request:
    made = Request(make_request("a", 3, max_tokens, stop_token_ids=[2] if open_ended else None))
    made.max_total_tokens = 3 + max_tokens
    made.token_ids += [7] * outputs
    return made


def test_an_answer_that_nothing_ends_is_as_long_as_asked_for() -> None:
    forecast = LengthForecast()
    forecast.learn(2)
    assert forecast.remaining(request(20, open_ended=False)) == 20
    assert forecast.remaining(request(20, 15, open_ended=False)) == 5


def test_others_are_as_long_as_those_before_them() -> None:
    forecast = LengthForecast()
    assert forecast.remaining(request(20)) == 0
    for length in (4, 10, 10):
        forecast.learn(length)
    assert forecast.remaining(request(20)) == 8
    assert forecast.remaining(request(20, 5)) == 3
    assert forecast.remaining(request(20, 11)) == 0
    assert forecast.remaining(request(6)) == 6


def test_what_was_long_ago_counts_less() -> None:
    forecast = LengthForecast()
    for length, times in ((1000, 10_000), (10, 2000)):
        for _ in range(times):
            forecast.learn(length)
    assert forecast.remaining(request(4000)) == pytest.approx(10, abs=1)


def test_the_most_blocks_are_held_just_before_somebody_ends() -> None:
    draw = random.Random(4)
    for _ in range(300):
        size = draw.choice((1, 4, 16))
        demands = [Demand(draw.randrange(60), draw.randrange(1, 9)) for _ in range(draw.randrange(1, 7))]
        alive = [[one for one in demands if one.remaining >= time] for time in range(61)]
        held = [sum(one.held for one in some) - (-time * len(some) // size) for time, some in enumerate(alive)]
        *others, last = demands
        memory = MemoryForecast(same_layout(size), others[:1])
        for one in others[1:]:
            memory.add(one)
        assert memory.fits(last, max(held))
        assert not memory.fits(last, max(held) - 1)


def test_who_keeps_a_window_grows_until_it_is_full() -> None:
    """Against the sum at every moment: full blocks of 3 bytes, those of windows of 5 and 7."""
    draw = random.Random(5)
    kinds: tuple[CacheKind, ...] = ("full", "window", "chunk")
    windows, sizes = (None, 9, 9), (3, 5, 7)
    groups = [
        CacheGroup((), kind, window, 4, size, 1, size) for kind, window, size in zip(kinds, windows, sizes, strict=True)
    ]
    layout = CacheLayout(tuple(groups), 7)
    for _ in range(300):
        demands = [
            Demand(draw.randrange(40), draw.randrange(100), (draw.randrange(30), draw.randrange(30)))
            for _ in range(draw.randrange(1, 7))
        ]

        def held(time: int, some: list[Demand]) -> int:
            tokens = [time * len(some), *(sum(min(time, one.until_full[index]) for one in some) for index in (0, 1))]
            return sum(one.held for one in some) + sum(-(-n // 4) * size for n, size in zip(tokens, sizes, strict=True))

        moments = [(one.remaining, [other for other in demands if other.remaining >= one.remaining]) for one in demands]
        most = max(held(*moment) for moment in moments)
        *others, last = demands
        memory = MemoryForecast(layout, others)
        assert memory.fits(last, most)
        assert not memory.fits(last, most - 1)


def two(**changes: object) -> Scheduler:
    """a and b want 5 blocks of 4 tokens each in the end, of 8."""
    scheduler = make_scheduler(**{"num_blocks": 8} | changes)
    for name in "ab":
        scheduler.add_request(make_request(name, 4, max_tokens=16))
    return scheduler


def test_it_starts_as_soon_as_one_that_ends_leaves_it_room() -> None:
    scheduler = make_scheduler(num_blocks=9)
    for name, length in (("a", 6), ("b", 16), ("c", 16)):
        scheduler.add_request(make_request(name, 4, max_tokens=length))
    step, _ = run_step(scheduler)
    assert len(step.rows) == 2
    outputs: list[EngineCoreOutput] = run_to_end(scheduler)
    assert [output.request_id for output in outputs if output.finish_reason] == ["a", "b", "c"]
    assert [output.request_id for output in outputs].index("c") < 12, "while b is under way"
    assert scheduler.stats().num_preemptions == 0


def test_an_abort_makes_room() -> None:
    scheduler = two()
    run_step(scheduler)
    scheduler.abort("a")
    run_step(scheduler)
    assert [entry.request_id for entry in scheduler.running.items] == ["b"]


def test_one_held_back_is_looked_for_again_as_the_others_come_nearer_to_their_ends() -> None:
    """b would outgrow the pool beside a now, and not when a is half done: nobody has ended meanwhile."""
    scheduler = make_scheduler(num_blocks=12, max_model_len=64)
    for name in "ab":
        scheduler.add_request(make_request(name, 4, max_tokens=24))
    outputs = run_to_end(scheduler)
    order = [output.request_id for output in outputs]
    assert order.index("b") < 20, "of the 24 steps that a takes"
    assert scheduler.stats().num_preemptions == 0


def test_what_one_computes_lets_others_in_that_begin_alike() -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=40)
    for name in "abc":
        scheduler.add_request(make_request(name, 25, max_tokens=6))
    outputs = run_to_end(scheduler)
    firsts = [[output.request_id for output in outputs].index(name) for name in "abc"]
    assert firsts[2] <= 10, "long before a ends and b and c run one after the other"
    assert scheduler.stats().prefix_cache_hits == 48


def test_an_urgent_one_does_not_wait_for_those_it_may_preempt() -> None:
    scheduler = make_scheduler(num_blocks=16, policy="priority", max_model_len=64)
    scheduler.add_request(make_request("slow", 4, max_tokens=50, priority=5))
    run_step(scheduler)
    scheduler.add_request(make_request("urgent", 20, max_tokens=30, priority=0))
    scheduler.add_request(make_request("later", 4, max_tokens=30, priority=9))
    step, _ = run_step(scheduler)
    assert {entry.request_id for entry in scheduler.running.items} == {"slow", "urgent"}
    assert len(step.rows) == 2
    assert {output.request_id for output in run_to_end(scheduler) if output.finish_reason} == {
        "slow",
        "urgent",
        "later",
    }


def test_where_answers_end_was_learnt_from_those_before() -> None:
    """The first two are expected to be short, and one is preempted; later ones wait for each other."""
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    for turn in range(2):
        before = scheduler.stats().num_preemptions
        for name in "ab":
            scheduler.add_request(make_request(f"{name}{turn}", 4, max_tokens=16, stop_token_ids=[2]))
        run_to_end(scheduler)
        assert (scheduler.stats().num_preemptions > before) == (turn == 0)


def test_a_stop_string_found_late_teaches_what_was_kept() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    scheduler.add_request(make_request("a", 4, max_tokens=16, stop_token_ids=[2]))
    for _ in range(6):
        run_step(scheduler)
    scheduler.abort("a", 5)
    scheduler.add_request(make_request("b", 4, max_tokens=16, stop_token_ids=[2]))
    assert scheduler.waiting.first is not None
    assert scheduler._lengths.remaining(scheduler.waiting.first) == 5


def test_requests_of_known_length_are_hardly_ever_preempted() -> None:
    """Blocks are counted in whole ones only, so now and then one is missing."""
    preempted = {True: 0, False: 0}
    for look_ahead in preempted:
        draw = random.Random(11)
        for _ in range(40):
            scheduler = make_scheduler(num_blocks=30, max_num_seqs=8, look_ahead=look_ahead)
            names = [f"r{number}" for number in range(12)]
            for name in names:
                scheduler.add_request(make_request(name, draw.randrange(1, 20), max_tokens=draw.randrange(1, 40)))
            done = {output.request_id for output in run_to_end(scheduler) if output.finish_reason}
            assert done == set(names)
            preempted[look_ahead] += scheduler.stats().num_preemptions
    assert preempted[True] < preempted[False] / 10
