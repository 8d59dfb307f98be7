"""Holds device functions that turn tiles of a `PackedWeight` (packed.py) into numbers for kernels to multiply.

A tile is of bytes # [rows, bytes]. Of 4-bit codes, a byte's lower one belongs to input `column_of(byte)` and its upper
one to the input 16 further on: a tile becomes two, and each run of 16 bytes has one scale in either. Of 8-bit codes a
byte is an input. FLOATS: codes are e2m1 or, of 8 bits, e4m3.
"""

from __future__ import annotations

from functools import lru_cache

from headrace.kernels._triton import tl, triton
from headrace.kernels.packed import PackedWeight

# Each widens 4 bytes of one register ($4) to two pairs of lower ($0, $1) and two of upper codes ($2, $3).
# Integers: a code becomes the last bits of 128 (bfloat16) or of 1024 (float16), less 128 + 8 or 1024 + 8.
_INTEGERS = """{{
.reg .b32 lo, hi, one, less;
and.b32 lo, $4, 0x0f0f0f0f;
shr.u32 hi, $4, 4;
and.b32 hi, hi, 0x0f0f0f0f;
prmt.b32 $0, lo, {magic}, 0x4140;
prmt.b32 $1, lo, {magic}, 0x4342;
prmt.b32 $2, hi, {magic}, 0x4140;
prmt.b32 $3, hi, {magic}, 0x4342;
mov.b32 one, {one};
mov.b32 less, {less};
fma.rn.{kind}x2 $0, $0, one, less;
fma.rn.{kind}x2 $1, $1, one, less;
fma.rn.{kind}x2 $2, $2, one, less;
fma.rn.{kind}x2 $3, $3, one, less;
}}"""
_INTEGERS_BF16 = tl.constexpr(_INTEGERS.format(kind="bf16", magic="0x43434343", one="0x3f803f80", less="0xc308c308"))
_INTEGERS_F16 = tl.constexpr(_INTEGERS.format(kind="f16", magic="0x64646464", one="0x3c003c00", less="0xe408e408"))
# e2m1: sign, exponent and mantissa go to the places of the wider type's, which makes a number that is 2 ** 126 times
# (float16: 2 ** 14) too small, 0.5 included, which is subnormal there. One multiplication by the sum of two powers of 2
# moves the sign and the rest by as many places as each has to go.
_E2M1_BF16 = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
and.b32 $0, a, 0x000f000f;
and.b32 $1, b, 0x000f000f;
and.b32 $2, a, 0x00f000f0;
and.b32 $3, b, 0x00f000f0;
mul.lo.u32 $0, $0, 0x1040;
mul.lo.u32 $1, $1, 0x1040;
mul.lo.u32 $2, $2, 0x0104;
mul.lo.u32 $3, $3, 0x0104;
and.b32 $0, $0, 0x81c081c0;
and.b32 $1, $1, 0x81c081c0;
and.b32 $2, $2, 0x81c081c0;
and.b32 $3, $3, 0x81c081c0;
}""")
_E2M1_F16 = tl.constexpr("""{
.reg .b32 lo, hi, m, s;
shl.b32 m, $4, 1;
and.b32 m, m, 0x0e0e0e0e;
shl.b32 s, $4, 4;
lop3.b32 lo, s, 0x80808080, m, 0xea;
shr.u32 m, $4, 3;
and.b32 m, m, 0x0e0e0e0e;
lop3.b32 hi, $4, 0x80808080, m, 0xea;
prmt.b32 $0, lo, 0, 0x1404;
prmt.b32 $1, lo, 0, 0x3424;
prmt.b32 $2, hi, 0, 0x1404;
prmt.b32 $3, hi, 0, 0x3424;
}""")
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r")


@lru_cache(maxsize=1)
def has_asm() -> bool:
    """Tell whether kernels may use the assembly above, as NVIDIA's compute capability 8.0 and later do."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 80)


def packed_options(weight: PackedWeight) -> dict[str, int | bool]:
    """Return the compile-time arguments by which kernels read `weight`."""
    return {
        "BITS": weight.bits,
        "FLOATS": weight.values != "integer",
        "GROUP": weight.group_size,
        "ASM": has_asm(),
    }


@triton.jit
def column_of(byte, BITS: tl.constexpr):
    """Return the input that each byte's code, or lower code, belongs to."""
    return byte // 16 * 32 + byte % 16 if BITS == 4 else byte


@triton.jit
def _place_half(code, DTYPE: tl.constexpr, FLOATS: tl.constexpr):
    """Return what the assembly makes of codes of 4 bits, one a byte, by plain operations."""
    bits = code.to(tl.int16)
    if FLOATS and DTYPE.is_fp16():
        wide = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    elif FLOATS:
        wide = (((bits & 8) << 12) | ((bits & 7) << 6)).to(tl.bfloat16, bitcast=True)
    elif DTYPE.is_fp16():
        wide = (bits | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        wide = (bits | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    return wide


@triton.jit
def place_4(codes, DTYPE: tl.constexpr, FLOATS: tl.constexpr, ASM: tl.constexpr):
    """Return the values (of lower codes, of upper codes) of bytes, exactly, in float16 if that is DTYPE, otherwise in
    bfloat16. Those of integers are the codes less 8; those of e2m1 are 2 ** 14 or 2 ** 126 times too small,
    which a caller may undo together with a scale."""
    if ASM and DTYPE.is_fp16():
        lower, upper = tl.inline_asm_elementwise(
            _E2M1_F16 if FLOATS else _INTEGERS_F16, _REGISTERS, [codes], (tl.float16, tl.float16), True, 4
        )
    elif ASM:
        lower, upper = tl.inline_asm_elementwise(
            _E2M1_BF16 if FLOATS else _INTEGERS_BF16, _REGISTERS, [codes], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        lower, upper = _place_half(codes & 15, DTYPE, FLOATS), _place_half(codes >> 4, DTYPE, FLOATS)
    return lower, upper


@triton.jit
def widen_4(codes, DTYPE: tl.constexpr, FLOATS: tl.constexpr, ASM: tl.constexpr):
    """Return the values (of lower codes, of upper codes) of bytes, exactly, in DTYPE. Those of integers are the codes
    less 8."""
    lower, upper = place_4(codes, DTYPE, FLOATS, ASM)
    if FLOATS:
        factor: tl.constexpr = 2.0**14 if DTYPE.is_fp16() else 2.0**126
        lower, upper = lower * factor, upper * factor
    return lower.to(DTYPE), upper.to(DTYPE)


@triton.jit
def widen_8(codes, DTYPE: tl.constexpr, FLOATS: tl.constexpr):
    """Return the values of codes of 8 bits, exactly, in DTYPE. Those of integers are the codes less 128."""
    if FLOATS:
        wide = e4m3_to_float(codes)
    else:  # a code becomes the last bits of 2 ** 23, since conversions of integers are slow
        wide = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 128.0)
    return wide.to(DTYPE)


@triton.jit
def e4m3_to_float(codes):
    """Return numbers of e4m3, given as bytes, in fp32; NaN becomes 480."""
    bits = codes.to(tl.int32)  # moved to the places of a float's, which makes a number 2 ** 120 times too small
    return (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def widen_scale(scale):
    """Return scales in fp32, whichever type they are held in; a byte is e8m0, 2 ** (byte - 127)."""
    if scale.dtype == tl.uint8:
        wide = tl.maximum(scale.to(tl.int32) << 23, 1 << 22).to(tl.float32, bitcast=True)
    else:
        wide = scale.to(tl.float32)
    return wide


@triton.jit
def load_groups(
    ptr, at, start, RUNS: tl.constexpr, HALF: tl.constexpr,
    K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load # [rows, RUNS] scales or zeros of the groups that runs of bytes are in, of the upper codes if HALF is 1.
    `at` [rows]: where the row's first group is; `start`: the input where run 0 begins, a multiple of 32. Runs beyond
    the last group get that."""
    group = (start + tl.arange(0, RUNS) * (128 // BITS) + HALF * 16) // GROUP
    return tl.load(ptr + at[:, None] + tl.minimum(group, (K - 1) // GROUP)[None, :])


@triton.jit
def over_runs(of_runs, STEP: tl.constexpr):
    """Return # [rows, STEP] given # [rows, STEP / 16], a number for each run of bytes."""
    rows: tl.constexpr = of_runs.shape[0]
    runs: tl.constexpr = of_runs.shape[1]
    return tl.reshape(tl.broadcast_to(of_runs[:, :, None], [rows, runs, 16]), [rows, STEP])


@triton.jit
def sums_of_runs(
    codes, x, x_upper, scales_ptr, zeros_ptr, at, start,
    K: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the products of the weight in codes [rows, bytes] with x [rows or 1, bytes], of its lower codes, and with
    `x_upper`, added up by run # [rows, bytes / 16] fp32, without factors of outputs. `at` and `start` as in
    `load_groups`."""
    RUNS: tl.constexpr = codes.shape[1] // 16
    if BITS == 8:
        total = _sums(widen_8(codes, x.dtype, FLOATS), x, scales_ptr, zeros_ptr, at, start, 0, RUNS, K, BITS, GROUP)
    else:
        lower, upper = place_4(codes, x.dtype, FLOATS, ASM)
        if FLOATS:  # its factor, split so that no product is too small for fp32
            FACTOR: tl.constexpr = 2.0**7 if x.dtype.is_fp16() else 2.0**63
            x, x_upper = x.to(tl.float32) * FACTOR, x_upper.to(tl.float32) * FACTOR
        if GROUP % 32 == 0 and zeros_ptr is None:  # one scale for both
            total = _products(lower, x, RUNS) + _products(upper, x_upper, RUNS)
            total *= widen_scale(load_groups(scales_ptr, at, start, RUNS, 0, K, BITS, GROUP))
        else:
            total = _sums(lower, x, scales_ptr, zeros_ptr, at, start, 0, RUNS, K, BITS, GROUP)
            total += _sums(upper, x_upper, scales_ptr, zeros_ptr, at, start, 1, RUNS, K, BITS, GROUP)
        if FLOATS:
            total *= FACTOR
    return total


@triton.jit
def _products(wide, x, RUNS: tl.constexpr):
    products = wide.to(tl.float32) * x.to(tl.float32)
    return tl.sum(tl.reshape(products, [products.shape[0], RUNS, 16]), axis=2)


@triton.jit
def _sums(
    wide, x, scales_ptr, zeros_ptr, at, start, HALF: tl.constexpr, RUNS: tl.constexpr,
    K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    total = _products(wide, x, RUNS)
    if zeros_ptr is not None:  # (code - zero) * x = (code - middle) * x + (middle - zero) * x
        zero = load_groups(zeros_ptr, at, start, RUNS, HALF, K, BITS, GROUP).to(tl.float32)
        x_sums = tl.sum(tl.reshape(x.to(tl.float32), [x.shape[0], RUNS, 16]), axis=2)
        total += ((1 << (BITS - 1)) - zero) * x_sums
    return total * widen_scale(load_groups(scales_ptr, at, start, RUNS, HALF, K, BITS, GROUP))
