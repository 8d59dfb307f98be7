"""What a step contains: order of the batch, admissions, what the device is told. No step ahead of its results here.

That budgets are used up, and rows and places in the queue kept, is what test_traffic.py asserts of random histories."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import ConfigError, RequestError

from .support import batch, make_request, make_scheduler, run_step, run_to_end

# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"num_blocks": 0}, "num_pages must be at least 1, got 0"),
        ({"policy": "lifo"}, "scheduling_policy must be one of fcfs, priority; got 'lifo'"),
        ({"num_drafts": -1}, "num_drafts must not be negative, got -1"),
        ({"num_drafts": 16}, "every running request gets a token and 16 drafts in every step"),
        ({"max_num_seqs": 65}, r"max_num_seqs \(65\) must not exceed max_num_batched_tokens \(64\)"),
        (
            {"enable_chunked_prefill": False, "max_model_len": 65},
            r"max_num_batched_tokens \(64\) must be at least max_model_len \(65\) when chunked prefill is off",
        ),
    ],
)
def test_limits_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(**changes)


def test_requests_that_could_never_run() -> None:
    scheduler = make_scheduler(num_blocks=5)  # of 4 tokens
    with pytest.raises(RequestError, match=r"between 1 and 63 tokens .* got 0") as empty:
        scheduler.add_request(make_request("a", 0))
    assert empty.value.param == "prompt"
    with pytest.raises(RequestError, match=r"between 1 and 63 tokens .* got 64"):
        scheduler.add_request(make_request("a", 64))
    request = make_request("a", 10)
    with pytest.raises(RequestError, match="max_tokens must be at least 1, got 0"):
        scheduler.add_request(msgspec.structs.replace(request, max_tokens=0))
    with pytest.raises(
        RequestError, match=r"10 tokens with max_tokens 12 needs 6 pages of KV cache, but there are only 5"
    ):
        scheduler.add_request(make_request("a", 10, max_tokens=12))
    assert not scheduler.has_work()

    scheduler.add_request(make_request("a", 10, max_tokens=11))  # 20 tokens computed, the 21st only sampled
    with pytest.raises(RequestError, match="request_id 'a' is in use"):
        scheduler.add_request(make_request("a", 1))
    assert len(run_to_end(scheduler)) == 11


# ---- one request


# ---- the budget


def test_decodes_come_first_then_the_prompt_under_way_then_new_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, num_blocks=20)
    scheduler.add_request(make_request("a", 3))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 14))
    scheduler.add_request(make_request("c", 30))
    batches = []
    for _ in range(3):
        step, _ = run_step(scheduler)
        assert step.num_tokens <= 10
        batches.append(list(batch(scheduler, step).items()))
    assert batches == [
        [("a", 1), ("b", 9)],
        [("a", 1), ("b", 5), ("c", 4)],
        [("a", 1), ("b", 1), ("c", 8)],
    ]


def test_without_chunking_a_prompt_waits_until_it_fits_whole_and_nobody_overtakes_it() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, num_blocks=40)
    for name, first, length in (("a", 1, 10), ("b", 100, 60), ("c", 1, 1)):
        scheduler.add_request(make_request(name, list(range(first, first + length))))
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a": 10}
    step, _ = run_step(scheduler)
    assert batch(scheduler, step) == {"a": 1, "c": 1, "b": 60}
    assert step.samples == [True, True, True]


# ---- admission


def test_a_prompt_is_admitted_only_when_all_of_it_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", list(range(15)), max_tokens=3))  # 4 blocks, 5 in the end
    run_step(scheduler)
    scheduler.add_request(make_request("b", 17, max_tokens=3))  # 5 blocks, the first chunk only 2
    scheduler.add_request(make_request("c", 1, max_tokens=3))
    batches = [batch(scheduler, run_step(scheduler)[0]) for _ in range(2)]
    assert batches == [{"a": 7}, {"a": 1}], "and c does not overtake b"
    run_step(scheduler)  # the last of a
    assert batch(scheduler, run_step(scheduler)[0]) == {"b": 8}
    assert scheduler.stats().num_preemptions == 0


# ---- prefix caching


def test_a_warm_prompt_computes_only_what_is_new() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("cold", 10, max_tokens=1))
    _, (cold,) = run_step(scheduler)
    scheduler.add_request(make_request("warm", 11, max_tokens=2))
    step, (warm,) = run_step(scheduler)
    assert (step.num_computed_tokens, step.num_scheduled_tokens) == ([8], [3])
    assert step.block_updates[0].block_ids[:2] == [0, 1]
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 8)
    _, (second,) = run_step(scheduler)
    assert second.num_cached_tokens == 0, "told once"
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (21, 8)
    assert (stats.num_blocks, stats.num_free_blocks) == (16, 16)


def test_outputs_are_cached_too_once_the_host_knows_them() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("turn 1", 4, max_tokens=6))
    run_to_end(scheduler, token=7)
    history = [100, 101, 102, 103, 7, 7, 7, 7, 7, 7]
    scheduler.add_request(make_request("turn 2", [*history, 1], max_tokens=1))
    assert run_step(scheduler)[0].num_computed_tokens == [8]


def test_requests_under_way_share_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 9))
    run_step(scheduler)
    a, b = scheduler.requests["a"], scheduler.requests["b"]
    assert a.block_ids[0][:2] == b.block_ids[0][:2]
    assert a.block_ids[0][2] != b.block_ids[0][2]
    scheduler.abort("a")
    assert scheduler.kv_cache.pages.pools[0].num_held == 3
    scheduler.kv_cache.pages.check_invariant()
