"""How attention reads an fp8 KV cache: in registers, as float16, which holds every fp8 number exactly.

Decodes load values as int16 pairs, because the matrix units want them transposed and shared memory transposes 16 bits
at a time. What is written there, and by whose scales, stands in rotary.py.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

from headrace.kernels._triton import tl, triton


@triton.jit
def split_pairs(pairs, FP8: tl.constexpr):
    """int16 pairs of fp8 -> float16 of the low bytes, of the high bytes."""
    low = pairs.to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    high = (pairs >> 8).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def as_float16(q):
    """q in float16, each row multiplied by a power of two so that it is at most 1; and 1 / that power # [rows, 1]."""
    wide = q.to(tl.float32)
    power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30))))[:, None]
    return (wide / power).to(tl.float16), power
