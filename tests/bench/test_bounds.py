"""What a step costs at least, held against the figures that are known of the two models."""

from __future__ import annotations

import pytest
from h200_parts.bounds import (
    Ceilings,
    Cost,
    decode_attention,
    decode_floor,
    enough_experts,
    keys_seen,
    prefill_floor,
    prompt_attention,
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


@pytest.mark.parametrize(
    ("model", "batch", "milliseconds"),
    [
        ("gemma-3-27b", 1, 12.4),
        ("scout-fp8", 1, 3.96),
        ("scout-fp8", 32, 22.3),
        ("next-fp8", 1, 0.94),
        ("v3-8l", 32, 9.39),
    ],
)
def test_decode_of_other_families(model: str, batch: int, milliseconds: float) -> None:
    """DeepSeek's by hand: 5 layers of 163 experts, of 256, and a shared one; 1.9 GB of head, 2.7 GB beside."""
    assert 1000 * decode_floor(MODELS[model].cost(), CHIP, batch, 192) == pytest.approx(milliseconds, rel=0.01)


def test_keys_of_windows_and_chunks() -> None:
    local, full = (mixer for mixer, _ in MODELS["gemma-3-27b"].cost().mixers)
    assert [keys_seen(local, context) for context in (1, 1024, 1025, 9000)] == [1, 1024, 1024, 1024]
    assert keys_seen(full, 9000) == 9000
    chunked, _ = (mixer for mixer, _ in MODELS["scout-fp8"].cost().mixers)
    assert [keys_seen(chunked, context) for context in (1, 8192, 8193, 9000)] == [1, 8192, 1, 808]
    assert decode_attention(MODELS["bf16"].cost(), CHIP, 2, 500) == pytest.approx(2 * 500 * 128 * 1024 / CHIP.read)
    whole, window = (prompt_attention(MODELS[name].cost(), CHIP, 1, 8192) for name in ("mistral-7b", "mistral-7b-1k"))
    assert whole == pytest.approx(8192 * 8193 / 2 * 32 * 4 * 32 * 128 / CHIP.bf16)
    assert window / whole == pytest.approx((1024 * 1025 / 2 + 7168 * 1024) / (8192 * 8193 / 2))


def test_states_are_read_and_written_and_an_index_scores_every_key() -> None:
    states = Cost(0, 0, 0, 0, 0, 0, MODELS["next-fp8"].cost().mixers[:1], fp8=False)
    numbers = 32 * 128 * 128 + 4 * 8192  # a matrix a head, and the taps of the convolution
    assert decode_attention(states, CHIP, 3, 100) == pytest.approx(3 * 36 * 2 * 4 * numbers / CHIP.read)
    dense, sparse = (MODELS[name].cost() for name in ("v3-latents", "v3.2-latents"))
    assert decode_attention(dense, CHIP, 8, 2048) == pytest.approx(decode_attention(sparse, CHIP, 8, 2048))
    read = 2 * (576 * 2048 + 128 * 65536)  # bytes: chosen latents, and all keys of the index
    assert decode_attention(sparse, CHIP, 8, 65536) == pytest.approx(8 * 2 * read / CHIP.read)


def test_a_run_that_the_cache_cannot_hold_at_once_goes_in_waves() -> None:
    cost = MODELS["bf16"].cost()
    whole = run_floor(cost, CHIP, 100, 100, 11)
    by_hand = prefill_floor(cost, CHIP, 100, 100) + sum(decode_floor(cost, CHIP, 100, 100 + i) for i in range(1, 11))
    assert whole == pytest.approx(by_hand)
    halved = run_floor(cost, CHIP, 100, 100, 11, kv_tokens=50 * 111)
    assert halved == pytest.approx(2 * run_floor(cost, CHIP, 50, 100, 11))
    assert halved > whole
