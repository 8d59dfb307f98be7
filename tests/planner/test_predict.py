"""The closed form: near what the scheduler does on a virtual clock, and consistent with itself."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.planner.parallel import Parallel
from headrace.planner.predict import Limits, Workload, error_band, not_measured, predict
from headrace.planner.simulate import simulate
from tests.planner.planner_cases import deployment

LIMITS = Limits(1024, 8192, 891_392)
CASES = [
    Workload(128, 128, 1),
    Workload(1024, 128, 16),
    Workload(1024, 128, 64),
    Workload(2048, 256, 64),
    Workload(128, 512, 256),
    Workload(1000, 1000, 400),
    Workload(8000, 500, 32),
    Workload(32000, 256, 8),
    Workload(8192, 32, 64),
    Workload(100_000, 8, 1),
    Workload(128, 512, 1000, 1000),
    Workload(2048, 256, 500, 500),
]

OUTGROWING = Workload(128, 4096, 1000, 1000)
"""Requests that the cache does not hold to their end."""


@pytest.mark.parametrize(
    ("load", "engine"),
    [
        *(
            pytest.param(load, engine, marks=pytest.mark.slow if (place + vllm) % 2 else ())
            for place, load in enumerate(CASES)
            for vllm, engine in enumerate(("headrace", "vllm"))
        ),
        (Workload(128, 2048, 600, 600), "vllm"),
        (Workload(3000, 3000, 300, 300), "vllm"),
        *(pytest.param(OUTGROWING, engine, marks=pytest.mark.slow) for engine in ("headrace", "vllm")),
    ],
)
def test_near_the_simulation(load: Workload, engine: str) -> None:
    where = deployment(engine=engine)
    found = predict(where, load, LIMITS)
    run = simulate(where, load, LIMITS)
    assert found.output_tok_s == pytest.approx(run.output_tok_s, rel=0.1)
    if engine == "vllm" and run.num_preemptions:  # the closed form knows none
        return
    assert found.e2e_s == pytest.approx(run.e2e.mean, rel=0.15)
    assert found.itl_ms == pytest.approx(1000 * run.itl.mean, rel=0.2)
    assert found.ttft_ms == pytest.approx(1000 * run.ttft.p50, rel=0.35)


@pytest.mark.parametrize("count", [100, 101, 105, 150, 210])
def test_more_requests_than_the_cache_holds_at_once(count: int) -> None:
    """A hundred fit. The few that wait for them then have steps of their own, which cost as much as a hundred's."""
    load, limits = Workload(1000, 1000, count, count), Limits(1024, 8192, 200_000)
    found, run = predict(deployment(), load, limits), simulate(deployment(), load, limits)
    assert found.ttft_ms == pytest.approx(1000 * run.ttft.p50, rel=0.12)
    assert found.itl_ms == pytest.approx(1000 * run.itl.mean, rel=0.06)
    assert found.e2e_s == pytest.approx(run.e2e.mean, rel=0.05)
    assert found.output_tok_s == pytest.approx(run.output_tok_s, rel=0.05)


@pytest.mark.parametrize("rate", [2.0, 8.0, 16.0, 24.0])
def test_near_the_simulation_of_a_rate(rate: float) -> None:
    load = Workload(1024, 128, 1, 400, request_rate=rate)
    found = predict(deployment(engine="vllm"), load, LIMITS)
    run = simulate(deployment(engine="vllm"), load, LIMITS)
    assert found.output_tok_s == pytest.approx(rate * 128)
    assert found.itl_ms == pytest.approx(1000 * run.itl.mean, rel=0.2)
    assert found.e2e_s == pytest.approx(run.e2e.mean, rel=0.2)
    assert found.ttft_ms == pytest.approx(1000 * run.ttft.mean, rel=0.35)


def test_too_high_a_rate_is_served_as_well_as_can_be() -> None:
    fast, faster = (
        predict(deployment(), Workload(1024, 128, 1, request_rate=rate), Limits(256, 8192, 891_392))
        for rate in (200.0, 400.0)
    )
    assert fast.output_tok_s == pytest.approx(faster.output_tok_s)
    assert fast.output_tok_s < 128 * 200 / 2
    assert faster.ttft_ms > fast.ttft_ms > 1000


def test_consistent_with_itself() -> None:
    load = Workload(500, 300, 64)
    found = predict(deployment(), load, LIMITS)
    assert found.e2e_s == pytest.approx((found.ttft_ms + 299 * found.itl_ms) / 1000)
    assert found.total_tok_s == pytest.approx(found.output_tok_s * 800 / 300)
    assert found.kv_tokens == LIMITS.kv_tokens
    assert found.max_concurrency == min(1024, LIMITS.kv_tokens // 800)
    assert 0 < found.error_band < 1
    assert found.bound in ("weights", "kv", "flops", "activations", "links", "launches", "host")


def test_the_band_is_wider_where_nothing_was_measured() -> None:
    plain = error_band(deployment())
    assert error_band(deployment(chip="a100")) > plain
    assert error_band(deployment(parallel=Parallel(tp=2))) == plain
    assert not_measured(deployment(parallel=Parallel(tp=8))) == ["sums over 8 GPUs (reckoned from 2 GPUs)"]
    assert not_measured(deployment(chip="b200", parallel=Parallel(tp=2))) == [
        "sums over 2 GPUs (reckoned from data sheets)"
    ]
    assert not not_measured(deployment(chip="mi300x", engine="vllm", parallel=Parallel(tp=8)))
    assert error_band(deployment("deepseek-v3", parallel=Parallel(tp=8))) > plain
    assert error_band(deployment(parallel=Parallel(tp=4, pp=2))) > plain
    assert error_band(deployment(chip="cpu", parallel=Parallel(pp=2))) < 1


def test_more_clients_give_more_and_wait_longer() -> None:
    found = [predict(deployment(), Workload(512, 256, count), LIMITS) for count in (1, 4, 16, 64, 256)]
    assert [entry.output_tok_s for entry in found] == sorted(entry.output_tok_s for entry in found)
    assert [entry.itl_ms for entry in found] == sorted(entry.itl_ms for entry in found)


def test_idle_ranks_add_nothing() -> None:
    one = predict(deployment(), Workload(512, 256, 2), LIMITS)
    eight = predict(deployment(parallel=Parallel(dp=8)), Workload(512, 256, 2), LIMITS)
    assert eight.output_tok_s == pytest.approx(one.output_tok_s, rel=0.1)
    assert eight.kv_tokens == 8 * one.kv_tokens


def test_one_token_answers() -> None:
    for load in (Workload(512, 1, 4), Workload(512, 1, 8, 8), Workload(512, 1, 1, request_rate=5.0)):
        found = predict(deployment(), load, LIMITS)
        assert found.e2e_s == pytest.approx(found.ttft_ms / 1000)
        assert found.output_tok_s > 0


def test_a_cache_too_small_for_one_request_is_said() -> None:
    with pytest.raises(ConfigError, match="kv_tokens must be at least 2000"):
        predict(deployment(), Workload(1000, 1000, 1), Limits(1024, 8192, 1500))
