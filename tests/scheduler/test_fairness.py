"""Clients, and requests of one client to the server, take turns: who sends much delays others by little."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.request import EngineCoreOutput, RequestStatus
from headrace.scheduler.scheduler import Scheduler

from .support import batch, make_request, make_scheduler, run_step, run_to_end


def roomy(**changes: Any) -> Scheduler:
    """Blocks for everybody: 4 rows and 16 tokens a step."""
    settings = {"num_blocks": 4096, "max_num_batched_tokens": 16, "max_model_len": 1024, "enable_prefix_caching": False}
    return make_scheduler(**settings | changes)


def add(scheduler: Scheduler, name: str, count: int, prompt: int = 1, max_tokens: int = 200, **whose: str) -> None:
    """`count` requests NAME0, NAME1, ..., of one parent unless said otherwise."""
    for index in range(count):
        scheduler.add_request(make_request(f"{name}{index}", prompt, max_tokens, **{"parent": name, **whose}))


def running(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.running.items]


def firsts(outputs: list[EngineCoreOutput]) -> list[str]:
    """Ids in the order of their first tokens."""
    return list(dict.fromkeys(output.request_id for output in outputs))


# ---- turns


def test_parents_take_turns() -> None:
    scheduler = roomy(max_num_seqs=1)
    add(scheduler, "a", 3, max_tokens=1)
    add(scheduler, "b", 3, max_tokens=1)
    add(scheduler, "c", 1, max_tokens=1)
    assert firsts(run_to_end(scheduler)) == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]


def test_clients_take_turns_however_many_requests_they_send() -> None:
    scheduler = roomy(max_num_seqs=1)
    add(scheduler, "a", 4, max_tokens=1, client="x", parent="")
    add(scheduler, "b", 2, max_tokens=1, client="y")
    add(scheduler, "c", 2, max_tokens=1, client="x")
    assert firsts(run_to_end(scheduler)) == ["a0", "b0", "a1", "b1", "a2", "a3", "c0", "c1"]


def test_what_follows_does_not_cost_a_client_its_turn() -> None:
    scheduler = roomy(max_num_seqs=1)
    for name, client in (("a0", "x"), ("b0", "y"), ("a1", "x")):
        scheduler.add_request(make_request(name, 1, 1, client=client, parent=name[0]))
    assert firsts(run_to_end(scheduler)) == ["a0", "b0", "a1"]


def test_under_the_priority_policy_only_priority_and_arrival_count() -> None:
    scheduler = roomy(policy="priority")
    for index in range(6):
        scheduler.add_request(make_request(f"a{index}", 1, 6, parent="a", client="x", arrival_time=float(index)))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 1, 6, client="y", arrival_time=9.0))
    assert firsts(run_to_end(scheduler)) == [*(f"a{index}" for index in range(6)), "b"]
    assert scheduler.stats().num_preemptions == 0


# ---- making way


def test_who_runs_everything_makes_way_with_its_youngest() -> None:
    scheduler = roomy()
    add(scheduler, "a", 100)
    run_step(scheduler)
    add(scheduler, "b", 1)
    run_step(scheduler)
    assert running(scheduler) == ["a0", "a1", "a2", "b0"]
    assert scheduler.requests["a3"].status is RequestStatus.PREEMPTED


def test_two_large_ones_settle_without_preempting_each_other_for_ever() -> None:
    scheduler = roomy(max_num_seqs=32, max_num_batched_tokens=64)
    add(scheduler, "a", 100)
    run_step(scheduler)
    add(scheduler, "b", 100)
    for _ in range(100):
        run_step(scheduler)
    names = [name[0] for name in running(scheduler)]
    assert (names.count("a"), names.count("b")) == (21, 11)  # as many as it takes to be less than twice as many
    assert scheduler.stats().num_preemptions == 11
    for _ in range(110):  # what ends goes to who runs less
        run_step(scheduler)
    names = [name[0] for name in running(scheduler)]
    assert abs(names.count("a") - names.count("b")) <= 1
    assert scheduler.stats().num_preemptions == 11


def test_a_client_makes_way_for_another_but_single_requests_of_one_client_do_not() -> None:
    scheduler = roomy()
    add(scheduler, "a", 8, client="x", parent="")
    run_step(scheduler)
    add(scheduler, "b", 1, client="x", parent="")
    run_step(scheduler)
    assert running(scheduler) == ["a0", "a1", "a2", "a3"]
    add(scheduler, "c", 1, client="y", parent="")
    run_step(scheduler)
    assert running(scheduler) == ["a0", "a1", "a2", "c0"]


def test_the_only_one_that_somebody_runs_is_never_taken() -> None:
    scheduler = roomy(max_num_seqs=1)
    add(scheduler, "a", 5, max_tokens=4)
    run_step(scheduler)
    add(scheduler, "b", 1, max_tokens=4)
    assert firsts(run_to_end(scheduler))[:3] == ["a0", "b0", "a1"]
    assert scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("look_ahead", [True, False])
def test_blocks_are_made_free_for_a_newcomer_too(look_ahead: bool) -> None:
    """a's three take the whole pool of 12 blocks, 4 each, in the end; a row is free all the time."""
    scheduler = make_scheduler(num_blocks=12, look_ahead=look_ahead, enable_prefix_caching=False)
    add(scheduler, "a", 9, prompt=9, max_tokens=8)
    run_step(scheduler)
    add(scheduler, "b", 1, prompt=9, max_tokens=8)
    for _ in range(3):
        run_step(scheduler)
    assert "b0" in running(scheduler)


def test_blocks_that_run_out_are_taken_from_who_runs_most() -> None:
    """Not from the last that came."""
    scheduler = make_scheduler(num_blocks=8, look_ahead=False, enable_prefix_caching=False)
    add(scheduler, "a", 3, prompt=6, max_tokens=12)
    run_step(scheduler)
    add(scheduler, "b", 1, prompt=6, max_tokens=12)
    run_step(scheduler)
    assert running(scheduler) == ["a0", "a1", "a2", "b0"]
    for _ in range(2):
        run_step(scheduler)
    assert running(scheduler) == ["a0", "a1", "b0"]


# ---- prompts under way


def test_a_prompt_under_way_leaves_part_of_each_step_to_a_newcomer() -> None:
    scheduler = roomy()
    add(scheduler, "a", 3, prompt=900)
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a0": 16}
    add(scheduler, "b", 1, prompt=20, max_tokens=2)
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a0": 8, "b0": 8}
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a0": 8, "b0": 8}
    step, outputs = run_step(scheduler)
    assert batch(scheduler, step) == {"a0": 12, "b0": 4}
    assert firsts(outputs) == ["b0"]


def test_a_prompt_that_came_alone_is_computed_before_the_next() -> None:
    scheduler = roomy()
    add(scheduler, "a", 1, prompt=40, parent="")
    run_step(scheduler)
    add(scheduler, "b", 1, prompt=4, parent="")
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a0": 16}


# ---- what all of it is for


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 300),
    length=st.integers(1, 600),
    output=st.integers(1, 400),
    age=st.integers(1, 30),
    clients=st.booleans(),
    mixed=st.sampled_from([None, 4, 16]),
)
def test_a_newcomer_waits_a_bounded_number_of_steps(
    count: int, length: int, output: int, age: int, clients: bool, mixed: int | None
) -> None:
    """However many prompts of whatever length, with however long answers, are before it in one request."""
    scheduler = roomy(max_num_seqs=8, mixed_step_tokens=mixed)
    add(scheduler, "a", count, prompt=length, max_tokens=output, client="x" if clients else "")
    for _ in range(age):
        if not scheduler.has_work():
            return
        run_step(scheduler)
    add(scheduler, "b", 1, prompt=4, max_tokens=1, client="y" if clients else "")
    steps = 1
    while "b0" not in firsts(run_step(scheduler)[1]):
        steps += 1
    assert steps <= 6


def test_single_requests_are_never_preempted_for_fairness() -> None:
    """With blocks for all, one client's requests that come one by one run in their order, each once."""
    draw = random.Random(3)
    for _ in range(30):
        scheduler = roomy(max_num_seqs=draw.randrange(1, 6))
        admitted: list[int] = []
        for number in range(20):
            scheduler.add_request(make_request(f"r{number}", draw.randrange(1, 60), draw.randrange(1, 30), seed=number))
            for _ in range(draw.randrange(3) if number < 19 else 1000):
                if scheduler.has_work():
                    admitted += [new.seed for new in run_step(scheduler)[0].new_rows]
        assert admitted == list(range(20))
        assert scheduler.stats().num_preemptions == 0


def test_a_turn_is_good_for_the_choices_of_an_ordinary_request() -> None:
    """More come than can be served, one after the other, for ever: a request for three choices waits as long as its
    neighbours, and its choices do not make way for those who come later."""
    scheduler = roomy(max_num_seqs=32, max_num_batched_tokens=64)
    add(scheduler, "first", 32, max_tokens=40, parent="")
    add(scheduler, "three", 3, max_tokens=40)
    add(scheduler, "behind", 64, max_tokens=40, parent="")
    ids: list[str] = []
    for step in range(60):
        add(scheduler, f"late{step}-", 2, max_tokens=40, parent="")
        ids += firsts(run_step(scheduler)[1])
    begun = list(dict.fromkeys(ids))
    assert begun[32:35] == ["three0", "three1", "three2"]
    assert scheduler.stats().num_preemptions == 0
