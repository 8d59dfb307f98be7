"""Multiplies by tiles of a PackedWeight: the loops of kernels/gemm.py for weights of 4 and 8 bits.

A code becomes a float without a conversion, by its bits: those of an integer are placed in the mantissa of 16 (256 for
8 bits), which makes 16 + code; those of e2m1 are a float's already, 2 ** 126 times too small. What is too much or too
little is taken out of sums, once for the 16 inputs that lie together.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.kernels._triton import after_inputs, pairs_in_registers, tl, triton
from headrace.kernels.packed import PackedWeight
from headrace.kernels.packed_codes import e4m3_to_float, widen_scale

ONE_GROUP = 1 << 20
"""inputs that share a scale where all of an output's do"""
HELD_SCALES = {torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}


def packing(weight: PackedWeight) -> dict[str, Any]:
    """Return the launch options for a packed weight. Raises ValueError for values that only experts have."""
    if weight.values == "e4m3":
        raise ValueError("linears of e4m3 values are not packed: kernels/narrow.py serves them")
    e2m1 = weight.values == "e2m1"
    return {
        "BITS": weight.bits,
        "E2M1": e2m1,
        "SCALES": HELD_SCALES.get(weight.scales.dtype, "float"),
        "GROUP": ONE_GROUP if weight.scales.shape[-1] == 1 else weight.group_size,
        "ASM": pairs_in_registers(),
    }


@triton.jit
def _biased(codes, SHIFT: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr):
    """Return the value of the 4 bits from SHIFT on of uint8 `codes`, or of all 8, in fp32: plus 16 or 256 for integers,
    times 2 ** -126 for e2m1."""
    wide = codes.to(tl.int32)
    if E2M1:  # the sign's bit is copied over the six bits between it and the exponent's two
        bits = ((wide << (28 - SHIFT)) >> 6) & -0x7E400000
    elif BITS == 4:
        bits = (((wide >> SHIFT) & 15) << 19) | 0x41800000
    else:
        bits = (wide << 15) | 0x43800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def value_of(codes, SHIFT: tl.constexpr, BITS: tl.constexpr, E2M1: tl.constexpr):
    """Return what `_biased` does, with the power of two put right."""
    value = _biased(codes, SHIFT, BITS, E2M1)
    if E2M1:
        value *= 8.507059173023462e37
    return value


@triton.jit
def scale_of(ptrs, SCALES: tl.constexpr):
    """Load scales as fp32. SCALES: how they are held."""
    return _as_scale(tl.load(ptrs), SCALES)


@triton.jit
def _as_scale(held, SCALES: tl.constexpr):
    """Return loaded scales in fp32."""
    return e4m3_to_float(held) if SCALES == "e4m3" else widen_scale(held)


@triton.jit
def _run_sums(values, RUNS: tl.constexpr):
    """Return values [rows, inputs] added up over runs of equal length # [rows, RUNS]."""
    rows: tl.constexpr = values.shape[0]
    return tl.sum(tl.reshape(values, [rows, RUNS, values.shape[1] // RUNS]), axis=2)


@triton.jit
def zero_of(zero_ptr, at, BITS: tl.constexpr, E2M1: tl.constexpr):
    """Load what `_biased` and the format's zero add to values, in fp32."""
    BIAS: tl.constexpr = 16 if BITS == 4 else 256
    if E2M1:
        zero = tl.zeros(at.shape, tl.float32)
    elif zero_ptr is None:
        zero = tl.full(at.shape, BIAS + (1 << (BITS - 1)), tl.float32)
    else:
        zero = BIAS + tl.load(zero_ptr + at).to(tl.float32)
    return zero


@triton.jit
def packed_vector_sums(
    codes, x_ptr, scale_ptr, zero_ptr, row, start, K, groups,
    BITS: tl.constexpr, E2M1: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return codes [rows, bytes of BLOCK_K inputs] times x [K] from `start` on, added up by 16 bytes
    # [rows, BLOCK_K * BITS / 128] fp32."""
    RUNS: tl.constexpr = BLOCK_K * BITS // 128
    SPAN: tl.constexpr = 128 // BITS  # inputs of 16 bytes
    ALIKE: tl.constexpr = BITS == 8 or GROUP % 32 == 0  # all of 16 bytes are of one group
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    first = tl.arange(0, RUNS) * SPAN
    k = start + byte // 16 * SPAN + byte % 16
    at = row[:, None] * groups + tl.minimum((start + first) // GROUP, groups - 1)[None, :]
    x = tl.broadcast_to(_inputs(x_ptr + k, k < K, E2M1)[None, :], codes.shape)
    products = _biased(codes, 0, BITS, E2M1) * x
    if BITS == 8:
        sums, plain = _run_sums(products, RUNS), _run_sums(x, RUNS)
    else:
        x_upper = tl.broadcast_to(_inputs(x_ptr + k + 16, k + 16 < K, E2M1)[None, :], codes.shape)
        upper = _biased(codes, 4, BITS, E2M1) * x_upper
        if ALIKE:
            sums, plain = _run_sums(products + upper, RUNS), _run_sums(x + x_upper, RUNS)
        else:
            sums, plain = _run_sums(products, RUNS), _run_sums(x, RUNS)
    if not E2M1:
        sums -= zero_of(zero_ptr, at, BITS, E2M1) * plain
    sums *= scale_of(scale_ptr + at, SCALES)
    if not ALIKE:
        at = row[:, None] * groups + tl.minimum((start + first + 16) // GROUP, groups - 1)[None, :]
        more = _run_sums(upper, RUNS)
        if not E2M1:
            more -= zero_of(zero_ptr, at, BITS, E2M1) * _run_sums(x_upper, RUNS)
        sums += more * scale_of(scale_ptr + at, SCALES)
    return sums


@triton.jit
def _inputs(ptrs, inside, E2M1: tl.constexpr):
    """Load activations in fp32, times 2 ** 63 for e2m1: products of what `_biased` returns would be too small."""
    x = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    if E2M1:
        x *= 9.223372036854775808e18
    return x


@triton.jit
def _dot_of_bytes(codes, x, acc, SIGNED: tl.constexpr, ASM: tl.constexpr):
    """Return acc + the products of the four bytes of each int32 of `codes`, unsigned, with those of x, added up."""
    if ASM and SIGNED:
        acc = tl.inline_asm_elementwise("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, acc], tl.int32, True, 1)
    elif ASM:
        acc = tl.inline_asm_elementwise("dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [codes, x, acc], tl.int32, True, 1)
    else:
        for byte in tl.static_range(4):
            value = (x >> (8 * byte)) & 255
            if SIGNED:
                value = (value ^ 128) - 128
            acc += ((codes >> (8 * byte)) & 255) * value
    return acc


@triton.jit
def _words(bits, SHIFT: tl.constexpr):
    """Return the bytes from SHIFT on of bits [words, 4] int32, together in a word # [1, words]."""
    return tl.sum(((bits >> SHIFT) & 255) << (tl.arange(0, 4) * 8)[None, :], axis=1)[None, :]


@triton.jit
def integer_vector_sums(
    codes, x_ptr, scale_ptr, zero_ptr, row, start, K, groups,
    BITS: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return codes [rows, words of BLOCK_K inputs] int32 times x [K] from `start` on, added up by four words
    # [rows, BLOCK_K * BITS / 128] fp32.

    The inputs that meet four words become integers of 16 bits that share a factor, and their upper and lower bytes are
    multiplied by four codes in one instruction. Sums are exact; the inputs' rounding, 2 ** -16 of the largest of them,
    is less than that of their own type but in float32.
    """
    WORDS: tl.constexpr = BLOCK_K * BITS // 32
    RUNS: tl.constexpr = WORDS // 4
    SPAN: tl.constexpr = 128 // BITS  # inputs of four words
    MAGIC: tl.constexpr = 0x4B400000  # the bits of 1.5 * 2 ** 23, whose last ones are an integer that is added to it
    word = tl.arange(0, WORDS)
    k = start + (word // 4 * SPAN + word % 4 * 4)[:, None] + tl.arange(0, 4)[None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    largest = tl.max(tl.reshape(tl.abs(x), [RUNS, 16]), axis=1)
    if BITS == 4:
        x_upper = tl.load(x_ptr + k + 16, mask=k + 16 < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.reshape(tl.abs(x_upper), [RUNS, 16]), axis=1))
    largest = tl.maximum(largest, 1e-30)
    inverse = tl.reshape(tl.broadcast_to((32767.0 / largest)[:, None], [RUNS, 16]), [WORDS, 4])
    bits = (x * inverse + 12582912.0).to(tl.int32, bitcast=True)
    total = tl.sum(tl.reshape(bits - MAGIC, [RUNS, 16]), axis=1)
    lower = codes & 0x0F0F0F0F if BITS == 4 else codes
    sums = _dot_of_bytes(lower, tl.broadcast_to(_words(bits, 8), codes.shape), tl.zeros_like(codes), True, ASM)
    if BITS == 4:
        upper = (codes >> 4) & 0x0F0F0F0F
        bits_upper = (x_upper * inverse + 12582912.0).to(tl.int32, bitcast=True)
        total += tl.sum(tl.reshape(bits_upper - MAGIC, [RUNS, 16]), axis=1)
        sums = _dot_of_bytes(upper, tl.broadcast_to(_words(bits_upper, 8), codes.shape), sums, True, ASM)
    sums = _dot_of_bytes(lower, tl.broadcast_to(_words(bits, 0), codes.shape), sums << 8, False, ASM)
    if BITS == 4:
        sums = _dot_of_bytes(upper, tl.broadcast_to(_words(bits_upper, 0), codes.shape), sums, False, ASM)
    sums = tl.sum(tl.reshape(sums, [codes.shape[0], RUNS, 4]), axis=2)
    first = start + tl.arange(0, RUNS) * SPAN
    at = row[:, None] * groups + tl.minimum(first // GROUP, groups - 1)[None, :]
    if zero_ptr is None:
        sums -= total[None, :] * (1 << (BITS - 1))
    else:
        sums -= total[None, :] * tl.load(zero_ptr + at).to(tl.int32)
    return sums.to(tl.float32) * (scale_of(scale_ptr + at, SCALES) * (largest * (1.0 / 32767.0))[None, :])


# Places codes of 4 bytes of one register ($4) behind the magic bits of two numbers, and takes offsets ($5, $6) away.
_PAIRS = """{{
.reg .b32 a, b, m, v;
mov.b32 m, {magic};
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 v, a, 0x000f000f, m, 0xea;
sub.{kind}x2 $0, v, $5;
lop3.b32 v, b, 0x000f000f, m, 0xea;
sub.{kind}x2 $1, v, $6;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 v, a, 0x000f000f, m, 0xea;
sub.{kind}x2 $2, v, $5;
lop3.b32 v, b, 0x000f000f, m, 0xea;
sub.{kind}x2 $3, v, $6;
}}"""
_PAIRS_BF16 = tl.constexpr(_PAIRS.format(kind="bf16", magic="0x43004300"))  # 128 + code
_PAIRS_F16 = tl.constexpr(_PAIRS.format(kind="f16", magic="0x64006400"))  # 1024 + code
_PAIRS_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


@triton.jit
def _pairs(codes, offset, BF16: tl.constexpr):
    """Return (lower, upper) four bits of uint8 `codes` [rows, bytes], less `offset` of their shape, in 16 bits.

    The compiler would take every code out by itself; here two stay in a register all the way to the matrix units.
    """
    if BF16:
        pair = tl.inline_asm_elementwise(
            _PAIRS_BF16, _PAIRS_REGISTERS, [codes, offset], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        pair = tl.inline_asm_elementwise(
            _PAIRS_F16, _PAIRS_REGISTERS, [codes, offset], (tl.float16, tl.float16), True, 4
        )
    return pair


@triton.jit
def scaled(values, offset, scale, dtype: tl.constexpr):
    """Return (values [rows, bytes] - offset) * scale, both [rows, bytes / 16], in `dtype`."""
    rows: tl.constexpr = values.shape[0]
    runs: tl.constexpr = values.shape[1] // 16
    split = (tl.reshape(values, [rows, runs, 16]) - offset[:, :, None]) * scale[:, :, None]
    return tl.reshape(split.to(dtype), [rows, runs * 16])


@triton.jit
def add_product(weight, x, acc, SWAP: tl.constexpr):
    """Return acc + x [rows, inputs] @ weight [outputs, inputs].T, transposed if SWAP."""
    if SWAP:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def packed_dots(
    codes_ptr, x_ptr, scale_ptr, zero_ptr, weight_row, row, row_in, K, groups, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    BITS: tl.constexpr, E2M1: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return x [BLOCK_M, K] times the rows of codes # [BLOCK_N, BLOCK_M] if SWAP, else turned, fp32.

    Where a group is not split by blocks, sums are scaled, otherwise weights before they are rounded to x's type.
    """
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    SPAN: tl.constexpr = 128 // BITS
    SCALES_SUMS: tl.constexpr = GROUP % BLOCK_K == 0
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PAIRS: tl.constexpr = ASM and BITS == 4 and not E2M1 and dtype != tl.float32
    BIAS: tl.constexpr = (128 if dtype == tl.bfloat16 else 1024) if PAIRS else 16 if BITS == 4 else 256
    width = (K + 31) // 32 * (4 * BITS)
    byte = tl.arange(0, BYTES)
    k = byte // 16 * SPAN + byte % 16
    first = tl.arange(0, BYTES // 16) * SPAN
    codes_ptrs = codes_ptr + weight_row.to(tl.int64)[:, None] * width + byte[None, :]
    x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
    of_row = weight_row * groups
    if SCALES_SUMS:  # loaded a block ahead; were zeros too, codes would take a way through shared memory
        scale = tl.load(scale_ptr + of_row)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        waited = after_inputs(start, BLOCK_K, OVERLAP)
        if EVEN_K:
            codes = tl.load(codes_ptrs + start * BITS // 8)
            x = tl.load(x_ptrs + waited, mask=row_in[:, None], other=0.0)
        else:
            codes = tl.load(codes_ptrs + start * BITS // 8, mask=(start * BITS // 8 + byte < width)[None, :], other=0)
            x = tl.load(x_ptrs + waited, mask=row_in[:, None] & (start + k < K)[None, :], other=0.0)
        if BITS == 4:
            if EVEN_K:
                x_upper = tl.load(x_ptrs + 16 + waited, mask=row_in[:, None], other=0.0)
            else:
                inside = row_in[:, None] & (start + 16 + k < K)[None, :]
                x_upper = tl.load(x_ptrs + 16 + waited, mask=inside, other=0.0)
        if SCALES_SUMS:
            after = of_row + tl.minimum((start + BLOCK_K) // GROUP, groups - 1)
            next_scale = tl.load(scale_ptr + after)
            if zero_ptr is not None:
                offset = tl.load(zero_ptr + of_row + start // GROUP).to(tl.float32) + BIAS
            else:
                offset = tl.full([BLOCK_N], 0 if E2M1 else BIAS + (1 << (BITS - 1)), tl.float32)
            part = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
            if PAIRS:
                offsets = tl.broadcast_to(offset.to(dtype)[:, None], [BLOCK_N, BYTES])
                lower, upper = _pairs(codes, offsets, dtype == tl.bfloat16)
                part = add_product(upper, x_upper, add_product(lower, x, part, SWAP), SWAP)
            else:
                lower = (value_of(codes, 0, BITS, E2M1) - offset[:, None]).to(dtype)
                part = add_product(lower, x, part, SWAP)
                if BITS == 4:
                    upper = (value_of(codes, 4, BITS, E2M1) - offset[:, None]).to(dtype)
                    part = add_product(upper, x_upper, part, SWAP)
            factor = _as_scale(scale, SCALES)
            acc += part * (factor[:, None] if SWAP else factor[None, :])
            scale = next_scale
        else:
            at = of_row[:, None] + tl.minimum((start + first) // GROUP, groups - 1)[None, :]
            scale = scale_of(scale_ptr + at, SCALES)
            zero = zero_of(zero_ptr, at, BITS, E2M1)
            acc = add_product(scaled(value_of(codes, 0, BITS, E2M1), zero, scale, dtype), x, acc, SWAP)
            if BITS == 4:
                if GROUP % 32 != 0:
                    at = of_row[:, None] + tl.minimum((start + first + 16) // GROUP, groups - 1)[None, :]
                    scale = scale_of(scale_ptr + at, SCALES)
                    zero = zero_of(zero_ptr, at, BITS, E2M1)
                acc = add_product(scaled(value_of(codes, 4, BITS, E2M1), zero, scale, dtype), x_upper, acc, SWAP)
    return acc
