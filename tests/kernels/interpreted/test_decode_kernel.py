"""The fused decode kernel against rotary, cache write and attention done one after the other."""

import random

import pytest
import torch
from arena import error, in_arena, neighbours_are_untouched
from test_attention_kernel import any_sinks, forget_behind_window

from headrace.kernels.attention_config import AttentionConfig, plan_decode
from headrace.kernels.decode import decode_attention, decode_attention_reference
from headrace.kernels.paged import Sequences
from tests.sampled import sampled

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
LENGTHS = [1, 0, 5, 37, 64, 17]
BLOCK_SIZE = 4
pytestmark = pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")


def scattered_cache(kv_heads, head_dim, dtype):
    """(cache, sequences) with each request's blocks anywhere; the last block is nobody's"""
    total = sum(-(-length // BLOCK_SIZE) for length in LENGTHS) + 3
    table = torch.full((len(LENGTHS) + 2, 20), total - 1, dtype=torch.int32)
    rows = torch.randperm(len(LENGTHS) + 2)[: len(LENGTHS)].int()
    blocks = torch.randperm(total - 1).int()
    for row, length in zip(rows.tolist(), LENGTHS, strict=True):
        needed = -(-length // BLOCK_SIZE)
        table[row, :needed], blocks = blocks[:needed], blocks[needed:]
    starts, lengths = torch.arange(len(LENGTHS) + 1).int(), torch.tensor(LENGTHS, dtype=torch.int32)
    cache = in_arena(torch.randn(2, total, BLOCK_SIZE, kv_heads, head_dim).to(dtype))
    return cache, Sequences(table, rows, starts, lengths)


@sampled(
    ("dtype", "case", "early_keys"),
    TOLERANCE,
    [
        ((4, 2, 16), 16, False, None, 1),
        ((4, 2, 16), 16, True, None, 4),
        ((6, 1, 24), 8, True, 7, 4),
        ((3, 3, 8), 8, False, 20, 2),
        ((8, 2, 32), 32, False, None, 8),
        ((2, 1, 96), 96, True, None, 2),
    ],
    [False, True],
)
def test_equals_the_separate_kernels(dtype, case, early_keys):
    run(dtype, *case, early_keys)


@sampled(
    ("dtype", "case", "early_keys"),
    TOLERANCE,
    [
        # heads, window, chunked, splits
        ((8, 1, 64), None, False, 1),
        ((16, 2, 64), 17, False, 4),
        ((16, 1, 16), 1, False, 2),
        ((6, 2, 24), 128, False, 8),
        ((5, 1, 40), 17, True, 2),
    ],
    [False, True],
)
def test_sinks_windows_and_chunks(dtype, case, early_keys):
    heads, window, chunked, splits = case
    rotary_dim = 0 if chunked else heads[2]
    run(dtype, heads, rotary_dim, False, window, splits, early_keys, chunked, sinks=True)


@sampled(
    ("dtype", "case", "early_keys"),
    TOLERANCE,
    [
        # heads, rotary_dim, norm, window, splits
        ((8, 1, 64), 32, True, None, 1),
        ((6, 2, 24), 24, False, 17, 4),
        ((5, 1, 40), 20, True, 128, 2),
    ],
    [False, True],
)
def test_neighbours_are_turned_queries_grow_and_scores_are_capped(dtype, case, early_keys):
    run(dtype, *case, early_keys, soft_cap=1.5, interleaved=True)


def run(
    dtype, heads, rotary_dim, norm, window, splits, early_keys, chunked=False, sinks=False, soft_cap=None,
    interleaved=False,
):  # fmt: skip
    """`rotary_dim` 0: nothing is rotated. `interleaved`: queries grow and are weighted too, and weights of norms are
    in float32."""
    num_heads, kv_heads, head_dim = heads
    cache, sequences = scattered_cache(kv_heads, head_dim, dtype)
    q, k, v = (
        torch.randn(len(LENGTHS), num_heads + 2 * kv_heads, head_dim).to(dtype).split((num_heads, *heads[1:2] * 2), 1)
    )
    angles = torch.rand(128, rotary_dim // 2) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary_dim else None
    unlike = {
        "chunked": chunked,
        "sinks": any_sinks(num_heads, dtype) if sinks else None,
        "soft_cap": soft_cap,
        "interleaved": interleaved,
        "temperature": torch.rand(len(LENGTHS)) + 1 if interleaved else None,
        "q_weight": torch.rand(head_dim) + 0.5 if interleaved else None,
    }
    norms = [torch.randn(head_dim).to(torch.float32 if interleaved else dtype) if norm else None for _ in range(2)]
    scale = head_dim**-0.5
    expected_cache = in_arena(cache)
    expected = decode_attention_reference(q, k, v, cos_sin, expected_cache, sequences, scale, window, *norms, **unlike)
    for one in (cache, expected_cache):
        forget_behind_window(one, sequences, window, chunked)
    tickets = torch.zeros(len(LENGTHS) * kv_heads, dtype=torch.int32)
    config = AttentionConfig(16, random.choice((4, 16)), 1, 2, early_keys=early_keys)
    inputs = (q, k, v, cos_sin, cache, sequences, tickets, scale, config, splits, window, *norms)
    out = decode_attention(*inputs, **unlike)
    assert error(out, expected) <= TOLERANCE[dtype]
    known = expected_cache.isnan().logical_not()
    assert error(cache[known], expected_cache[known]) <= TOLERANCE[dtype]
    assert torch.equal(cache.isnan(), ~known)
    assert neighbours_are_untouched(cache) or window
    assert neighbours_are_untouched(expected_cache) or window
    assert not tickets.any()


def test_no_request_is_no_work():
    empty = torch.zeros(0, 2, 16)
    numbers = torch.zeros(0, dtype=torch.int32)
    cache = torch.zeros(2, 1, 4, 2, 16)
    sequences = Sequences(torch.zeros(1, 1, dtype=torch.int32), numbers, numbers, numbers)
    arguments = (torch.zeros(4, 16), cache, sequences, numbers)
    assert decode_attention(empty, empty, empty, *arguments, 1.0, AttentionConfig(16, 16, 1, 2), 2).shape == (0, 2, 16)


def test_plans_fill_the_chip_and_no_more():
    parts = {requests: plan_decode(requests, 32, 8, 128, 2, "cuda", 132)[1] for requests in (1, 4, 32, 64)}
    assert parts == {1: 32, 4: 8, 32: 1, 64: 2}
    assert plan_decode(1024, 32, 8, 128, 2, "cuda", 132)[1] == 1


def test_a_window_needs_no_more_parts_than_it_has_keys_for():
    config, splits = plan_decode(1, 64, 8, 64, 2, "cuda", 132, 128)
    assert (config.block_n, splits) == (128, 1)
    config, splits = plan_decode(128, 64, 8, 64, 2, "cuda", 132, 4096)
    assert splits * config.block_n <= 4096 // 2
    assert plan_decode(1, 64, 8, 64, 2, "cuda", 132, 1)[1] == 1
    assert plan_decode(1, 64, 8, 64, 2, "cuda", 132, 1 << 20) == plan_decode(1, 64, 8, 64, 2, "cuda", 132)


def test_few_requests_have_their_keys_early_and_many_do_not():
    tiles = {requests: plan_decode(requests, 32, 8, 128, 2, "cuda", 132)[0] for requests in (1, 2, 3, 33, 34)}
    early = {requests: tile.block_n for requests, tile in tiles.items() if tile.early_keys}
    assert early == {1: 64, 2: 64, 3: 128, 33: 128}
    assert not plan_decode(1, 32, 8, 128, 2, "hip", 304)[0].early_keys
