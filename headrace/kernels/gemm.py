"""Computes linear layers over few tokens, in any format, where reading the weight is all that costs.

No kernel writes weights, so a program loads its first ones before it waits for the kernel in front of it (programmatic
dependent launch), and memory stays busy across kernel boundaries. A norm between two linears needs no pass of its own:
the first one leaves it half done, the second finishes it (HalfNormed in norm.py). quantization/gpu_linear.py measures
which sizes are served here and which by the vendor's library.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels._triton import (
    after_inputs,
    into_l2,
    next_power_of_2,
    overlap,
    pairs_in_registers,
    tl,
    triton,
    wait_for_inputs,
)
from headrace.kernels.activation import GATES
from headrace.kernels.adapters import NO_ADAPTERS, Adapted, expand_adapters_reference, shrink_adapters_reference
from headrace.kernels.fp8 import NarrowWeight, Quantized
from headrace.kernels.gemm_config import BUCKETS, GemmConfig
from headrace.kernels.gemm_epilogue import (
    ACTIVATIONS,
    activated,
    add_adapters,
    add_product,
    finish,
    gated_row,
    rows_in_use,
    share_shrunk,
)
from headrace.kernels.norm import HalfNormed, half_norm_reference, half_norm_row, half_normed_over
from headrace.kernels.tiled import ROWS, TiledWeight
from headrace.kernels.tiled_gemm import launch_tiled
from headrace.kernels.tiled_vector import VECTOR_ROWS, launch_tiled_vector

BAND = 8
"""blocks of many tokens that are computed side by side, so that the L2 cache holds their inputs and weights"""


@triton.jit
def _place(num_tokens, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """Return which block of outputs and which block of tokens a program computes. BAND 0: they are the grid's."""
    if BAND == 0:
        across, down = tl.program_id(0), tl.program_id(1)
    else:
        height, width = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(N, BLOCK_N)
        band, place = tl.program_id(0) // (BAND * width), tl.program_id(0) % (BAND * width)
        height = tl.minimum(height - band * BAND, BAND)
        across, down = place // height, (band * BAND + place % height).to(tl.int64)
    return across, down


@triton.jit
def _outer(of_weight, of_x, SWAP: tl.constexpr):
    """Return the products of scales of a block's outputs and tokens, in the form of `_dots`."""
    if SWAP:
        scale = of_weight[:, None] * of_x[None, :]
    else:
        scale = of_x[:, None] * of_weight[None, :]
    return scale


@triton.jit
def _dots(
    rows_ptrs, x_ptr, scale_ptr, x_scale_ptr, weight_row, row, row_in, K, end, groups, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EVEN_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return x [BLOCK_M, K] times the rows of the weight at `rows_ptrs`, over inputs up to `end`, K or 0 # [BLOCK_N,
    BLOCK_M] if SWAP, else turned, fp32. Scales of blocks multiply the sums of each, while the matrix units work on the
    next; they are the caller's to apply if there are none (SCALE_ROWS 0)."""
    WIDTH: tl.constexpr = BLOCK_K if SCALE_ROWS == 0 else min(BLOCK_K, GROUP)
    k = tl.arange(0, WIDTH)
    weight_ptrs = rows_ptrs[:, None] + k[None, :]
    x_ptrs = x_ptr + row[:, None] * x_stride + k[None, :]
    dtype: tl.constexpr = tl.int32 if rows_ptrs.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], dtype)
    part, scale, x_scale = tl.zeros_like(acc), tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if OVERLAP:  # only the loop's first weights are loaded before its first wait: bring the next ones close
        for ahead in tl.static_range(0, AHEAD, 1024 // rows_ptrs.dtype.element_ty.primitive_bitwidth):
            into_l2(rows_ptrs + BLOCK_K + ahead)
    for block in range(0, end, BLOCK_K):
        for ahead in tl.static_range(0, BLOCK_K, WIDTH):
            if EVEN_K:
                weight = tl.load(weight_ptrs + block + ahead)
                waited = after_inputs(block, BLOCK_K, OVERLAP)
                x = tl.load(x_ptrs + waited + ahead, mask=row_in[:, None], other=0.0)
            else:
                inside = (block + ahead + k < K)[None, :]
                weight = tl.load(weight_ptrs + block + ahead, mask=inside, other=0.0)
                waited = after_inputs(block, BLOCK_K, OVERLAP)
                x = tl.load(x_ptrs + waited + ahead, mask=row_in[:, None] & inside, other=0.0)
            if SCALE_ROWS == 0:
                acc = add_product(weight.to(x.dtype), x, acc, SWAP)
            else:
                acc += part * _outer(scale, x_scale, SWAP)
                part = add_product(weight, x, tl.zeros_like(acc), SWAP)
                group = tl.minimum((block + ahead) // GROUP, groups - 1)
                scale = tl.load(scale_ptr + weight_row // SCALE_ROWS * groups + group)
                group = tl.minimum((waited + ahead) // GROUP, groups - 1)
                x_scale = tl.load(x_scale_ptr + row * groups + group, mask=row_in, other=0.0)
    if SCALE_ROWS > 0:
        acc += part * _outer(scale, x_scale, SWAP)
    return acc.to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens", "shrinkers"])
def _skinny_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    weight_scale_ptr,
    group_scale_ptr,
    residual_ptr,
    squares_ptr,
    next_scaled_ptr,
    next_squares_ptr,
    next_weight_ptr,
    N,
    K,
    groups,
    parts,
    eps,
    x_scale_ptr,
    x_group_scale_ptr,
    x_zero_ptr,
    weight_sums_ptr,
    a_ptr,
    ranks_ptr,
    arrived_ptr,
    s_ptr,
    slots_ptr,
    used_ptr,
    b_ptr,
    starts_ptr,
    slot_step,
    shrinkers,
    num_tokens,
    x_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    BAND: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    SEATS: tl.constexpr,
    RANK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply by the matrix units; one program: BLOCK_N rows of the weight and up to BLOCK_M tokens. SWAP makes the
    weight the left operand, whose side of the matrix units is the wide one. With adapters the first `shrinkers` of each
    block of tokens, which are on the chip before the others, have rows of first matrices in place of the weight's."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    across, down = _place(num_tokens, N, BLOCK_M, BLOCK_N, BAND)
    row = down * BLOCK_M + tl.arange(0, BLOCK_M)
    row_in = row < num_tokens
    end, count = K, 0
    if a_ptr is not None:
        count = tl.load(used_ptr, cache_modifier=".cg")
        shrinks, idle = across < shrinkers, across * BLOCK_N >= count * (SEATS * RANK)
        slot_of_row, column, first_ptrs = rows_in_use(
            across, a_ptr, used_ptr, ranks_ptr, slot_step, K, SEATS, RANK, SLOTS, BLOCK_N
        )
        end, across = tl.where(shrinks & idle, 0, K), tl.maximum(across - shrinkers, 0)
    weight_row = gated_row(across * BLOCK_N + tl.arange(0, BLOCK_N), N // 2, GATED, BLOCK_N)
    held_row = tl.minimum(weight_row, N - 1)
    rows_ptrs = weight_ptr + held_row.to(tl.int64) * K
    if a_ptr is not None:
        rows_ptrs = tl.where(shrinks, first_ptrs, rows_ptrs)
        if EVEN_K:  # which the compiler does not see behind a choice
            rows_ptrs = tl.multiple_of(rows_ptrs, 16)
        if OVERLAP:
            for place in range(1, tl.where(shrinks, 0, count) + 1):
                held = tl.load(used_ptr + place, cache_modifier=".cg").to(tl.int64)
                into_l2(b_ptr + held * slot_step + held_row * RANK)
    acc = _dots(
        rows_ptrs, x_ptr, group_scale_ptr, x_group_scale_ptr, held_row, row, row_in, K, end, groups, x_stride, BLOCK_M,
        BLOCK_N, BLOCK_K, SWAP, EVEN_K, SCALE_ROWS, GROUP, AHEAD, OVERLAP,
    )  # fmt: skip
    wait_for_inputs(OVERLAP)
    if a_ptr is not None:
        slot = tl.load(slots_ptr + row, mask=row_in, other=-1)
        share_shrunk(
            acc, s_ptr, arrived_ptr + 2 * down, row, row_in, slot, slot_of_row, column, shrinks, shrinkers,
            tl.num_programs(0) - shrinkers, SEATS * SLOTS * RANK, SWAP,
        )  # fmt: skip
        row_in = row_in & (tl.program_id(0) >= shrinkers)
        acc = add_adapters(
            acc, s_ptr, used_ptr, b_ptr, starts_ptr, slot_step, row, row_in, weight_row, 0,
            tl.where(shrinks, 0, count),
            SWAP, SEATS, RANK, SLOTS, COLUMNS,
        )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    finish(
        acc, None, across, row, row_in, weight_row, out_ptr, bias_ptr, x_scale_ptr, x_zero_ptr, weight_sums_ptr,
        weight_scale_ptr, residual_ptr, squares_ptr, next_scaled_ptr, next_squares_ptr, next_weight_ptr, N, K, parts,
        eps, GATED, BLOCK_N, PARTS, shrinkers,
    )  # fmt: skip


@triton.jit
def sums_of_vectors(weight, x, VECTOR: tl.constexpr):
    """Return weight [rows, inputs] * x [rows or 1, inputs], added up by VECTOR # [rows, inputs / VECTOR] fp32.

    If VECTOR is what a thread loads at once, a sum is within the thread and takes one register instead of VECTOR: twice
    as many programs fit a multiprocessor, each with loads in flight.
    """
    products = weight.to(tl.float32) * x.to(tl.float32)
    rows: tl.constexpr = products.shape[0]
    return tl.sum(tl.reshape(products, [rows, products.shape[1] // VECTOR, VECTOR]), axis=2)


# Four signed bytes ($4), plus 128 each, as the last bits of 2 ** 23; what is too much is taken away.
_BYTES_TO_FLOATS = tl.constexpr("""{
.reg .b32 bytes;
xor.b32 bytes, $4, 0x80808080;
prmt.b32 $0, bytes, 0x4b000000, 0x7650;
prmt.b32 $1, bytes, 0x4b000000, 0x7651;
prmt.b32 $2, bytes, 0x4b000000, 0x7652;
prmt.b32 $3, bytes, 0x4b000000, 0x7653;
add.rn.f32 $0, $0, 0fcb000080;
add.rn.f32 $1, $1, 0fcb000080;
add.rn.f32 $2, $2, 0fcb000080;
add.rn.f32 $3, $3, 0fcb000080;
}""")


@triton.jit
def _scaled_sums(
    weight, x, scale_ptr, row, start, groups,
    VECTOR: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return what `sums_of_vectors` does for inputs from `start` on, times the scales of blocks if there are any."""
    if ASM and weight.dtype == tl.int8:  # its conversions are four times as slow as loading the bytes
        weight = tl.inline_asm_elementwise(
            _BYTES_TO_FLOATS, "=&f,=&f,=&f,=&f,r", [weight], dtype=tl.float32, is_pure=True, pack=4
        )
    sums = sums_of_vectors(weight, x, VECTOR)
    if SCALE_ROWS > 0:
        group = tl.minimum((start + tl.arange(0, sums.shape[1]) * VECTOR) // GROUP, groups - 1)
        sums *= tl.load(scale_ptr + (row // SCALE_ROWS * groups)[:, None] + group[None, :])
    return sums


def vector_of(weight: Tensor) -> int:
    """Return the number of elements that a thread loads at once."""
    return 16 // weight.element_size()


@triton.jit
def _gemv_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    weight_scale_ptr,
    group_scale_ptr,
    residual_ptr,
    squares_ptr,
    next_scaled_ptr,
    next_squares_ptr,
    next_weight_ptr,
    N,
    K,
    groups,
    parts,
    eps,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply by ordinary arithmetic; one program: BLOCK_N rows of the weight and one token. Weights are read once,
    and so are the first to be evicted from the L2 cache."""
    weight_row = gated_row(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), N // 2, GATED, BLOCK_N)
    held_row = tl.minimum(weight_row, N - 1)
    k = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + held_row.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN_K:
        weight = tl.load(weight_ptrs, eviction_policy="evict_first")
    else:
        weight = tl.load(weight_ptrs, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    if GATED:
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        column_in = column < N // 2
    else:
        column = weight_row
        column_in = weight_row < N
    wait_for_inputs(OVERLAP)
    if residual_ptr is not None:  # loaded before the sums, not after
        residual = tl.load(residual_ptr + column, mask=column_in, other=0.0).to(tl.float32)
    if squares_ptr is not None:
        part = tl.arange(0, PARTS)
        squares = tl.load(squares_ptr + part, mask=part < parts, other=0.0)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    acc = _scaled_sums(weight, x[None, :], group_scale_ptr, held_row, 0, groups, VECTOR, SCALE_ROWS, GROUP, ASM)
    for start in range(BLOCK_K, K, BLOCK_K):
        if EVEN_K:
            weight = tl.load(weight_ptrs + start, eviction_policy="evict_first")
        else:
            inside = (start + k < K)[None, :]
            weight = tl.load(weight_ptrs + start, mask=inside, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start + k, mask=None if EVEN_K else start + k < K)
        acc += _scaled_sums(
            weight, x[None, :], group_scale_ptr, held_row, start, groups, VECTOR, SCALE_ROWS, GROUP, ASM
        )
    total = tl.sum(acc, axis=1)
    weight_row_in = weight_row < N
    if weight_scale_ptr is not None:
        total *= tl.load(weight_scale_ptr + weight_row, mask=weight_row_in, other=0.0)
    if squares_ptr is not None:
        total *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + weight_row, mask=weight_row_in, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, BLOCK_N // 2]), [1, 0]))
        total = activated(gate, GATED) * up
    if residual_ptr is not None:
        total += residual
    rounded = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, rounded, mask=column_in)
    if next_scaled_ptr is not None:
        out, square_ptr = rounded.to(tl.float32), next_squares_ptr + tl.program_id(0)
        half_norm_row(out, column, column_in, next_scaled_ptr, square_ptr, next_weight_ptr)


def skinny_linear(
    x: Tensor | HalfNormed | Quantized,
    weight: Tensor | TiledWeight | NarrowWeight,
    bias: Tensor | None,
    config: GemmConfig,
    dtype: torch.dtype | None = None,
    *,
    gated: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    eps: float = 0.0,
    next_norm: Tensor | None = None,
    adapters: Adapted | None = None,
) -> Any:
    """Return x [T, K] @ weight [N, K].T + bias [N]: [T, N] in `dtype` (default: x's), with sums in fp32 or int32.

    The weight is contiguous, and so are x's rows. If the weight is a NarrowWeight, x is Quantized to the same type,
    and to groups if the weight has them, but for one token by ordinary arithmetic (config.block_m 1), which is not
    quantized. `gated`: the result is activation(first half) * second half [T, N / 2]. `residual` [T, N], contiguous:
    the result is added to it, in place. x may be HalfNormed, by a norm with `eps`; the result is HalfNormed if there
    are a residual and `next_norm` [N], the weight of the norm of the sum. To a TiledWeight x is of 16 bits. Many
    tokens are computed in bands, without a half norm. `adapters`: what they make of x (of its `scaled`, if it is
    HalfNormed) is added; x is then not Quantized, and one token is computed by the matrix units.
    """
    num_tokens, k = x.shape
    n = weight.out_features if isinstance(weight, TiledWeight) else weight.shape[0]
    squares: Tensor | None = None
    of_tokens: tuple[Tensor | None, ...] = (None, None, None, None)  # scales; of groups; zeros, what they multiply
    if isinstance(x, HalfNormed):
        squares, x = x.squares, x.scaled
    elif isinstance(x, Quantized):
        sums = weight.sums if isinstance(weight, NarrowWeight) else None
        of_tokens = (*((None, x.scales) if x.group else (x.scales, None)), x.zeros, sums)
        x = x.values
    parts = 1 if squares is None else squares.shape[1]
    if residual is None:
        width = n // 2 if gated else n
        out = torch.empty((num_tokens, width), dtype=dtype or x.dtype, device=x.device)
    else:
        out = residual
    least = 1
    if gated and config.block_m == 1:
        least = 2 * VECTOR_ROWS if isinstance(weight, TiledWeight) else 2
    rows = max(least, config.block_n)
    programs = -(-(len(weight.codes) * ROWS if isinstance(weight, TiledWeight) else n) // rows)
    result, following = half_normed_over(out, None if residual is None else next_norm, programs)
    if not num_tokens:
        return result
    kind = ACTIVATIONS[activation] if gated else 0
    options: dict[str, Any] = {"GATED": kind, "PARTS": next_power_of_2(parts), **overlap()}
    if isinstance(weight, TiledWeight):
        tensors = (out, x, weight.codes, weight.words, bias, weight.factors, residual, squares, *following)
        if config.block_m == 1:
            launch_tiled_vector(programs, x, weight, tensors, parts, eps, config, options)
        else:
            launch_tiled(programs, x, weight, tensors, parts, eps, config, options, adapters)
        return result
    values, scales, group_scales, groups = weight, None, None, 1
    options |= {"EVEN_K": k % config.block_k == 0, "GROUP": 0, "SCALE_ROWS": 0}
    if isinstance(weight, NarrowWeight):
        values, scales = weight.values, weight.scales
        if weight.rows:
            scales, group_scales, groups = None, weight.scales, weight.scales.shape[1]
            options |= {"SCALE_ROWS": weight.rows, "GROUP": weight.group}
    assert isinstance(values, Tensor)
    arguments = (
        out, x, values, bias, scales, group_scales, residual, squares, *following, n, k, groups, parts, eps
    )  # fmt: skip
    if config.block_m == 1:
        _gemv_kernel[(programs,)](
            *arguments, BLOCK_N=rows, BLOCK_K=config.block_k, VECTOR=vector_of(values),
            ASM=values.dtype == torch.int8 and pairs_in_registers(), num_warps=config.num_warps, **options,
        )  # fmt: skip
        return result
    down = -(-num_tokens // config.block_m)
    ahead = 0 if gated else max(0, min((config.num_stages - 1) // 2, k // config.block_k - 1)) * config.block_k
    of_adapters: tuple[Any, ...] = (None,) * 9
    shrinkers, kinds = 0, NO_ADAPTERS
    if adapters is not None:
        a, held = adapters.weights.a, adapters.weights
        shrinkers = -(-a.shape[0] * a.shape[1] // config.block_n)
        adapters = adapters._replace(s=a.new_empty(num_tokens, a.shape[0] * a.shape[1]))
        of_adapters, kinds = (a, held.ranks, held.arrived, *adapters.arguments), adapters.options
    grid = (shrinkers + programs, down) if num_tokens <= BUCKETS[-1] else (programs * down,)
    _skinny_kernel[grid](
        *arguments, *of_tokens, *of_adapters, shrinkers, num_tokens, x.stride(0),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWAP=config.swap,
        BAND=0 if len(grid) == 2 else BAND, AHEAD=ahead, num_warps=config.num_warps,
        num_stages=config.num_stages, **kinds, **options,
    )  # fmt: skip
    return result


def skinny_linear_reference(
    x: Tensor | HalfNormed | Quantized,
    weight: Tensor | TiledWeight | NarrowWeight,
    bias: Tensor | None,
    config: GemmConfig | None = None,
    dtype: torch.dtype | None = None,
    *,
    gated: bool = False,
    activation: str = "silu",
    residual: Tensor | None = None,
    eps: float = 0.0,
    next_norm: Tensor | None = None,
    adapters: Adapted | None = None,
) -> Any:
    factor: Tensor | float = 1.0
    scaled = x.scaled if isinstance(x, HalfNormed) else x
    if isinstance(x, HalfNormed):
        dtype, factor = dtype or x.x.dtype, x.factor(eps)
        x = x.normed(eps)
    elif isinstance(x, Quantized):
        x = x.dequantize(torch.float32)
    if isinstance(weight, Tensor):
        wide = weight.float()
    else:
        wide = weight.dequantize() if isinstance(weight, NarrowWeight) else weight.dequantize(torch.float32)
    out = F.linear(x.float(), wide)
    if adapters is not None:
        delta = torch.zeros_like(out)
        s = adapters.s
        if s is None:
            assert isinstance(scaled, Tensor)
            s = shrink_adapters_reference(scaled, adapters.slots, adapters.weights)
        expand_adapters_reference(delta, s, adapters.slots, adapters.weights)
        out += delta * factor
    out = out if bias is None else out + bias.float()
    if gated:
        gate, up = out.chunk(2, dim=-1)
        out = GATES[activation](gate) * up
    out = out.to(dtype or x.dtype) if residual is None else residual.copy_(residual.float() + out)
    return out if next_norm is None or residual is None else half_norm_reference(out, next_norm)
