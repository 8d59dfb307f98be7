"""The scheduler on a virtual clock: jumps change nothing, all are served, percentiles are those of what happened."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import ConfigError
from headrace.planner.cost import StepWork, step_model
from headrace.planner.parallel import Parallel
from headrace.planner.predict import Limits, Workload
from headrace.planner.simulate import STEP_ITSELF, Percentiles, TooLongError, simulate
from tests.planner.planner_cases import deployment

ROOMY = Limits(max_num_seqs=1024, max_num_batched_tokens=8192, kv_tokens=891_392)
TIGHT = Limits(max_num_seqs=64, max_num_batched_tokens=1024, kv_tokens=20_000, mixed_step_tokens=256)


def close(found: Percentiles, expected: Percentiles, rel: float) -> None:
    for name in ("mean", "p50", "p90", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=rel), name


@pytest.mark.parametrize(
    ("load", "limits"),
    [
        (Workload(128, 512, 300, 300), ROOMY),
        (Workload(1024, 128, 16, 64), ROOMY),
        (Workload(700, 200, 1, 60, request_rate=9.0), ROOMY),
        (Workload(3000, 90, 1, 80, request_rate=4.0), ROOMY),
        (Workload(200, 300, 60, 120), TIGHT),
        (Workload(300, 600, 40, 40), TIGHT),
        (Workload(300, 100, 8, 60, request_rate=30.0), TIGHT),
    ],
)
def test_jumps_change_nothing(load: Workload, limits: Limits) -> None:
    short, full = (simulate(deployment(), load, limits, full=full) for full in (False, True))
    assert sum(part.steps for part in short.segments) == len(full.segments)
    assert short.num_preemptions == full.num_preemptions
    assert len(short.segments) < len(full.segments)
    assert short.seconds == pytest.approx(full.seconds, rel=1e-3)
    close(short.ttft, full.ttft, 2e-3)
    close(short.e2e, full.e2e, 2e-3)
    close(short.itl, full.itl, 2e-2)


def test_a_thousand_requests_take_few_evaluations() -> None:
    run = simulate(deployment(), Workload(128, 512, 1000, 1000), ROOMY)
    assert sum(part.steps for part in run.segments) > 512
    assert len(run.segments) < 200
    assert run.max_running == 1000
    assert run.output_tok_s == pytest.approx(512_000 / run.seconds)
    assert run.total_tok_s == pytest.approx(640_000 / run.seconds)


def test_segments_are_the_run_again() -> None:
    model = step_model(deployment())
    run = simulate(deployment(), Workload(256, 300, 100, 150), ROOMY)
    assert sum(steps * model.seconds(work) for work, steps in run.segments) == pytest.approx(run.seconds)


def test_one_request_is_its_prompt_and_its_steps() -> None:
    model = step_model(deployment())
    run = simulate(deployment(), Workload(100, 50, 1, 1), ROOMY)
    prompt = model.seconds(StepWork(0, 0.0, 100, 50.5, 1))
    steps = sum(model.seconds(StepWork(1, 101 + index)) for index in range(49))
    assert run.ttft.p50 == pytest.approx(prompt + model.efficiency.request)
    assert run.seconds == pytest.approx(prompt + steps, rel=1e-6)
    assert run.e2e.p50 == pytest.approx(prompt + steps + model.efficiency.request, rel=1e-6)


def test_no_more_run_than_there_are_clients() -> None:
    run = simulate(deployment(), Workload(128, 64, 10, 95), ROOMY)
    assert run.max_running == 10
    assert run.num_requests == 95
    assert simulate(deployment(), Workload(128, 64, 10), ROOMY).num_requests == 40


def test_a_small_cache_preempts_and_all_are_served() -> None:
    greedy, ours = (
        simulate(deployment(engine=name), Workload(300, 600, 64, 64), TIGHT) for name in ("vllm", "headrace")
    )
    assert greedy.num_preemptions > 0
    assert greedy.e2e.p99 > 0
    assert greedy.itl.p99 < greedy.e2e.p50
    assert ours.num_preemptions == 0
    roomy = simulate(deployment(), Workload(300, 600, 64, 64), ROOMY)
    assert roomy.num_preemptions == 0
    assert roomy.seconds < ours.seconds


def test_a_higher_rate_waits_longer() -> None:
    slow, fast = (simulate(deployment(), Workload(1024, 128, 1, 200, request_rate=rate), ROOMY) for rate in (2.0, 25.0))
    assert fast.ttft.p99 > slow.ttft.p99
    assert fast.itl.p99 > slow.itl.p50
    again = simulate(deployment(), Workload(1024, 128, 1, 200, request_rate=25.0), ROOMY)
    assert again.ttft == fast.ttft, "the same seed, the same arrivals"


def test_mixed_steps_spare_decodes_and_cost_prompts_little() -> None:
    load, cut_to = Workload(1024, 128, 1, 400, request_rate=16.0), replace(ROOMY, mixed_step_tokens=384)
    whole, cut = (simulate(deployment(), load, limits) for limits in (ROOMY, cut_to))
    print(
        f"\nITL p99 {whole.itl.p99:.4f} -> {cut.itl.p99:.4f} s, TTFT p50 {whole.ttft.p50:.4f} -> {cut.ttft.p50:.4f} s"
    )
    assert cut.itl.p99 < 0.5 * whole.itl.p99
    assert cut.ttft.p50 < 1.3 * whole.ttft.p50
    whole, cut = (simulate(deployment(), Workload(128, 256, 1000, 1000), limits) for limits in (ROOMY, cut_to))
    assert cut.output_tok_s > 0.98 * whole.output_tok_s


def test_ranks_share_the_load() -> None:
    one = simulate(deployment(), Workload(128, 128, 32, 64), ROOMY)
    four = simulate(deployment(parallel=Parallel(dp=4)), Workload(128, 128, 128, 256), ROOMY)
    assert four.num_requests == 256
    assert four.seconds == pytest.approx(one.seconds)
    assert four.output_tok_s == pytest.approx(4 * one.output_tok_s)


def test_what_cannot_be_served_is_said() -> None:
    with pytest.raises(ConfigError, match="kv_tokens must be at least 944"):
        simulate(deployment(), Workload(600, 340, 1, 1), Limits(8, 512, 900))


def test_percentiles_are_weighted() -> None:
    found = Percentiles.of([(3.0, 1), (1.0, 98), (2.0, 1)])
    assert (found.p50, found.p90, found.p99) == (1.0, 1.0, 2.0)
    assert found.mean == pytest.approx(1.03)
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_patience_ends() -> None:
    load, limits = Workload(128, 512, 64), Limits(64, 8192, 100_000)
    with pytest.raises(TooLongError):
        simulate(deployment(), load, limits, patience=100)
    assert simulate(deployment(), load, limits, patience=10**6) == simulate(deployment(), load, limits)


def test_a_jump_takes_patience_like_a_step() -> None:
    load = Workload(128, 1000, 1, 3)
    run = simulate(deployment(), load, ROOMY)
    jumps = sum(segment.steps > 1 for segment in run.segments)
    steps = len(run.segments) - jumps
    assert jumps >= 3
    needed = steps * (1 + STEP_ITSELF) + jumps * STEP_ITSELF
    assert simulate(deployment(), load, ROOMY, patience=needed) == run
    with pytest.raises(TooLongError):
        simulate(deployment(), load, ROOMY, patience=needed - 1)
