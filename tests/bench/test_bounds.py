"""What a step costs at least, held against the figures that are known of the two models."""

from __future__ import annotations

import pytest
from h200_parts.bounds import (
    Ceilings,
    decode_floor,
    enough_experts,
    prefill_floor,
    run_floor,
    weight_bytes,
)
from h200_parts.models import MODELS

from headrace.planner.cost import distinct_experts

CHIP = Ceilings(copy=4.28e12, read=4.35e12, bf16=700e12, fp8=1240e12)


@pytest.mark.parametrize(("model", "milliseconds"), [("bf16", 3.45), ("fp8", 1.85), ("moe", 1.40)])
def test_weights_at_batch_1(model: str, milliseconds: float) -> None:
    assert 1000 * weight_bytes(MODELS[model].cost(), 1) / CHIP.read == pytest.approx(milliseconds, abs=0.01)


@pytest.mark.parametrize(("batch", "experts"), [(1, 8.0), (8, 51.6), (32, 111.8), (128, 128.0)])
def test_distinct_experts_of_uniform_choices(batch: int, experts: float) -> None:
    assert distinct_experts(128, 8, batch) == pytest.approx(experts, abs=0.05)
    cost = MODELS["moe"].cost()
    assert enough_experts(cost, batch, 0.91 * experts)
    assert not enough_experts(cost, batch, 0.89 * experts)


def test_a_dense_model_has_no_experts() -> None:
    assert distinct_experts(0, 0, 8) == 0
    assert weight_bytes(MODELS["bf16"].cost(), 1) == weight_bytes(MODELS["bf16"].cost(), 1000)


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 1.4), (8, 6.0), (32, 12.3), (128, 14.5)])
def test_decode_of_the_mixture(batch: int, milliseconds: float) -> None:
    assert 1000 * decode_floor(MODELS["moe"].cost(), CHIP, batch, 192) == pytest.approx(milliseconds, rel=0.02)


def test_decode_of_the_dense_model() -> None:
    cost = MODELS["bf16"].cost()
    assert 1000 * decode_floor(cost, CHIP, 1, 192) == pytest.approx(3.46, abs=0.01)
    assert cost.kv_bytes == 128 * 1024
    # Above some 160 tokens the linears are bound by arithmetic: what a batch of 1000 takes is known to be about 38 ms.
    assert 1000 * decode_floor(cost, CHIP, 1000, 512) == pytest.approx(38, rel=0.05)


def test_prefill_is_bound_by_bytes_when_short_and_by_arithmetic_when_long() -> None:
    cost = MODELS["bf16"].cost()
    assert prefill_floor(cost, CHIP, 1, 16) == pytest.approx(weight_bytes(cost, 16) / CHIP.read, rel=0.01)
    parameters = 6.98e9
    pairs = 2048 * 2049 / 2 * 4 * 32 * 4096
    assert prefill_floor(cost, CHIP, 1, 2048) == pytest.approx((2048 * 2 * parameters + pairs) / 700e12, rel=0.01)
    fp8 = MODELS["fp8"].cost()
    assert prefill_floor(fp8, CHIP, 8, 2048) < 0.7 * prefill_floor(cost, CHIP, 8, 2048)


def test_a_run_that_the_cache_cannot_hold_at_once_goes_in_waves() -> None:
    cost = MODELS["bf16"].cost()
    whole = run_floor(cost, CHIP, 100, 100, 11)
    by_hand = prefill_floor(cost, CHIP, 100, 100) + sum(decode_floor(cost, CHIP, 100, 100 + i) for i in range(1, 11))
    assert whole == pytest.approx(by_hand)
    halved = run_floor(cost, CHIP, 100, 100, 11, kv_tokens=50 * 111)
    assert halved == pytest.approx(2 * run_floor(cost, CHIP, 50, 100, 11))
    assert halved > whole
