"""Converts what attention reads of an fp8 KV cache to 16 bits.

Mostly that happens in registers, to float16, which holds every fp8 number exactly. Decodes load values as pairs in
int16, because the matrix units want them transposed and shared memory transposes 16 bits at a time. For prefill.py,
whose copy engine cannot convert, prompts' keys and values are unpacked first, once for all queries of a step.
kernels/rotary.py writes the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.attention_config import UNPACKED_BLOCK, AttentionPlan
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, rows_between

ELEMENTS = 1 << 14
"""numbers that a program unpacks"""


@triton.jit
def split_pairs(pairs, FP8: tl.constexpr):
    """Split pairs of fp8 in int16; return float16 of the low bytes, and of the high bytes."""
    low = pairs.to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    high = (pairs >> 8).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def as_float16(q):
    """Return q / power in float16, and power # [rows, 1]: the power of two that makes a row's numbers at most 1."""
    wide = q.to(tl.float32)
    power = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30))))[:, None]
    return (wide / power).to(tl.float16), power


@dataclass(frozen=True)
class UnpackedCache:
    """Says where a step's prompts are unpacked to: request i to the blocks in row rows[i] of the block table."""

    cache: Tensor
    """[2, num_blocks, UNPACKED_BLOCK, Hkv, D] in 16 bits"""
    block_table: Tensor
    """[prompts, blocks] int32"""
    rows: Tensor
    """[R] int32; those of decodes are not used"""

    @staticmethod
    def within(cache: Tensor, plan: AttentionPlan, num_reqs: int) -> UnpackedCache:
        """Return the places for a step of `plan` in `cache`, whose contents are overwritten."""
        prompts, blocks = num_reqs - plan.num_decodes, plan.unpacked_blocks
        table = torch.arange(prompts * blocks, dtype=torch.int32, device=cache.device).view(prompts, blocks)
        rows = torch.arange(-plan.num_decodes, prompts, dtype=torch.int32, device=cache.device)
        return UnpackedCache(cache, table, rows)


@triton.jit(do_not_specialize=["value_rows", "block_rows", "num_unpacked", "table_stride", "first_req", "blocks_each"])
def _unpack_kernel(
    out_ptr, cache_ptr, block_table_ptr, rows_ptr, seq_lens_ptr, scale_ptr,
    value_rows, block_rows, num_unpacked, table_stride, first_req, blocks_each,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNPACKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Unpack; grid (tiles of TOKENS positions, prompts, 2: keys and values)."""
    wait_for_inputs(OVERLAP)
    first, prompt, half = tl.program_id(0) * TOKENS, tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + first_req + prompt)
    if first >= seq_len:
        return
    position = first + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK_W)
    mask = (position < seq_len)[:, None] & (column < WIDTH)[None, :]
    blocks_ptr = block_table_ptr + tl.load(rows_ptr + first_req + prompt).to(tl.int64) * table_stride
    block = tl.load(blocks_ptr + position // BLOCK_SIZE, mask=position < seq_len, other=0)
    source = (half * value_rows + block * block_rows + position % BLOCK_SIZE).to(tl.uint32).to(tl.int64)
    target = (half * num_unpacked + prompt * blocks_each).to(tl.int64) * UNPACKED + position
    packed = tl.load(cache_ptr + source[:, None] * WIDTH + column[None, :], mask=mask)
    value = packed.to(tl.float16).to(tl.float32) * tl.load(scale_ptr + half)
    tl.store(out_ptr + target[:, None] * WIDTH + column[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)


def unpack(unpacked: UnpackedCache, kv_cache: Tensor, sequences: Sequences, kv_scale: Tensor, first_req: int) -> None:
    """Unpack the keys and values of the requests from `first_req` on, multiplied by kv_scale # [2]. The fp8 cache is #
    [2, num_blocks, block_size, Hkv, D]. What lies behind a request's last key in its unpacked blocks stays as it
    was."""
    block_size, kv_heads, head_dim = kv_cache.shape[2:]
    width = kv_heads * head_dim
    block_w = next_power_of_2(width)
    tokens = max(1, ELEMENTS // block_w)
    prompts, blocks = unpacked.block_table.shape
    arguments = (
        unpacked.cache, kv_cache, sequences.block_table, sequences.rows, sequences.seq_lens, kv_scale,
        *rows_between(kv_cache), unpacked.cache.shape[1], sequences.block_table.stride(0), first_req, blocks,
    )  # fmt: skip
    constants = {
        "WIDTH": width, "BLOCK_W": block_w, "TOKENS": tokens, "BLOCK_SIZE": block_size, "UNPACKED": UNPACKED_BLOCK,
        "num_warps": 4, **overlap(),
    }  # fmt: skip
    launch(_unpack_kernel, (-(-blocks * UNPACKED_BLOCK // tokens), prompts, 2), arguments, constants)
