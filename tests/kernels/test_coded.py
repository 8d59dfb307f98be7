"""The one form of weights of 4 and 8 bits means what the formats say."""

import pytest
import torch

from headrace.kernels.coded import E2M1, CodedWeight
from tests.kernels.coded_weights import OF_EXPERTS, random_coded


def test_integers_have_zeros_scales_and_an_order():
    codes = torch.tensor([[0, 15] + [8] * 30], dtype=torch.uint8)
    scales, zeros = torch.tensor([[0.5, 2.0]]), torch.tensor([[3, 9]], dtype=torch.uint8)
    order = torch.arange(32).flip(0)
    weight = CodedWeight(codes, scales, zeros, torch.tensor([10.0]), bits=4, group_size=16, order=order)
    out = weight.dequantize(torch.float32)[0]
    assert out[31] == (0 - 3) * 0.5 * 10
    assert out[30] == (15 - 3) * 0.5 * 10
    assert out[0] == (8 - 9) * 2.0 * 10
    symmetric = CodedWeight(codes, scales, bits=4, group_size=16).dequantize(torch.float32)[0]
    assert symmetric[:3].tolist() == [-4.0, 3.5, 0.0]


def test_e2m1_with_powers_of_two():
    codes = torch.arange(32, dtype=torch.uint8)[None] % 16
    weight = CodedWeight(codes, torch.tensor([[130]], dtype=torch.uint8), bits=4, values="e2m1", group_size=32)
    assert weight.dequantize(torch.float32)[0].tolist() == [value * 8 for value in E2M1] * 2


def test_e4m3_is_torchs():
    codes = torch.tensor([[0, 1, 0x7E, 0x80, 0xB9] + [0] * 27], dtype=torch.uint8)
    weight = CodedWeight(codes, torch.tensor([[0.5]]), bits=8, values="e4m3", group_size=32)
    assert weight.dequantize(torch.float32)[0, :5].tolist() == [0.0, 2.0**-10, 224.0, 0.0, -0.5625]


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_experts_are_linears_of_one_size(kind):
    experts = random_coded(3, 10, 128, **OF_EXPERTS[kind])
    out = experts.dequantize(torch.float32)
    assert out.shape == (3, 10, 128)
    assert 0.01 < out.std() < 0.2
