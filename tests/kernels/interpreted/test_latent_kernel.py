"""Attention over latents against the reference: ragged batches, every block size, split keys, odd ranks, fp8 caches,
keys that are chosen one by one."""

import itertools
import random

import pytest
import torch
from arena import in_arena

from headrace.kernels.attention_config import AttentionConfig
from headrace.kernels.cases import relative_error
from headrace.kernels.latent import LatentHeads, latent_attention, latent_attention_reference
from headrace.kernels.latent_config import ExpandedLaunch, LatentLaunch
from headrace.kernels.latent_prompt import expanded_attention, expanded_attention_reference
from headrace.kernels.paged import Sequences
from headrace.kernels.rotary import quantize_reference
from tests.sampled import sampled

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
BATCHES = {
    # (query length, tokens known) of each request
    "decode": [(1, 37), (1, 1), (1, 0), (1, 17), (1, 64)],
    "drafts": [(3, 30), (3, 3), (3, 50), (3, 0)],
    "mixed": [(1, 37), (1, 0), (1, 2), (3, 3), (21, 60)],
}


def make_inputs(batch, heads, sizes, block_size, dtype, cache_dtype=None):
    """`sizes`: of the rotated part and of the latent."""
    rope, latent = sizes
    counts, lengths = zip(*batch, strict=True)
    width = -(-64 // block_size) + 1
    table = torch.randperm(8 * width).view(8, width).int()
    cache = torch.randn(1, 8 * width, block_size, 1, rope + latent)
    scale = None
    if cache_dtype is not None:
        scale = torch.tensor([0.03, 7.0])
        cache = quantize_reference(cache, scale[0], cache_dtype)
    else:
        cache = cache.to(dtype)
        cache[:, table[7].long()] = float("nan")  # nobody's blocks
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    rows = torch.randperm(7)[: len(batch)].int()
    sequences = Sequences(table, rows, starts, torch.tensor(lengths, dtype=torch.int32))
    q = torch.randn(sum(counts), heads, latent).to(dtype)
    projected = torch.randn(sum(counts), heads, rope + 5).to(dtype)
    return q, projected[..., 5:], in_arena(cache), sequences, scale


def run(kind, heads, sizes, block_size, splits, dtype, cache_dtype=None, chosen=None, group=None):
    batch = BATCHES[kind]
    *inputs, kv_scale = make_inputs(batch, heads, sizes, block_size, dtype, cache_dtype)
    q = inputs[0]
    listed = None if chosen is None else any_keys(batch, chosen)
    scale = random.uniform(0.1, 1.0) * sum(sizes) ** -0.5
    expected = latent_attention_reference(*inputs, scale, kv_scale, listed)
    group = group or heads
    config = AttentionConfig(max(16, 1 << (group - 1).bit_length()), 16, 4, 1)
    decodes = sum(count == 1 for count, _ in batch)
    out = torch.full_like(q, float("nan"))
    per_tile = config.block_m // group if listed is None else 1
    for first, end, tiles, decode in (
        (0, decodes, decodes, True),
        (decodes, len(batch), (len(q) - decodes) // per_tile + len(batch) - decodes, False),
    ):
        if end > first:
            how = LatentLaunch(config, group, tiles, splits, decode)
            latent_attention(*inputs, scale, how, kv_scale, listed, first, end, out)
    assert relative_error(out, expected) <= (TOLERANCE[dtype] if cache_dtype is None else 4e-3)


def any_keys(batch, most):
    """For each query up to `most` different keys that it sees, in any order, then -1 and numbers that nobody reads."""
    rows = []
    for count, length in batch:
        for position in range(length - count, length):
            keys = torch.randperm(max(position + 1, 0))[: random.randint(1, most)].tolist()
            keys += [-1] * (min(most, max(position + 1, 0)) - len(keys))
            rows.append(keys + [10**6] * (most - len(keys)))
    return torch.tensor(rows, dtype=torch.int32)


@sampled(("kind", "splits", "block_size"), BATCHES, [1, 4], [1, 16, 64])
def test_batches_and_block_sizes(kind, splits, block_size):
    run(kind, 4, (8, 24), block_size, splits, torch.float32)


@pytest.mark.parametrize(("heads", "group"), [(3, 3), (5, 2), (16, 16), (20, 20), (40, 20)])
def test_groups_of_heads(heads, group):
    run(random.choice(list(BATCHES)), heads, (16, 32), 16, 2, torch.float32, group=group)


@sampled(("kind", "sizes", "dtype"), BATCHES, [(8, 24), (16, 64), (4, 20)], [torch.float16, torch.bfloat16])
def test_half_precision_and_odd_ranks(kind, sizes, dtype):
    run(kind, 4, sizes, 16, 2, dtype)


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fp8_caches(kind, dtype):
    run(kind, 6, (8, 40), 16, random.choice((1, 3)), dtype, torch.float8_e4m3fn)


@sampled(("kind", "most", "splits", "block_size"), BATCHES, [5, 40], [1, 3], [1, 16, 64])
def test_chosen_keys(kind, most, splits, block_size):
    run(kind, 4, (8, 24), block_size, splits, torch.float32, chosen=most)


def test_a_key_that_overflowed_reaches_every_query_that_sees_it():
    batch = BATCHES["decode"]
    q, turned, cache, sequences, _ = make_inputs(batch, 4, (8, 24), 16, torch.float32)
    cache[0, sequences.block_table[sequences.rows[0].long(), 0], 0] = float("nan")  # the first request's first key
    how = LatentLaunch(AttentionConfig(16, 16, 4, 1), 4, len(batch), 2, True)
    out = latent_attention(q, turned, cache, sequences, 0.3, how)
    assert out[0].isnan().all()
    assert not out[1:].isnan().any()


def test_what_decodes_keep_of_each_split_does_not_grow_with_prompts_behind_them(monkeypatch):
    *inputs, _ = make_inputs([(1, 37), (1, 9), (50, 60)], 4, (8, 24), 16, torch.float32)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(size) or empty(*size, **options))
    latent_attention(*inputs, 0.3, LatentLaunch(AttentionConfig(16, 16, 4, 1), 4, 2, 3, True), first_req=0, end_req=2)
    assert [size[0][0] for size in made[1:]] == [2, 2]


@sampled(
    ("batch", "piece", "sizes", "dtype"),
    [[(9, 9), (2, 2), (33, 33), (7, 64)], [(1, 37), (1, 0), (5, 30), (16, 48)], [(3, 64), (7, 0), (2, 33)]],
    [16, 33, 1000],
    [(16, 8, 16, 24), (5, 4, 7, 20)],
    [torch.float32, torch.float16, torch.bfloat16],
)
def test_heads_of_their_own_over_pieces(batch, piece, sizes, dtype):
    """`sizes`: of the unrotated and the rotated part of a head, of its value and of the latent."""
    nope, rope, value, latent = sizes
    first = sum(count == 1 for count, _ in batch)
    quantized = dtype == torch.float16
    _, _, cache, sequences, kv_scale = make_inputs(
        batch, 1, (rope, latent), 16, dtype, torch.float8_e4m3fn if quantized else None
    )
    tokens, keys = sum(count for count, _ in batch), sum(length for _, length in batch[first:])
    q = torch.randn(tokens, 3, nope + rope + 1).to(dtype)[..., 1:]
    q = torch.cat((q.flatten(1), q.flatten(1)), dim=1)[:, : q.shape[1] * q.shape[2]].view(q.shape)
    heads = LatentHeads((torch.randn(3, nope + value, latent) * latent**-0.5).to(dtype), nope)
    lengths = torch.tensor([0, *itertools.accumulate(length for _, length in batch[first:])], dtype=torch.int32)
    expected = expanded_attention_reference(q, heads, cache, sequences, 0.2, kv_scale, first)
    how = ExpandedLaunch(AttentionConfig(16, 16, 4, 1), tokens // 16 + len(batch) - first, keys + 5, piece)
    memory = torch.full((piece * heads.sizes(q).expanded,), float("nan"), dtype=dtype)
    out = torch.full_like(expected, float("nan"))
    expanded_attention(q, heads, cache, sequences, lengths, 0.2, how, memory, kv_scale, first, out)
    done = int(sequences.query_start_loc[first])
    assert relative_error(out[done:], expected[done:]) <= (4e-3 if quantized else TOLERANCE[dtype])
    assert out[:done].isnan().all()
