"""Widens a TiledWeight, for products over so many tokens that the vendor's library is worth it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headrace.kernels._triton import overlap, tl, triton, wait_for_inputs
from headrace.kernels.tiled import BLOCK, LANES, ROWS, TiledWeight
from headrace.kernels.tiled_codes import placed
from headrace.kernels.tiled_gemm import describe, row_of, run_of, scale_of, zero_of

_ROWS, _BLOCK, _LANES = tl.constexpr(ROWS), tl.constexpr(BLOCK), tl.constexpr(LANES)


@triton.jit
def _wide(
    words, words_ptr, at, RUN: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, VALUES: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr,
):  # fmt: skip
    """Return the block's run RUN of 16 inputs # [ROWS, 16] fp32, the codes at SHIFT of words."""
    OF_GROUP: tl.constexpr = RUN * 16 // GROUP if GROUP < _BLOCK else 0
    values = run_of(placed(words, SHIFT, BITS, VALUES, tl.bfloat16))
    if VALUES == "e2m1":  # exact in bfloat16
        wide = (values * scale_of(words_ptr, at, OF_GROUP, SCALES, 126, tl.bfloat16)[:, None]).to(tl.float32)
    else:
        wide = values.to(tl.float32)
        if VALUES == "e4m3":
            wide *= 2.0**120
        else:
            wide -= zero_of(words_ptr, at, ZEROS_AT + OF_GROUP, BITS, ZEROS, tl.bfloat16).to(tl.float32)[:, None]
        if SCALES != "none":
            wide *= scale_of(words_ptr, at, OF_GROUP, SCALES, 0, tl.float32)[:, None]
    return wide


@triton.jit
def _widen_kernel(
    out_ptr, codes_ptr, words_ptr, factor_ptr, N, K, words_step, GATED: tl.constexpr, BITS: tl.constexpr,
    VALUES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, ZEROS_AT: tl.constexpr,
    WORDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a tile's block; grid (blocks, tiles)."""
    wait_for_inputs(OVERLAP)
    CHUNKS: tl.constexpr = BITS // 2
    PER_WORD: tl.constexpr = 16 // BITS
    blocks = tl.num_programs(0)
    block, tile = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, _ROWS)
    row = row_of(tile * _ROWS + place, N, GATED)
    held = (tile.to(tl.int64) * blocks + block) * (CHUNKS * _LANES)
    at = (tile * (words_step * blocks + 1 - words_step) + block * words_step) * (WORDS * _ROWS) + place
    factor = tl.full([_ROWS], 1.0, tl.float32)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row, mask=row < N, other=0.0)
    if SCALES == "e5m3":
        factor *= 512.0  # what is left out of scales in bfloat16
    for chunk in tl.static_range(CHUNKS):
        words = tl.load(codes_ptr + held + chunk * _LANES + tl.arange(0, _LANES))[None, :]
        for code in tl.static_range(PER_WORD):
            wide = _wide(
                words, words_ptr, at, chunk * PER_WORD + code, code * BITS, BITS, VALUES, GROUP, SCALES, ZEROS, ZEROS_AT
            )
            column = block * _BLOCK + (chunk * PER_WORD + code) * 16 + tl.arange(0, 16)
            inside = (row < N)[:, None] & (column < K)[None, :]
            out_ptrs = out_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
            tl.store(out_ptrs, (wide * factor[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def widen_tiled(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`, its columns in its own order, not the checkpoint's."""
    n, k = weight.out_features, weight.in_features
    out = torch.empty((n, k), dtype=dtype, device=weight.codes.device)
    tiles, blocks = weight.codes.shape[:2]
    _widen_kernel[(blocks, tiles)](
        out, weight.codes, weight.words, weight.factors, n, k, weight.words_step, GATED=weight.gated,
        num_warps=4, **describe(weight), **overlap(),
    )  # fmt: skip
    return out


def widen_tiled_reference(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    return replace(weight, order=None).dequantize(dtype)
