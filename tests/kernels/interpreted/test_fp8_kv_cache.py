"""The fp8 KV cache: what rotary_and_cache writes, and attention over it, against their references."""

import random
from dataclasses import replace

import pytest
import torch
from arena import in_arena, neighbours_are_untouched
from test_attention_kernel import BATCHES, SMALL, any_sinks, forget_behind_window, make_inputs, small_plan
from test_decode_kernel import LENGTHS, scattered_cache

from headrace.kernels import attention
from headrace.kernels.attention import paged_attention, paged_attention_reference
from headrace.kernels.attention_config import UNPACKED_BLOCK, AttentionConfig
from headrace.kernels.decode import decode_attention, decode_attention_reference
from headrace.kernels.fp8_cache import UnpackedCache, unpack
from headrace.kernels.paged import Sequences
from headrace.kernels.table import REFERENCE_KERNELS as REFERENCE
from headrace.kernels.table import TRITON_KERNELS as TRITON
from tests.sampled import sampled

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
TOLERANCE = {torch.float32: 6e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
each_fp8 = pytest.mark.parametrize("fp8", FP8, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _fresh_inputs():
    torch.seed()


def fp8_inputs(kind, heads, block_size, dtype, fp8):
    """Like make_inputs, with K and V of other sizes; and the scales."""
    q, cache, sequences = make_inputs(BATCHES[kind], heads, block_size, dtype)
    scale = torch.rand(2) * 0.1 + 0.01
    held = (cache.float() / scale.view(2, 1, 1, 1, 1)).clamp(-200, 200).to(fp8)
    return (q, in_arena(held), sequences), scale


def attend(kind, heads, block_size, dtype, fp8, window=None, splits=1, times=1.0, sinks=False):
    (q, *inputs), scale = fp8_inputs(kind, heads, block_size, dtype, fp8)
    q = (q.float() * times).to(dtype)
    softmax_scale = random.uniform(0.1, 1.0) / times
    decodes = {"decode": len(BATCHES[kind]), "mixed": random.choice((0, 3))}.get(kind, 0)
    plan = small_plan(BATCHES[kind], q, heads, decodes, splits)
    arguments = (q, *inputs, softmax_scale, window, scale)
    sinks = any_sinks(heads[0], dtype) if sinks else None
    expected = paged_attention_reference(*arguments, sinks=sinks)
    forget_behind_window(*inputs, window)
    out = paged_attention(*arguments, torch.full_like(q, float("nan")), sinks, plan=plan)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[dtype]


@sampled(("kind", "dtype", "fp8"), BATCHES, TOLERANCE, FP8)
def test_attention_reads_fp8(kind, dtype, fp8):
    attend(kind, (4, 2, 16), 16, dtype, fp8, splits=random.choice((1, 4)))


@sampled(("heads", "window"), [(3, 1, 24), (2, 2, 10), (5, 1, 40)], [None, 7])
def test_odd_heads_and_windows(heads, window):
    sinks = random.choice((False, True))
    attend(random.choice(list(BATCHES)), heads, random.choice((1, 64)), torch.bfloat16, FP8[0], window, 2, sinks=sinks)


@pytest.mark.parametrize("times", [1e6, 1e-9])
def test_queries_beyond_the_range_of_float16(times):
    attend("mixed", (4, 2, 16), 16, torch.bfloat16, FP8[0], times=times)


def eps(dtype):
    return torch.finfo(dtype).eps


def rotation_error(x, weight, rotary_dim):
    """How far x [T, H, D], normed and rotated, may be from another order of the same sums, before it is rounded.

    Norming rounds twice, and each rounding may be tipped to the next number: an error relative to the two numbers that
    a rotation adds up, which may nearly cancel, and not to their sum. Sums of squares, in fp32, differ by their order.
    """
    size = (x if weight is None else REFERENCE.rms_norm(x, weight, 1e-6)).float().abs()
    size[..., :rotary_dim] += size[..., :rotary_dim].roll(rotary_dim // 2, -1)
    return size * (2**-22 if weight is None else 2.1 * eps(x.dtype) + 2**-19)


@sampled(("dtype", "fp8", "norm"), TOLERANCE, FP8, [True, False])
def test_rotary_writes_fp8(dtype, fp8, norm):
    dim, rotary_dim, kv_heads = 24, 16, 2
    q, k, v = torch.randn(6, 8, dim).to(dtype).split((4, 2, 2), dim=1)
    k[4], v[3], v[5] = float("inf"), 6e4, -6e4
    angles, positions = torch.rand(64, rotary_dim // 2) * 6, torch.randint(0, 64, (6,))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    start = (torch.randn(2, 4, 4, kv_heads, dim) * 9).to(fp8)
    slots = torch.tensor([3, -1, 7, 15, -1, 2])
    weights = [torch.rand(dim).to(dtype) + 0.5 if norm else None for _ in range(2)]
    scale = torch.tensor([0.013, 0.4])
    caches = [in_arena(start), in_arena(start)]
    outs = [
        kernels.rotary_and_cache(q, k, v, cos_sin, positions, cache, slots, *weights, 1e-6, scale)
        for kernels, cache in zip((TRITON, REFERENCE), caches, strict=True)
    ]
    ours, theirs = (out.float() for out in outs)
    assert ((ours - theirs).abs() <= rotation_error(q, weights[0], rotary_dim) + eps(dtype) * theirs.abs()).all()
    ours, theirs = (cache.float() for cache in caches)
    assert (ours != theirs).float().mean() < 0.02  # a rounding tipped by the last bit of the rotated value
    live = slots >= 0
    error = torch.zeros(2, 16, kv_heads, dim)
    error[0, slots[live]] = rotation_error(k, weights[1], rotary_dim)[live] / scale[0]
    error[0] += eps(dtype) * theirs.reshape(error.shape)[0].abs()
    error = error.view(ours.shape) * (1 + eps(fp8)) + eps(fp8) * theirs.abs()
    error += torch.finfo(fp8).smallest_normal * eps(fp8)
    assert ((ours - theirs).abs() <= error).all()
    assert all(map(neighbours_are_untouched, caches))
    written = ours.reshape(2, 16, kv_heads, dim)[:, slots[live]]
    assert written.isfinite().all()
    assert written.abs().max() == torch.finfo(fp8).max or fp8 == torch.float8_e5m2
    kept = [slot for slot in range(16) if slot not in slots]
    flat = (cache.view(torch.uint8).reshape(2, 16, -1)[:, kept] for cache in (caches[0], start))
    assert torch.equal(*flat)


@each_fp8
def test_nan_stays_nan(fp8):
    k, v = torch.full((2, 1, 8), float("nan")), torch.full((2, 1, 8), float("nan"))
    table = torch.cat((torch.ones(4, 4), torch.zeros(4, 4)), dim=-1)
    for kernels in (TRITON, REFERENCE):
        cache = torch.zeros(2, 1, 2, 1, 8).to(fp8)
        slots = torch.arange(2)
        kernels.rotary_and_cache(k, k, v, table, slots, cache, slots, None, None, 1e-6, torch.ones(2))
        assert cache.float().isnan().all()


@sampled(
    ("case", "early_keys", "dtype", "fp8"),
    [((4, 2, 16), None, 4), ((6, 1, 24), 7, 1)], [False, True], TOLERANCE, FP8,
)  # fmt: skip
def test_fused_decode(case, early_keys, dtype, fp8):
    heads, window, splits = case
    num_heads, kv_heads, head_dim = heads
    filled, sequences = scattered_cache(kv_heads, head_dim, torch.float32)
    scale = torch.rand(2) * 0.1 + 0.01
    caches = [in_arena((filled / scale.view(2, 1, 1, 1, 1)).clamp(-200, 200).to(fp8)) for _ in range(2)]
    joined = torch.randn(len(LENGTHS), num_heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = joined.split((num_heads, kv_heads, kv_heads), dim=1)
    angles = torch.rand(128, head_dim // 2) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    tickets = torch.zeros(len(LENGTHS) * kv_heads, dtype=torch.int32)
    config = AttentionConfig(16, 16, 1, 2, early_keys=early_keys)
    size = head_dim**-0.5
    unlike = {"kv_scale": scale, "sinks": random.choice((None, any_sinks(num_heads, dtype)))}
    expected = decode_attention_reference(q, k, v, cos_sin, caches[1], sequences, size, window, **unlike)
    arguments = (sequences, tickets, size, config, splits, window)
    out = decode_attention(q, k, v, cos_sin, caches[0], *arguments, **unlike)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= 2 * TOLERANCE[dtype] + 2e-3  # the new key may round to its neighbour
    ours, theirs = (cache.float() for cache in caches)
    assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_caches_narrower_than_the_model_without_scales(dtype):
    attend("mixed", (4, 2, 16), 16, dtype, torch.bfloat16)
    k, v = torch.randn(2, 1, 8).to(dtype), torch.randn(2, 1, 8).to(dtype)
    table, slots = torch.cat((torch.ones(4, 4), torch.zeros(4, 4)), dim=-1), torch.arange(2)
    for kernels in (TRITON, REFERENCE):
        cache = torch.zeros(2, 1, 2, 1, 8).bfloat16()
        kernels.rotary_and_cache(k, k, v, table, slots, cache, slots)
        assert torch.equal(cache.view(2, 2, 1, 8), torch.stack((k, v)).bfloat16())


@sampled(("heads", "fp8"), [(4, 2, 64), (3, 1, 128), (10, 5, 64)], FP8)
def test_what_prompts_read_is_unpacked(heads, fp8):
    lengths = [9, 1, 70, 133, 0, 64]
    (_, cache, _), scale = fp8_inputs("mixed", heads, 16, torch.float16, fp8)
    blocks = max(-(-length // 16) for length in lengths)
    table = torch.randint(0, cache.shape[1], (len(lengths), blocks), dtype=torch.int32)
    rows, decodes = torch.randperm(len(lengths)).int(), 2
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    plan = replace(small_plan([(1, 1)], torch.zeros(1, *heads[::2]), heads, decodes, 1), unpacked_blocks=3)
    room = torch.full((2, 4 * 3 + 1, UNPACKED_BLOCK, *heads[1:]), 7.0, dtype=torch.float16)
    unpacked = UnpackedCache.within(room, plan, len(lengths))
    unpack(unpacked, cache, Sequences(table, rows, seq_lens, seq_lens), scale, decodes)
    flat = room.view(2, -1, *heads[1:]).float()
    written = torch.zeros(flat.shape[1], dtype=torch.bool)
    for request in range(decodes, len(lengths)):
        length = lengths[request]
        first = int(unpacked.block_table[unpacked.rows[request], 0]) * UNPACKED_BLOCK
        own = table[rows[request], : -(-length // 16)].long()
        held = cache.view(torch.uint8)[:, own].view(fp8).flatten(1, 2)[:, :length].float() * scale.view(2, 1, 1, 1)
        torch.testing.assert_close(flat[:, first : first + length], held, rtol=1e-3, atol=1e-6, equal_nan=True)
        written[first : first + length] = True
    assert bool((flat[:, ~written] == 7.0).all())


def test_decodes_read_the_cache_itself_beside_prompts_that_read_what_was_unpacked(monkeypatch):
    """prefill.py needs a GPU: in its place the kernel of short prompts, over the 16-bit cache."""
    heads, decodes, batch = (4, 2, 16), 3, BATCHES["mixed"]
    (q, *inputs), scale = fp8_inputs("mixed", heads, 16, torch.float16, FP8[0])
    small = small_plan(batch, q, heads, decodes, 1)
    blocks = -(-max(known for _, known in batch) // UNPACKED_BLOCK)
    plan = replace(small, prefill=replace(small.prefill, copy_engine=True), unpacked_blocks=blocks)
    shape = (2, (len(batch) - decodes) * blocks, UNPACKED_BLOCK, *heads[1:])
    room = torch.full(shape, float("nan"), dtype=torch.float16)

    def stands_in(out, q, cache, sequences, sinks, qk_scale, first_req, end_req, tiles, _):
        seen, requests = attention.Seen(None, False, sinks), (first_req, end_req, tiles)
        attention._run(out, q, cache, sequences, None, qk_scale, seen, *requests, small.prefill, 1, False)

    monkeypatch.setattr("headrace.kernels.prefill.prefill_attention", stands_in)
    arguments = (q, *inputs, 0.3, None, scale)
    sinks = any_sinks(heads[0], torch.float16)
    expected = paged_attention_reference(*arguments, sinks=sinks)
    unpacked = UnpackedCache.within(room, plan, len(batch))
    out = paged_attention(*arguments, torch.full_like(q, float("nan")), sinks, plan=plan, unpacked=unpacked)
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= 2 * TOLERANCE[torch.float16]


def test_blocks_beyond_what_31_bits_address():
    """Of 2.5 GiB, nearly all of which nobody touches."""
    heads, stride, blocks = (4, 2, 16), 2**28, [9, 1, 8, 0]
    far = torch.empty(10 * stride, dtype=FP8[0]).as_strided((2, 10, 16, 2, 16), (512, stride, 32, 16, 1))
    near = torch.randn(2, 4, 16, 2, 16).to(FP8[0])
    for place, block in enumerate(blocks):
        far[:, block] = near[:, place]
    tables = torch.tensor([blocks], dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 4)
    rows, starts, length = torch.tensor([0, 1]).int(), torch.tensor([0, 1]).int(), torch.tensor([50]).int()
    slots = torch.tensor([blocks[3] * 16 + 1]), torch.tensor([3 * 16 + 1])
    q, k, v = torch.randn(1, 8, 16).split((4, 2, 2), dim=1)
    scale, cos_sin = torch.tensor([0.5, 2.0]), torch.cat((torch.ones(64, 8), torch.zeros(64, 8)), dim=1)
    plan = replace(small_plan([(1, 50)], q, heads, 0, 1), unpacked_blocks=1)
    found = []
    for cache, table, slot in zip((far, near), tables, slots, strict=True):
        sequences = Sequences(table, rows[:1], starts, length)
        decoded = decode_attention(
            q, k, v, cos_sin, cache, sequences, torch.zeros(2).int(), 0.3, SMALL, 2, kv_scale=scale
        )
        TRITON.rotary_and_cache(q, k, v, cos_sin, length - 1, cache, slot, kv_scale=scale)
        attended = paged_attention(q, cache, sequences, 0.3, kv_scale=scale, plan=plan)
        unpacked = UnpackedCache.within(torch.zeros(2, 1, UNPACKED_BLOCK, 2, 16), plan, 1)
        unpack(unpacked, cache, sequences, scale, 0)
        found.append((decoded, attended, unpacked.cache))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
