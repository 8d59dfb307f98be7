"""The assembly that makes floats of codes on NVIDIA's GPUs, carried out here on random words, gives what they stand
for."""

import re

import pytest
import torch

from headrace.kernels.coded import E2M1
from headrace.kernels.tiled import _ready

tiled_codes = pytest.importorskip("headrace.kernels.tiled_codes", reason="the kernels need Triton")

MASK = 0xFFFFFFFF


def in_pairs(compute):
    """An instruction for the two bfloat16 of a register."""

    def on_words(*words):
        halves = []
        for shift in (0, 16):
            numbers = [(word >> shift & 0xFFFF).to(torch.uint16).view(torch.bfloat16).double() for word in words]
            halves.append(compute(*numbers).to(torch.bfloat16).view(torch.uint16).long() << shift)
        return halves[0] | halves[1]

    return on_words


def lop3(a, b, c, table):
    assert table == 0xEA
    return a & b | c


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lop3,
    "sub.bf16x2": in_pairs(lambda a, b: a - b),
    "fma.rn.bf16x2": in_pairs(lambda a, b, c: a * b + c),
}


def carried_out(assembly, words, outputs):
    """The registers that assembly makes of words [n] of 32 bits # [n, outputs]"""
    registers = {f"${outputs}": words}

    def value(operand):
        return registers[operand] if operand in registers else torch.tensor(int(operand, 0))

    for name, operands in re.findall(r"^([a-z]\S+) (.*);$", assembly, re.MULTILINE):
        into, *given = operands.split(", ")
        registers[into] = (INSTRUCTIONS[name](*map(value, given)) & MASK).expand(words.shape)
    return torch.stack([registers[f"${place}"] for place in range(outputs)], 1)


def e4m3(codes):
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()


@pytest.mark.parametrize(
    ("name", "bits", "dtype", "meaning"),
    [
        ("_INTEGERS_4_BF16", 4, torch.bfloat16, lambda codes: 128 + codes),
        ("_INTEGERS_4_F16", 4, torch.float16, lambda codes: 1024 + codes),
        ("_INTEGERS_8_BF16", 8, torch.bfloat16, lambda codes: codes),
        ("_INTEGERS_8_F16", 8, torch.float16, lambda codes: 1024 + codes),
        ("_E2M1_BF16", 4, torch.bfloat16, lambda codes: torch.tensor(E2M1).double()[codes] * 2.0**-126),
        ("_E2M1_F16", 4, torch.float16, lambda codes: torch.tensor(E2M1).double()[codes] * 2.0**-14),
        ("_E4M3_BF16", 8, torch.bfloat16, lambda codes: e4m3(codes) * 2.0**-120),
        ("_E4M3_F16", 8, torch.float16, lambda codes: e4m3(codes) * 2.0**-8),
    ],
)
def test_codes_of_two_words_become_pairs(name, bits, dtype, meaning):
    per_word = 16 // bits
    codes = torch.randint(0, 1 << bits, (1000, 2, per_word))
    words = (codes << bits * torch.arange(per_word)).sum(-1)
    if "E2M1" in name:
        words = _ready(words)
    made = carried_out(getattr(tiled_codes, name).value, words[:, 0] | words[:, 1] << 16, per_word)
    halves = torch.stack((made & 0xFFFF, made >> 16), 1).to(torch.uint16).view(dtype).double()
    wanted = meaning(codes).double()
    number = ~wanted.isnan()  # e4m3 has two codes that are none
    assert torch.equal(halves[number], wanted[number])
