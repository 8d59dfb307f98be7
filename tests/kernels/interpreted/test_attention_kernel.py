"""The paged attention kernels against the reference: ragged batches, every block size, split keys, sliding windows,
chunks, sinks."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from arena import in_arena

from headrace.attention import triton_attn
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels import attention_config
from headrace.kernels.attention import COMBINED, paged_attention, paged_attention_reference
from headrace.kernels.attention_config import AttentionConfig, plan_attention
from headrace.kernels.paged import Sequences
from tests.sampled import sampled

TOLERANCE = {torch.float32: 6e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the norm. In float32 scores of up to 40, of heads of 128 with a scale of 1, are rounded by 40 * 2**-24 = 2.4e-6,
by kernel and reference each in its own way: of 1,500 draws the worst differed by 2.7e-6, one in a hundred by 2e-6."""
SMALL = AttentionConfig(16, 16, 4, 1)
BATCHES = {
    # (query length, tokens known) of each request
    "decode": [(1, 37), (1, 1), (1, 0), (1, 17), (1, 64)],
    "prefill": [(9, 9), (1, 1), (33, 33)],
    "chunks": [(5, 30), (2, 50), (16, 48)],
    "mixed": [(1, 37), (1, 0), (1, 2), (3, 3), (21, 60)],
}


def make_inputs(batch, heads, block_size, dtype):
    num_heads, kv_heads, dim = heads
    counts, lengths = zip(*batch, strict=True)
    width = -(-64 // block_size) + 1
    table = torch.randperm(8 * width).view(8, width).int()
    cache = torch.randn(2, 8 * width, block_size, kv_heads, dim).to(dtype)
    cache[:, table[7].long()] = float("nan")  # nobody's blocks
    q = torch.randn(sum(counts), num_heads, dim).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    rows = torch.randperm(7)[: len(batch)].int()
    return q, in_arena(cache), Sequences(table, rows, starts, torch.tensor(lengths, dtype=torch.int32))


def forget_behind_window(cache, sequences, window, chunked=False):
    """Blocks of which no query of the step sees a key are others' by now, with numbers of another type."""
    table, rows, starts, lengths = sequences
    for row, count, length in zip(rows.tolist(), starts.diff().tolist(), lengths.tolist(), strict=True):
        if window and length:
            first = length - count
            first = first // window * window if chunked else max(0, first - window + 1)
            cache[:, table[row, : first // cache.shape[2]].long()] = float("nan")


def any_sinks(num_heads, dtype):
    """A logit for each head, among them none (-inf), 0, one that outweighs all keys, and one that none outweighs."""
    special = torch.tensor([float("-inf"), 0.0, 40.0, -1e4])[:num_heads]
    sinks = torch.randn(num_heads) * 3
    sinks[torch.randperm(num_heads)[: len(special)]] = special
    return sinks.to(dtype)


def small_plan(batch, q, heads, decodes, splits):
    """The planner's launches, with tiles small enough for the interpreter."""
    plan = plan_attention(len(batch), len(q), decodes, 64, *heads, q.element_size(), "cuda", 1)
    tiles = 0
    if decodes < len(batch):
        tiles = (len(q) - decodes) // (16 // (heads[0] // heads[1])) + len(batch) - decodes
    return replace(plan, decode=SMALL, prefill=SMALL, decode_splits=splits, prefill_splits=splits, prefill_tiles=tiles)


def run(kind, heads, block_size, window, splits, dtype, chunked=False, sinks=False, soft_cap=None):
    batch = BATCHES[kind]
    inputs = make_inputs(batch, heads, block_size, dtype)
    scale = random.uniform(0.1, 1.0)
    unlike = {"chunked": chunked, "sinks": any_sinks(heads[0], dtype) if sinks else None, "soft_cap": soft_cap}
    expected = paged_attention_reference(*inputs, scale, window, **unlike)
    forget_behind_window(*inputs[1:], window, chunked)
    decodes = {"decode": len(batch), "mixed": random.choice((0, 3))}.get(kind, 0)
    out = torch.full_like(inputs[0], float("nan"))
    plan = small_plan(batch, inputs[0], heads, decodes, splits)
    assert paged_attention(*inputs, scale, window, None, out, **unlike, plan=plan) is out
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[dtype]


def test_more_splits_than_are_added_up_at_once():
    run("mixed", (4, 2, 8), 16, None, 2 * COMBINED, torch.float32)


@sampled(("kind", "splits", "block_size"), BATCHES, [1, 4], [1, 16, 64])
def test_batches_and_block_sizes(kind, splits, block_size):
    run(kind, (4, 2, 8), block_size, None, splits, torch.float32)


@sampled(("kind", "window"), ["decode", "chunks"], [1, 7, 40])
def test_sliding_window(kind, window):
    run(kind, (4, 2, 8), random.choice((1, 4, 16)), window, random.choice((1, 2)), torch.float32)


@sampled(("kind", "window", "splits", "chunked"), BATCHES, [1, 17, 100], [1, 4], [False, True])
def test_sinks_behind_windows_and_chunks(kind, window, splits, chunked):
    run(kind, (6, 2, 8), random.choice((1, 4, 16)), window, splits, torch.float32, chunked, sinks=True)


@sampled(("kind", "sums"), BATCHES, [(torch.float32, 1), (torch.float16, 4), (torch.bfloat16, 2)])
def test_sinks_of_full_layers(kind, sums):
    dtype, splits = sums
    run(kind, (8, 1, 64), 16, None, splits, dtype, sinks=True)


@sampled(("kind", "seen"), BATCHES, [(torch.float32, None), (torch.bfloat16, 17)])
def test_scores_are_held_within_a_soft_cap(kind, seen):
    dtype, window = seen
    run(kind, (6, 2, 24), 16, window, random.choice((1, 4)), dtype, sinks=window is not None, soft_cap=0.7)


@sampled(
    ("kind", "heads"), ["decode", "mixed"], [(3, 1, 24), (4, 4, 16), (5, 1, 40), (2, 1, 64), (4, 2, 96), (2, 2, 128)]
)
def test_odd_heads(kind, heads):
    run(kind, heads, 16, None, 2, torch.float32)


def test_more_query_heads_than_rows_of_the_usual_tile():
    batch, heads = BATCHES["decode"], (17, 1, 8)
    inputs = make_inputs(batch, heads, 16, torch.float32)
    plan = plan_attention(len(batch), len(batch), len(batch), 64, *heads, 4, "cuda", 1)
    assert plan.decode.block_m == 32
    out = paged_attention(*inputs, 0.3, plan=plan)
    torch.testing.assert_close(out, paged_attention_reference(*inputs, 0.3))


@sampled(("kind", "dtype"), ["decode", "mixed"], [torch.float16, torch.bfloat16])
def test_half_precision(kind, dtype):
    run(kind, (4, 2, 16), 16, None, 2, dtype)


@sampled(("kind", "splits"), ["decode", "chunks"], [1, 2, 4])
def test_a_key_that_overflowed_reaches_every_query_that_sees_it(kind, splits):
    batch, heads = BATCHES[kind], (4, 2, 8)
    inputs = make_inputs(batch, heads, 16, torch.float32)
    first_block = inputs[2].block_table[inputs[2].rows[0].long(), 0]
    inputs[1][0, first_block, 0] = float("nan")  # the first request's first key
    plan = small_plan(batch, inputs[0], heads, len(batch) if kind == "decode" else 0, splits)
    out = paged_attention(*inputs, 0.3, plan=plan)
    count = batch[0][0]
    assert out[:count].isnan().all()
    assert not out[count:].isnan().any()


def test_more_tiles_than_a_launch_holds_is_a_step_that_is_too_large():
    batch, heads = BATCHES["prefill"], (4, 2, 8)
    inputs = make_inputs(batch, heads, 16, torch.float32)
    plan = replace(small_plan(batch, inputs[0], heads, 0, 1), prefill_tiles=65_536)
    with pytest.raises(torch.OutOfMemoryError, match="65536 tiles"):
        paged_attention(*inputs, 0.3, plan=plan)


def test_no_tokens():
    q = torch.empty(0, 4, 8)
    table, none = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    cache = torch.zeros(2, 2, 16, 2, 8)
    sequences = Sequences(table, none, torch.zeros(1, dtype=torch.int32), none)
    out = paged_attention(q, cache, sequences, 1.0, plan=plan_attention(0, 0, 0, 1, 4, 2, 8, 4, "cuda", 1))
    assert out.shape == (0, 4, 8)


def test_backend_plans_once_a_step_for_each_shape_of_layer(monkeypatch):
    monkeypatch.setattr(triton_attn, "multiprocessor_count", lambda device: 1)
    batch = BATCHES["decode"]
    inputs = make_inputs(batch, (4, 2, 8), 16, torch.float32)
    q, cache, (table, rows, starts, lengths) = inputs
    metadata = AttentionMetadata(rows, starts, lengths, lengths, (lengths,), (table,), len(batch), len(q), 1, 64)
    backend = triton_attn.TritonAttention()
    full = AttentionSpec(4, 2, 8, 0.5, 16, "float32")
    windowed = replace(full, sliding_window=5)
    for spec in (full, windowed, full):
        out = backend.forward(q, cache, metadata, spec)
        reference = paged_attention_reference(*inputs, 0.5, spec.sliding_window)
        torch.testing.assert_close(out, reference)
    assert len(metadata.plan) == 2


@pytest.mark.parametrize(("window", "chunked", "sinks"), [(None, False, False), (20, False, True), (24, True, False)])
def test_batch_invariant_plan_gives_a_query_the_same_bits_in_any_chunk(window, chunked, sinks, monkeypatch):
    """One sequence's last 26 queries: one at a time, in chunks, beside another request, all at once."""
    monkeypatch.setattr(attention_config, "PREFILL", {("cuda", 4, width): SMALL for width in (64, 128, 256)})
    heads, block_size, length, known = (4, 2, 8), 16, 26, 55
    q, cache, (table, rows, *_) = make_inputs([(length, known), (9, 9)], heads, block_size, torch.float32)
    unlike = {"chunked": chunked, "sinks": any_sinks(heads[0], torch.float32) if sinks else None}

    def attend(first, last, with_other):
        counts, lengths = [last - first], [known - length + last]
        queries = q[first:last]
        if with_other:
            counts, lengths, queries = [*counts, 9], [*lengths, 9], torch.cat((queries, q[length:]))
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        lengths = torch.tensor(lengths, dtype=torch.int32)
        plan = plan_attention.__wrapped__(
            len(counts), len(queries), sum(count == 1 for count in counts), 64, *heads, 4, "cuda", 132, True
        )
        out = torch.full_like(queries, float("nan"))
        sequences = Sequences(table, rows[: len(counts)], starts, lengths)
        paged_attention(queries, cache, sequences, 0.5, window, None, out, **unlike, plan=plan)
        return out[: last - first]

    whole = attend(0, length, False)
    for size in (1, 7, 19):
        chunks = [attend(first, min(first + size, length), first % 2 == 0) for first in range(0, length, size)]
        assert torch.equal(torch.cat(chunks), whole)
