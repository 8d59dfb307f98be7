"""Every way to hold a weight on the CPU computes the same product; the choice keeps to its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.quantization.cpu_linear import (
    IN_CACHE,
    Choice,
    choose,
    choose_all,
    has_units,
    hold_packed,
    hold_plain,
    hold_transposed,
    in_float32,
    round_tokens,
    spare_memory,
)
from headrace.quantization.scheme import LinearSpec

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_all_ways_agree(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 40, generator=generator).to(dtype)
    offset = torch.randn(48, generator=generator).to(dtype) if bias else None
    ways = [hold_plain, hold_transposed, in_float32(hold_transposed)]
    if torch.backends.mkldnn.is_available():
        ways += [in_float32(hold_packed), *([hold_packed] if dtype == torch.float32 or has_units(dtype) else [])]
    for tokens in (1, 3, 17):
        x = torch.randn(tokens, 40, generator=generator).to(dtype)
        exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        for way in ways:
            y = way(weight, offset)(x)
            assert y.dtype == dtype
            assert (y.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max(), way


def test_onednn_meets_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    met: set[int] = set()
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: met.add(x.shape[0]) or real(x, *rest))
    held = hold_plain(torch.ones(4, 3, dtype=torch.bfloat16), None)
    for tokens in range(1, 2049):
        assert held(torch.ones(tokens, 3, dtype=torch.bfloat16)).shape == (tokens, 4)
        assert tokens <= round_tokens(tokens) <= tokens * 9 / 8
    assert len(met) <= 80


def test_two_ways_share_the_work_by_number_of_tokens() -> None:
    calls: list[int] = []

    def spy(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        return lambda x: calls.append(x.shape[0]) or x

    held = Choice(spy, hold_plain).hold(torch.ones(2, 3), None)  # type: ignore[arg-type]
    for tokens in (1, 3, 4, 9):
        held(torch.ones(tokens, 3))
    assert calls == [1, 3]


def test_choices_cover_every_size_and_keep_to_memory() -> None:
    sizes = [(64, 32), (32, 64), (64, 32)]
    specs = [LinearSpec(inside, outside, (), torch.bfloat16) for outside, inside in sizes]
    choices = choose_all(specs, spare_bytes=1 << 30)
    assert set(choices) == {(64, 32, torch.bfloat16), (32, 64, torch.bfloat16)}
    for choice in choose_all(specs, spare_bytes=0).values():
        assert choice.few is choice.many
        assert choice.few in (hold_plain, hold_transposed, hold_packed)  # not in float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_converted_for_several_tokens_where_the_cpu_has_no_units(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [LinearSpec(256, IN_CACHE // 512 + extra, (), dtype) for extra in (0, 64)]
    for spare_bytes, units in ((1 << 40, True), (1 << 40, False), (0, False)):
        monkeypatch.setattr("headrace.quantization.cpu_linear.has_units", lambda dtype, units=units: units)
        choices = choose_all(large, spare_bytes)
        assert len(choices) == 2
        for choice in choices.values():
            assert choice.few is (hold_packed if units else hold_plain)
            assert (choice.many is choice.few) == (units or not spare_bytes)


def test_large_float32_models_are_packed_for_several_tokens() -> None:
    (choice,) = choose_all([LinearSpec(256, IN_CACHE // 1024, (), torch.float32)], 1 << 40).values()
    assert (choice.few, choice.many) == (hold_transposed, hold_packed)


def test_a_choice_is_one_of_the_ways() -> None:
    choice = choose(32, 16, torch.float32, roomy=True, in_cache=True)
    assert {choice.few, choice.many} <= {hold_plain, hold_transposed, hold_packed}
    assert spare_memory() > 0


def test_large_weights_of_a_small_model_are_packed_for_several_tokens_by_rule() -> None:
    choice = choose(512, 256, torch.float32, roomy=True, in_cache=True)
    assert (choice.few, choice.many) == (hold_transposed, hold_packed)
    weight, x = torch.randn(512, 256), torch.randn(5, 256)
    held = choice.hold(weight, None)
    for tokens in (1, 5):
        torch.testing.assert_close(held(x[:tokens]), F.linear(x[:tokens], weight), rtol=1e-4, atol=1e-4)
    assert choose(512, 256, torch.float32, roomy=False, in_cache=True).many is not hold_packed
