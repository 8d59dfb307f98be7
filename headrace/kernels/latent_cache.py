"""Rotates queries of latent attention in place, and writes keys to the cache: their rotated part and the normed latent,
in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.launch import launch
from headrace.kernels.norm import rms_norm_reference
from headrace.kernels.paged import rows_between
from headrace.kernels.rotary import (
    _to_fp8,
    head_norm,
    largest_fp8,
    rotary_and_cache_reference,
    step_angles_reference,
)

HEADS_AT_ONCE = 32


@triton.jit(do_not_specialize=["block_rows"])
def _latent_cache_kernel(
    q_ptr, kv_ptr, weight_ptr, cos_sin_ptr, positions_ptr, cache_ptr, slot_mapping_ptr, kv_scale_ptr, temperature_ptr,
    eps, q_stride, kv_stride, block_rows, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, NOPE: tl.constexpr,
    BLOCK_K: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotate and write; grid (num_tokens, groups of BLOCK_H heads). The first group's program writes the key too."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_HALF)
    half_in = half < HALF
    front = half * 2 if INTERLEAVED else half
    STEP: tl.constexpr = 1 if INTERLEAVED else HALF
    position = tl.maximum(tl.load(positions_ptr + token), 0)  # padding
    angles = cos_sin_ptr + position * (2 * HALF) + half
    cos = tl.load(angles, mask=half_in, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=half_in, other=0.0)[None, :]
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    head_ptrs = q_ptr + token * q_stride + head[:, None] * (NOPE + 2 * HALF)
    ptrs = head_ptrs + NOPE + front[None, :]
    mask = (head < HEADS)[:, None] & half_in[None, :]
    first = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(ptrs + STEP, mask=mask, other=0.0).to(tl.float32)
    turned, other = first * cos - second * sin, second * cos + first * sin
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
        turned, other = turned * temperature, other * temperature
        column = tl.arange(0, BLOCK_K)
        plain_in = (head < HEADS)[:, None] & (column < NOPE)[None, :]
        plain = tl.load(head_ptrs + column[None, :], mask=plain_in, other=0.0).to(tl.float32)
        tl.store(head_ptrs + column[None, :], (plain * temperature).to(dtype), mask=plain_in)
    tl.store(ptrs, turned.to(dtype), mask=mask)
    tl.store(ptrs + STEP, other.to(dtype), mask=mask)

    slot = tl.load(slot_mapping_ptr + token)
    if (tl.program_id(1) == 0) & (slot >= 0):
        place = tl.arange(0, BLOCK_L)[None, :]
        inside = place < LATENT
        key_ptr = kv_ptr + token * kv_stride
        latent = tl.load(key_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, axis=1) / LATENT + eps)[:, None]
        weight = tl.load(weight_ptr + place, mask=inside, other=0.0).to(tl.float32)
        key = head_norm(latent, scale, weight, dtype, weight_ptr.dtype.element_ty != dtype).to(dtype)
        key_mask = half_in[None, :]
        key_ptrs = key_ptr + LATENT + front[None, :]
        one = tl.load(key_ptrs, mask=key_mask, other=0.0).to(tl.float32)
        two = tl.load(key_ptrs + STEP, mask=key_mask, other=0.0).to(tl.float32)
        key_turned, key_other = (one * cos - two * sin).to(dtype), (two * cos + one * sin).to(dtype)
        if LARGEST is not None:
            FP8: tl.constexpr = cache_ptr.dtype.element_ty
            factor = 1.0 / tl.load(kv_scale_ptr)
            key = _to_fp8(key, factor, LARGEST, FP8)
            key_turned, key_other = _to_fp8(key_turned, factor, LARGEST, FP8), _to_fp8(key_other, factor, LARGEST, FP8)
        row = cache_ptr + (slot + slot // BLOCK_SIZE * (block_rows - BLOCK_SIZE)) * WIDTH
        tl.store(row + front[None, :], key_turned, mask=key_mask)
        tl.store(row + STEP + front[None, :], key_other, mask=key_mask)
        tl.store(row + 2 * HALF + place, key, mask=inside)


def latent_rotary_and_cache(
    q: Tensor, kv: Tensor, weight: Tensor, eps: float, cos_sin: Tensor, positions: Tensor, kv_cache: Tensor,
    slot_mapping: Tensor, kv_scale: Tensor | None = None, interleaved: bool = False, temperature: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the last rope_dim numbers of each head of q [T, H, nope_dim + rope_dim] in place and return q; write keys
    to the cache [1, num_blocks, block_size, 1, rope_dim + latent_dim or more].

    kv [T, latent_dim + rope_dim] is as projected: the latent is RMS-normed by `weight` [latent_dim], the rest rotated.
    In a row of the cache the rotated part comes first. The rows of q and kv may lie apart. cos_sin [max_pos, rope_dim]
    fp32, positions [T] int64, slot_mapping [T] int64, `interleaved` and `temperature` [T], by which all of q is
    multiplied, are as in rotary_and_cache. An fp8 cache gets numbers / kv_scale[0].
    """
    num_tokens, heads, head_dim = q.shape
    latent, rope = weight.shape[0], cos_sin.shape[1]
    if not num_tokens:
        return q
    block_h = min(HEADS_AT_ONCE, next_power_of_2(heads))
    nope = head_dim - rope
    arguments = (
        q, kv, weight, cos_sin, positions, kv_cache, slot_mapping, kv_scale, temperature, eps, q.stride(0),
        kv.stride(0), rows_between(kv_cache)[1],
    )  # fmt: skip
    constants = dict(
        HEADS=heads, BLOCK_H=block_h, NOPE=nope, BLOCK_K=next_power_of_2(nope), HALF=rope // 2,
        BLOCK_HALF=next_power_of_2(rope // 2), LATENT=latent, BLOCK_L=next_power_of_2(latent), WIDTH=kv_cache.shape[4],
        BLOCK_SIZE=kv_cache.shape[2], INTERLEAVED=interleaved, LARGEST=largest_fp8(kv_cache.dtype),
        num_warps=4, **overlap(),
    )  # fmt: skip
    launch(_latent_cache_kernel, (num_tokens, -(-heads // block_h), 1), arguments, constants)
    return q


def latent_rotary_and_cache_reference(
    q: Tensor, kv: Tensor, weight: Tensor, eps: float, cos_sin: Tensor, positions: Tensor | None, kv_cache: Tensor,
    slot_mapping: Tensor, kv_scale: Tensor | None = None, interleaved: bool = False, temperature: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Do what `latent_rotary_and_cache` does; `positions` None: `cos_sin` is what `step_angles_reference` returned."""
    latent = weight.shape[0]
    rope = kv.shape[1] - latent
    angles = cos_sin if positions is None else step_angles_reference(cos_sin, positions)[0]
    key = torch.cat((kv[:, latent:], rms_norm_reference(kv[:, :latent], weight, eps)), dim=1)
    turned = q[..., -rope:]
    both = rotary_and_cache_reference(
        turned, key[:, None], None, angles, None, kv_cache[..., : rope + latent], slot_mapping, None, None, eps,
        kv_scale, interleaved,
    )  # fmt: skip
    turned.copy_(both)
    return q if temperature is None else q.copy_(q * temperature[:, None, None])
