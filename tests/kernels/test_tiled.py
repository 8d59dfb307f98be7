"""Weights in the order of the matrix units hold the same numbers, whatever does not divide their sizes."""

from dataclasses import replace

import pytest
import torch

from headrace.kernels.tiled import BLOCK, MOST_BLOCKS, ROWS, tile, why_not_tiled
from tests.kernels.coded_weights import KINDS, OF_EXPERTS, random_coded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost(kind, dtype):
    for n, k, gated in ((96, 288, True), (70, 160, False), (64, 128, False), (130, 416, True)):
        weight = random_coded(n, k, **KINDS[kind])
        tiled = tile(weight, dtype, gated)
        torch.testing.assert_close(
            tiled.dequantize(torch.float32), weight.dequantize(torch.float32), rtol=1e-6, atol=0.0
        )
        assert tiled.codes.shape[:2] == (-(-tiled.codes.shape[0] * ROWS // ROWS), -(-k // BLOCK))


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_experts_are_tiled_one_by_one(kind):
    weight = random_coded(3, 70, 160, **OF_EXPERTS[kind])
    held = tile(weight, torch.bfloat16, gated=True)
    wide = held.dequantize(torch.float32)
    for index in range(3):
        alone = tile(weight.expert(index), torch.bfloat16, gated=True).dequantize(torch.float32)
        assert torch.equal(held.expert(index).dequantize(torch.float32), alone)
        assert torch.equal(wide[index], alone)
    torch.testing.assert_close(wide, weight.dequantize(torch.float32), rtol=2**-11, atol=0.0)
    room = held.codes.untyped_storage().nbytes() // held.codes.element_size()
    assert room == held.codes.numel() + MOST_BLOCKS * held.codes[0, 0, 0].numel()


def test_codes_take_the_bytes_of_their_format():
    """And scales: whole tiles and blocks hold at most a byte more an output and block."""
    for kind, bits in (
        ("int4 wide groups", 4 + 24 / 128),
        ("mxfp4", 4 + 8 / 32),
        ("nvfp4", 4 + 8 / 16),
        ("int8 groups", 8 + 24 / 64),
    ):
        weight = tile(random_coded(128, 512, **KINDS[kind]), torch.bfloat16)
        held = weight.codes.nbytes + weight.words.nbytes
        assert held <= 1.05 * bits / 8 * 128 * 512


def test_a_kernel_may_read_blocks_beyond_the_last():
    weight = tile(random_coded(64, 128, **KINDS["int4 wide groups"]), torch.bfloat16)
    for tensor in (weight.codes, weight.words):
        room = tensor.untyped_storage().nbytes() // tensor.element_size()
        beyond = tensor.as_strided((room,), (1,))[tensor.numel() :]
        assert len(beyond) == MOST_BLOCKS * tensor[0, 0].numel()
        assert not beyond.any()


def test_scales_of_32_bits_keep_float16s_precision():
    """Whatever their size is: a row's power of two goes to its factor."""
    weight = random_coded(64, 256, bits=4, group_size=128, scales=torch.float32)
    large = replace(weight, scales=weight.scales * torch.logspace(-20, 20, 64)[:, None])
    found, expected = tile(large, torch.bfloat16).dequantize(torch.float32), large.dequantize(torch.float32)
    torch.testing.assert_close(found, expected, rtol=2**-11, atol=0.0)


def test_a_group_whose_scale_is_0_is_0():
    weight = random_coded(64, 128, **KINDS["nvfp4"])
    weight.scales.view(torch.uint8)[:, 3] = 0
    assert not tile(weight, torch.bfloat16).dequantize(torch.float32)[:, 48:64].any()


def test_what_has_no_tiles():
    assert "48" in why_not_tiled(random_coded(64, 144, bits=4, group_size=48))
    assert not why_not_tiled(random_coded(64, 48, bits=4, group_size=48))
