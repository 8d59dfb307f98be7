"""Norms q and k (optional), rotates them by their positions, and writes k and v into the paged cache, in one pass."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, overlap, tl, triton, wait_for_inputs
from headrace.kernels.launch import launch
from headrace.kernels.norm import of_type, rms_norm_reference
from headrace.kernels.paged import by_row, rows_between, rows_of


@triton.jit
def head_norm(x, scale, weight, dtype: tl.constexpr, WIDE: tl.constexpr):
    """Return fp32 x * scale * weight as a norm kernel of its own leaves it, rounded to `dtype`; WIDE: the weight is of
    another type, and only the product is rounded."""
    x = x * scale
    if not WIDE:
        x = x.to(dtype).to(tl.float32)
    return (x * weight).to(dtype).to(tl.float32)


@triton.jit
def _norm_and_rotate(
    x_ptr,
    weight_ptr,
    heads,
    head_in,
    head_stride,
    front,
    half_in,
    rest,
    cos,
    sin,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    STEP: tl.constexpr,
    NORM: tl.constexpr,
):
    """Return the numbers that are turned together, as two tensors, and the rest beyond the rotary part, normed and
    rotated, in fp32. `front`: which numbers of a head are the first tensor; those of the second are STEP behind."""
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    rest_in = rest < HEAD_DIM
    base = x_ptr + heads[:, None] * head_stride
    mask = head_in[:, None] & half_in[None, :]
    rest_mask = head_in[:, None] & rest_in[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.load(base + front[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(base + STEP + front[None, :], mask=mask, other=0.0).to(tl.float32)
    tail = first
    if HAS_REST:
        tail = tl.load(base + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        WIDE: tl.constexpr = weight_ptr.dtype.element_ty != dtype
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        if HAS_REST:
            squares += tl.sum(tail * tail, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + front, mask=half_in, other=0.0).to(tl.float32)[None, :]
        first = head_norm(first, scale, weight, dtype, WIDE)
        weight = tl.load(weight_ptr + STEP + front, mask=half_in, other=0.0).to(tl.float32)[None, :]
        second = head_norm(second, scale, weight, dtype, WIDE)
        if HAS_REST:
            weight = tl.load(weight_ptr + rest, mask=rest_in, other=0.0).to(tl.float32)[None, :]
            tail = head_norm(tail, scale, weight, dtype, WIDE)
    return first * cos - second * sin, second * cos + first * sin, tail


@triton.jit
def _to_fp8(x, factor, LARGEST: tl.constexpr, FP8: tl.constexpr):
    """Return x * factor in fp8: what is too large becomes the largest number, NaN stays."""
    scaled = x.to(tl.float32) * factor
    return tl.clamp(scaled, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(FP8)


@triton.jit(do_not_specialize=["value_rows", "block_rows"])
def _rotary_and_cache_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    kv_scale_ptr,
    temperature_ptr,
    q_weight_ptr,
    eps,
    q_stride,
    k_stride,
    v_stride,
    q_head_stride,
    k_head_stride,
    v_head_stride,
    value_rows,
    block_rows,
    num_heads,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rotate and write; one program: one token, one KV head and the query heads that read it."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half = tl.arange(0, BLOCK_HALF)
    half_in = half < HALF
    front = half * 2 if INTERLEAVED else half
    STEP: tl.constexpr = 1 if INTERLEAVED else HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    rest_in = rest < HEAD_DIM
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    position = 0
    if positions_ptr is not None:
        position = tl.maximum(tl.load(positions_ptr + token), 0)  # padding
    angles = cos_sin_ptr + position * (2 * HALF) + half
    cos = tl.load(angles, mask=half_in, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=half_in, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty

    member = tl.arange(0, BLOCK_G)
    member_in = member < GROUP
    heads = kv_head * GROUP + member
    first, second, tail = _norm_and_rotate(
        q_ptr + token * q_stride, q_norm_ptr, heads, member_in, q_head_stride, front, half_in, rest, cos, sin, eps,
        HEAD_DIM, HALF, STEP, NORM,
    )  # fmt: skip
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + token)
        first, second, tail = first * temperature, second * temperature, tail * temperature
    if q_weight_ptr is not None:
        first *= tl.load(q_weight_ptr + front, mask=half_in, other=0.0)[None, :]
        second *= tl.load(q_weight_ptr + STEP + front, mask=half_in, other=0.0)[None, :]
        if HAS_REST:
            tail *= tl.load(q_weight_ptr + rest, mask=rest_in, other=0.0)[None, :]
    target = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM
    mask = member_in[:, None] & half_in[None, :]
    tl.store(target + front[None, :], first.to(dtype), mask=mask)
    tl.store(target + STEP + front[None, :], second.to(dtype), mask=mask)
    if HAS_REST:
        tl.store(target + rest[None, :], tail.to(dtype), mask=member_in[:, None] & rest_in[None, :])

    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        one = tl.arange(0, 1)
        one_in = one < 1
        k_first, k_second, k_tail = _norm_and_rotate(
            k_ptr + token * k_stride, k_norm_ptr, one + kv_head, one_in, k_head_stride, front, half_in, rest, cos, sin,
            eps, HEAD_DIM, HALF, STEP, NORM,
        )  # fmt: skip
        row = slot + slot // BLOCK_SIZE * (block_rows - BLOCK_SIZE)
        cached = cache_ptr + (row * num_kv_heads + kv_head) * HEAD_DIM
        value_offset = value_rows.to(tl.int64) * (num_kv_heads * HEAD_DIM)
        k_mask = one_in[:, None] & half_in[None, :]
        k_first, k_second, k_tail = k_first.to(dtype), k_second.to(dtype), k_tail.to(dtype)
        column = tl.arange(0, BLOCK_D)
        if v_ptr is not None:
            value = tl.load(v_ptr + token * v_stride + kv_head * v_head_stride + column, mask=column < HEAD_DIM)
        if LARGEST is not None:
            FP8: tl.constexpr = cache_ptr.dtype.element_ty
            k_factor = 1.0 / tl.load(kv_scale_ptr)
            k_first = _to_fp8(k_first, k_factor, LARGEST, FP8)
            k_second = _to_fp8(k_second, k_factor, LARGEST, FP8)
            k_tail = _to_fp8(k_tail, k_factor, LARGEST, FP8)
            if v_ptr is not None:
                value = _to_fp8(value, 1.0 / tl.load(kv_scale_ptr + 1), LARGEST, FP8)
        tl.store(cached + front[None, :], k_first, mask=k_mask)
        tl.store(cached + STEP + front[None, :], k_second, mask=k_mask)
        if HAS_REST:
            tl.store(cached + rest[None, :], k_tail, mask=one_in[:, None] & rest_in[None, :])
        if v_ptr is not None:
            tl.store(cached + value_offset + column, value, mask=column < HEAD_DIM)


def rotary_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    interleaved: bool = False,
    temperature: Tensor | None = None,
    q_weight: Tensor | None = None,
) -> Tensor:
    """Rotate q [T, Hq, D] and k [T, Hkv, D], write k and v into the cache, return the rotated q.

    q, k, v may be views of one tensor (last dim contiguous). With `q_norm` and `k_norm` [D], heads are RMS-normed
    first. cos_sin [max_pos, rotary_dim] fp32 is cos | sin, each rotary_dim // 2 wide; dimension i is rotated with
    i + rotary_dim // 2, or 2 i with 2 i + 1 if `interleaved`, and what lies beyond rotary_dim is not. `cos_sin` None:
    nothing is rotated. Rotated q is multiplied by `temperature` [T] fp32 and by `q_weight` [D] fp32.
    positions [T] int64. The cache [2, num_blocks, block_size, Hkv, D] is contiguous within a block; tokens whose
    slot_mapping [T] int64 is negative are not written. An fp8 cache gets K / kv_scale[0] and V / kv_scale[1], fp32 [2]
    on the device, clamped to its type's range. `v` None: the cache [1, ...] holds keys alone.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    if cos_sin is None:
        cos_sin, positions = _no_turn(q.device), None
    half = cos_sin.shape[1] // 2
    v_strides = (0, 0) if v is None else v.stride()[:2]
    group = num_heads // num_kv_heads
    arguments = (
        out, q, k, v, cos_sin, positions, kv_cache, slot_mapping, q_norm, k_norm, kv_scale,
        temperature, q_weight, eps, q.stride(0), k.stride(0), v_strides[0], q.stride(1), k.stride(1), v_strides[1],
        *rows_between(kv_cache), num_heads, num_kv_heads,
    )  # fmt: skip
    constants = dict(
        BLOCK_SIZE=kv_cache.shape[2], GROUP=group, BLOCK_G=next_power_of_2(group), HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim), HALF=half,
        BLOCK_HALF=next_power_of_2(half), BLOCK_REST=next_power_of_2(max(1, head_dim - 2 * half)),
        INTERLEAVED=interleaved, NORM=q_norm is not None, LARGEST=largest_fp8(kv_cache.dtype),
        num_warps=2 if group * head_dim >= 512 else 1, **overlap(),
    )  # fmt: skip
    launch(_rotary_and_cache_kernel, (num_tokens, num_kv_heads, 1), arguments, constants)
    return out


@lru_cache(maxsize=16)
def _no_turn(device: torch.device) -> Tensor:
    """Return a table of one row that rotates by nothing."""
    return torch.tensor([[1.0, 0.0]], device=device)


def largest_fp8(dtype: torch.dtype) -> float | None:
    """Return the largest finite number of an fp8 type; None for wider types."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else None


def quantize_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in an fp8 type, clamped to its range; NaN stays."""
    largest = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp_(-largest, largest).to(dtype)


def step_angles(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what all layers of a step hand to rotary_and_cache as `cos_sin` and `positions`: here, the arguments."""
    return cos_sin, positions


def step_angles_reference(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the angles of the step's tokens, gathered once for all layers, and None. They are [2, T, 1, rotary_dim]:
    cos | cos, then -sin | sin."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))), None


def rotary_and_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin: Tensor | None,
    positions: Tensor | None,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    kv_scale: Tensor | None = None,
    interleaved: bool = False,
    temperature: Tensor | None = None,
    q_weight: Tensor | None = None,
) -> Tensor:
    """Do what `rotary_and_cache` does; `positions` None: `cos_sin` is what `step_angles_reference` returned."""
    q, k = rotated(q, k, cos_sin, positions, q_norm, k_norm, eps, interleaved)
    if temperature is not None:
        q = of_type(q * temperature[:, None, None], q.dtype)
    if q_weight is not None:
        q = of_type(q * q_weight, q.dtype)
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        written = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping, k, v = slot_mapping[written], k[written], None if v is None else v[written]
    if kv_scale is not None and kv_cache.dtype.itemsize == 1:  # index_copy_ knows no fp8
        k = quantize_reference(k, kv_scale[0], kv_cache.dtype).view(torch.uint8)
        v = None if v is None else quantize_reference(v, kv_scale[1], kv_cache.dtype).view(torch.uint8)
        kv_cache = kv_cache.view(torch.uint8)
    rows = rows_of(kv_cache, slot_mapping)
    planes = by_row(kv_cache)
    planes[0].index_copy_(0, rows, of_type(k, kv_cache.dtype))
    if v is not None:
        planes[1].index_copy_(0, rows, of_type(v, kv_cache.dtype))
    return q


def rotated(
    q: Tensor, k: Tensor, cos_sin: Tensor | None, positions: Tensor | None, q_norm: Tensor | None,
    k_norm: Tensor | None, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return queries and keys [T, H, D], normed where there are norms, and rotated; nothing is cached. The angles are
    as in `rotary_and_cache_reference`."""
    angles = cos_sin
    if cos_sin is not None and positions is not None:
        angles = step_angles_reference(cos_sin, positions)[0]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    if angles is None:
        return q, k
    both = _joined(q, k)
    if both is None:
        return _rotate(q, angles, interleaved), _rotate(k, angles, interleaved)
    q, k = _rotate(both, angles, interleaved).split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return q, k


def _joined(q: Tensor, k: Tensor) -> Tensor | None:
    """Return q and k as one [T, Hq + Hkv, D] if k's heads follow q's in one piece of memory: half the operations on a
    CPU."""
    num_tokens, num_heads, head_dim = q.shape
    if q.stride() != k.stride() or q.stride(1) != head_dim:
        return None
    if q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():  # of tensors that merely lie side by side
        return None
    if k.data_ptr() - q.data_ptr() != num_heads * head_dim * q.element_size():
        return None
    return q.as_strided((num_tokens, num_heads + k.shape[1], head_dim), q.stride(), q.storage_offset())


def _rotate(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Return x [T, H, D], in its dtype, rotated in fp32 by angles [2, T, 1, rotary_dim] = cos | cos, -sin | sin."""
    cos, sin = angles.unbind()
    rotary_dim = cos.shape[-1]
    turning = x if rotary_dim == x.shape[-1] else x[..., :rotary_dim]
    if interleaved:
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = of_type((turning * cos).addcmul_(turning.roll(rotary_dim // 2, -1), sin), x.dtype)
    if interleaved:
        turned = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), dim=-1)
