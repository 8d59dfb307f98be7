"""Makes floats of the codes of a TiledWeight (tiled.py), without a conversion: by their bits.

An integer is placed in the mantissa of 128 (bfloat16) or of 1024 (float16), and both are subtracted later; those of
e2m1 are a float's already, 2 ** 126 or 2 ** 14 times too small, and those of e4m3 2 ** 120 or 2 ** 8 times.
"""

from __future__ import annotations

from headrace.kernels._triton import tl, triton

# Each takes the codes out of the words of two neighbouring columns ($N, the last) and makes pairs of floats of them.
_INTEGERS_4 = """{{
.reg .b32 t;
lop3.b32 $0, $4, 0x000f000f, {magic}, 0xea;
shr.u32 t, $4, 4;
lop3.b32 $1, t, 0x000f000f, {magic}, 0xea;
shr.u32 t, $4, 8;
lop3.b32 $2, t, 0x000f000f, {magic}, 0xea;
shr.u32 t, $4, 12;
lop3.b32 $3, t, 0x000f000f, {magic}, 0xea;
}}"""
# Of 8 bits, bfloat16's mantissa holds half: 16 * upper + lower.
_INTEGERS_8_BF16 = tl.constexpr("""{
.reg .b32 t, h, m, f;
mov.b32 m, 0x43004300;
mov.b32 f, 0x41804180;
lop3.b32 $0, $2, 0x000f000f, m, 0xea;
sub.bf16x2 $0, $0, m;
shr.u32 t, $2, 4;
lop3.b32 h, t, 0x000f000f, m, 0xea;
sub.bf16x2 h, h, m;
fma.rn.bf16x2 $0, h, f, $0;
shr.u32 t, $2, 8;
lop3.b32 $1, t, 0x000f000f, m, 0xea;
sub.bf16x2 $1, $1, m;
shr.u32 t, $2, 12;
lop3.b32 h, t, 0x000f000f, m, 0xea;
sub.bf16x2 h, h, m;
fma.rn.bf16x2 $1, h, f, $1;
}""")
# The upper bit of e4m3 goes to a float's, the rest to where its exponent's and mantissa's bits meet: a number that is
# 2 ** 120 or 2 ** 8 times too small.
_E4M3 = """{{
.reg .b32 t, u;
shl.b32 t, $2, {left};
and.b32 t, t, {rest};
shl.b32 u, $2, 8;
and.b32 u, u, 0x80008000;
or.b32 $0, t, u;
shr.u32 t, $2, {right};
and.b32 t, t, {rest};
and.b32 u, $2, 0x80008000;
or.b32 $1, t, u;
}}"""
_E4M3_BF16 = tl.constexpr(_E4M3.format(left=4, right=4, rest="0x07f007f0"))
_E4M3_F16 = tl.constexpr(_E4M3.format(left=7, right=1, rest="0x3f803f80"))
_INTEGERS_8_F16 = tl.constexpr("""{
.reg .b32 t;
lop3.b32 $0, $2, 0x00ff00ff, 0x64006400, 0xea;
shr.u32 t, $2, 8;
lop3.b32 $1, t, 0x00ff00ff, 0x64006400, 0xea;
}""")
_INTEGERS_4_BF16 = tl.constexpr(_INTEGERS_4.format(magic="0x43004300"))
_INTEGERS_4_F16 = tl.constexpr(_INTEGERS_4.format(magic="0x64006400"))
# tiled.py has laid the bits of e2m1 out for this: three codes need a shift or none. Of the fourth, one multiplication
# by the sum of two powers of 2 moves the sign and a bit of the exponent.
_E2M1_BF16 = tl.constexpr("""{
.reg .b32 t, u;
and.b32 $0, $4, 0x81c081c0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81c081c0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x81c081c0;
shr.u32 t, $4, 5;
and.b32 u, t, 0x02200220;
mul.lo.u32 u, u, 0x44;
lop3.b32 t, t, 0x01400140, u, 0xea;
and.b32 $3, t, 0x81c081c0;
}""")
# float16's exponent lies 3 bits higher.
_E2M1_F16 = tl.constexpr("""{
.reg .b32 t, u;
shl.b32 t, $4, 3;
and.b32 u, t, 0x0e000e00;
lop3.b32 $0, $4, 0x80008000, u, 0xea;
shl.b32 u, $4, 6;
and.b32 $1, u, 0x0e000e00;
lop3.b32 $1, t, 0x80008000, $1, 0xea;
shl.b32 t, $4, 9;
and.b32 t, t, 0x0e000e00;
lop3.b32 $2, u, 0x80008000, t, 0xea;
shr.u32 t, $4, 2;
and.b32 t, t, 0x0a000a00;
lop3.b32 t, $4, 0x04000400, t, 0xea;
shl.b32 u, $4, 1;
lop3.b32 $3, u, 0x80008000, t, 0xea;
}""")
_TO_FOUR, _TO_TWO = tl.constexpr("=&r,=&r,=&r,=&r,r"), tl.constexpr("=&r,=&r,r")


@triton.jit
def placed(words, SHIFT: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr, dtype: tl.constexpr):
    """Return what the assembly makes of the codes at SHIFT of int16 words."""
    code = (words >> SHIFT) & ((1 << BITS) - 1)
    if VALUES == "e2m1":
        if SHIFT == 12:
            bits = ((words << 1) & -0x8000) | ((words >> 5) & 0x0140) | ((words >> 3) & 0x0080)
        else:
            bits = words << (SHIFT // 4 * 3)
        MAGNITUDE: tl.constexpr = 3 if dtype == tl.float16 else 0
        bits = (bits & -0x8000) | ((bits & 0x01C0) << MAGNITUDE)
    elif VALUES == "e4m3":
        bits = ((code & 128) << 8) | ((code & 127) << (7 if dtype == tl.float16 else 4))
    elif dtype == tl.float16:
        bits = code | 0x6400
    elif BITS == 4:
        bits = code | 0x4300
    if dtype == tl.bfloat16 and BITS == 8 and VALUES == "integer":
        value = code.to(tl.float32).to(dtype)
    else:
        value = bits.to(dtype, bitcast=True)
    return value


@triton.jit
def unpacked(words, BITS: tl.constexpr, VALUES: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """Return the codes of int16 words, placed, the lowest bits' first: two or four tensors of the words' shape."""
    if BITS == 8:
        if ASM and dtype == tl.float16:
            codes = tl.inline_asm_elementwise(
                _E4M3_F16 if VALUES == "e4m3" else _INTEGERS_8_F16, _TO_TWO, [words], (tl.float16,) * 2, True, 2
            )
        elif ASM:
            codes = tl.inline_asm_elementwise(
                _E4M3_BF16 if VALUES == "e4m3" else _INTEGERS_8_BF16, _TO_TWO, [words], (tl.bfloat16,) * 2, True, 2
            )
        else:
            codes = placed(words, 0, 8, VALUES, dtype), placed(words, 8, 8, VALUES, dtype)
    elif ASM and dtype == tl.bfloat16:
        codes = tl.inline_asm_elementwise(
            _E2M1_BF16 if VALUES == "e2m1" else _INTEGERS_4_BF16, _TO_FOUR, [words], (tl.bfloat16,) * 4, True, 2
        )
    elif ASM:
        codes = tl.inline_asm_elementwise(
            _E2M1_F16 if VALUES == "e2m1" else _INTEGERS_4_F16, _TO_FOUR, [words], (tl.float16,) * 4, True, 2
        )
    else:
        codes = (
            placed(words, 0, 4, VALUES, dtype), placed(words, 4, 4, VALUES, dtype),
            placed(words, 8, 4, VALUES, dtype), placed(words, 12, 4, VALUES, dtype),
        )  # fmt: skip
    return codes
