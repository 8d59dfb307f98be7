"""How attention reads an fp8 KV cache: in registers, as float16, which holds every fp8 number exactly.

Values are loaded as int16 pairs, because the matrix units want them transposed and shared memory transposes 16 bits at
a time. What is written there, and by whose scales, stands in rotary.py.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

from functools import lru_cache

from headrace.kernels._triton import tl, triton


@triton.jit
def split_pairs(pairs, FP8: tl.constexpr, PTX: tl.constexpr):
    """int16 pairs of fp8 -> float16 of the low bytes, of the high bytes. With PTX: 3 instructions for 4 numbers where
    the compiler finds 8."""
    if PTX and tl.float8e5 == FP8:  # float16 without its last byte
        low, high = tl.inline_asm_elementwise(
            "{ prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xff00ff00; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b32 bytes; .reg .b16 low, high; prmt.b32 bytes, $2, 0, 0x3120; mov.b32 {low, high}, bytes;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = pairs.to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
        high = (pairs >> 8).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def as_float16(q):
    """q in float16, each row multiplied by a power of two so that it is at most 1; and 1 / that power # [rows, 1]."""
    wide = q.to(tl.float32)
    power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30))))[:, None]
    return (wide / power).to(tl.float16), power


@lru_cache(maxsize=1)
def has_fp8_conversion() -> bool:
    """NVIDIA's instructions that convert pairs of fp8: compute capability 8.9 and above."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)
