"""TORCH_SDPA against the plain reference: whatever batch, however it is grouped and padded."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.attention.torch_sdpa import TorchSdpa
from headrace.kernels.attention import paged_attention_reference

HEADS = [(4, 2, 8), (3, 1, 24), (4, 4, 16)]


def quirky_reference(q, cache, table, rows, starts, lengths, spec, sinks):
    """Query by query: whom it sees, a softmax with the sink as one more logit, and the sum of the values."""
    out = []
    for row, start, end, length in zip(rows.tolist(), starts.tolist(), starts.tolist()[1:], lengths, strict=False):
        blocks = table[row, : -(-length // spec.block_size)].long()
        parts = cache[:, blocks].flatten(1, 2)[:, :length].double()
        key, value = parts if spec.latent_dim is None else (parts[0], parts[0, ..., -spec.latent_dim :])
        key, value = (part.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1) for part in (key, value))
        for index in range(start, end):
            at, window = length - (end - index), spec.sliding_window or length
            first = at // window * window if spec.chunked else max(0, at - window + 1)
            logits = torch.einsum("hd,lhd->hl", q[index].double(), key[first : at + 1]) * spec.scale
            if sinks is not None:
                logits = torch.cat((logits, sinks.double()[:, None]), 1)
            shares = logits.softmax(1)[:, : at + 1 - first]
            out.append(torch.einsum("hl,lhd->hd", shares, value[first : at + 1]))
    return torch.stack(out).to(q.dtype)


QUIRKS = {
    "a window": {"sliding_window": 20},
    "chunks": {"sliding_window": 24, "chunked": True},
    "sinks": {"sinks": True},
    "sinks and a window": {"sliding_window": 7, "sinks": True},
    "a latent": {"latent_dim": 20, "num_kv_heads": 1},
    "a latent, chunks and sinks": {
        "latent_dim": 8,
        "num_kv_heads": 1,
        "sliding_window": 5,
        "chunked": True,
        "sinks": True,
    },
}


@pytest.mark.parametrize("quirk", QUIRKS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_layers_unlike_the_usual_ones(quirk, block_size):
    """Cells that no request of the batch owns, and table entries beyond a request's end, lead to NaN."""
    for _ in range(2):
        counts = sorted(random.choice((1, 1, 3, 17, 60)) for _ in range(random.randint(1, 6)))
        lengths = [count + random.choice((0, 0, 5, 100)) for count in counts]
        spec = replace(AttentionSpec(6, 2, 24, 0.3, block_size, "float32", device_type="cpu"), **QUIRKS[quirk])
        width, size = -(-max(lengths) // block_size) + 1, len(counts)
        order = torch.randperm(size * width).view(size, width).int()
        table = torch.full((size, width), size * width, dtype=torch.int32)
        for row, length in enumerate(lengths):
            used = -(-length // block_size)
            table[row, :used] = order[row, :used]
        cache = torch.full((1 if spec.latent_dim else 2, size * width + 1, block_size, spec.num_kv_heads, 24), math.nan)
        for row, length in enumerate(lengths):
            first = 0
            if spec.sliding_window:
                at = length - counts[row]
                first = (
                    at // spec.sliding_window * spec.sliding_window if spec.chunked else at - spec.sliding_window + 1
                )
            blocks = table[row, max(0, first) // block_size : -(-length // block_size)].long()
            cache[:, blocks] = torch.randn_like(cache[:, blocks])
        q, sinks = torch.randn(sum(counts), 6, 24), torch.randn(6) if spec.sinks else None
        starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        rows, seq_lens = torch.arange(size).int(), torch.tensor(lengths, dtype=torch.int32)
        metadata = AttentionMetadata(
            rows, starts, seq_lens, starts, (starts,), (table,), size, len(q), max(counts), max(lengths)
        )
        backend = TorchSdpa()
        out = backend.forward(q, cache, metadata, spec, sinks=sinks)
        expected = quirky_reference(q, cache, table, rows, starts, lengths, spec, sinks)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        if spec.latent_dim is None:  # what the kernels are compared with
            quirks = {"sinks": sinks, "chunked": spec.chunked}
            reference = paged_attention_reference(
                q, cache.nan_to_num(), metadata.sequences(0), 0.3, spec.sliding_window, **quirks
            )
            torch.testing.assert_close(reference, expected, rtol=1e-4, atol=1e-5)


def attend(batch, heads, block_size, window=None, dtype=torch.float32, layers=1, cache_dtype=None):
    """(out of the last of `layers` equal layers, reference, metadata) for a batch of (query_len, seq_len)"""
    counts, lengths = zip(*batch, strict=True)
    num_heads, kv_heads, dim = heads
    width = -(-max(lengths) // block_size) + 1
    size = len(batch) + 2
    table, rows = torch.randperm(size * width).view(size, width).int(), torch.randperm(size)[: len(batch)].int()
    cache = torch.randn(2, size * width + 1, block_size, kv_heads, dim).to(cache_dtype or dtype)
    kv_scale = torch.rand(2) + 0.5 if cache.element_size() == 1 else None
    q = torch.randn(sum(counts), num_heads, dim).to(dtype)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    spec = AttentionSpec(num_heads, kv_heads, dim, 0.3, block_size, str(dtype), window, "cpu")
    metadata = AttentionMetadata(
        rows, starts, seq_lens, starts, (starts,), (table,), len(batch), len(q), max(counts), max(lengths)
    )
    backend = TorchSdpa()
    for _ in range(layers):
        out = backend.forward(q, cache, metadata, spec, kv_scale)
    reference = paged_attention_reference(q, cache, metadata.sequences(0), 0.3, window, kv_scale)
    return out, reference, metadata


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_random_batches(block_size, window):
    for heads in HEADS * 3:
        counts = sorted(random.choice((1, 1, 3, 3, 17, 60)) for _ in range(random.randint(1, 7)))
        batch = [(count, count + random.choice((0, 0, 5, 40, 200))) for count in counts]
        out, reference, _ = attend(batch, heads, block_size, window)
        torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_decode_batch_is_one_group(heads):
    out, reference, metadata = attend([(1, 9), (1, 30), (1, 33), (1, 1)], heads, 16)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    (groups,) = metadata.plan.values()
    assert len(groups) == 1
    assert groups[0].tokens is None


def test_one_long_sequence_does_not_pad_the_short_ones():
    out, reference, metadata = attend([(1, 20)] * 15 + [(1, 20_000)], (4, 2, 16), 16)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    (groups,) = metadata.plan.values()
    assert sorted(group.size for group in groups) == [1, 15]


def test_a_lone_prompt_needs_no_mask():
    out, reference, metadata = attend([(40, 40)], (4, 2, 8), 16)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    (groups,) = metadata.plan.values()
    assert groups[0].mask is None


def test_padding_requests_give_zeros():
    out, reference, _ = attend([(1, 9), (1, 0), (1, 4)], (4, 2, 8), 16)
    assert out[1].abs().sum() == 0
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)


def test_all_layers_share_one_plan():
    out, reference, metadata = attend([(3, 9), (5, 5)], (4, 2, 8), 1, layers=3)
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)
    assert len(metadata.plan) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    out, reference, _ = attend([(1, 40), (1, 7), (12, 30)], (4, 2, 16), 16, dtype=dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "bfloat16"])
@pytest.mark.parametrize("batch", [[(1, 40), (1, 7), (12, 30)], [(40, 40)], [(1, 9), (1, 30)]], ids=str)
def test_caches_of_other_types(batch, kind):
    out, reference, _ = attend(batch, (4, 2, 16), 16, cache_dtype=getattr(torch, kind))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_that_is_not_one_piece_is_never_copied_whole(cache_dtype):
    """Its 2 ** 40 blocks are one and the same, which no memory would hold as a copy."""
    one = torch.randn(2, 1, 16, 2, 8).to(cache_dtype)
    lengths = torch.tensor([1, 20, 40], dtype=torch.int32)
    starts, rows = torch.arange(4, dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    table = torch.randint(0, 1 << 31, (3, 3)).int()
    spec, q = AttentionSpec(4, 2, 8, 0.3, 16, "float32", device_type="cpu"), torch.randn(3, 4, 8)
    outs = []
    for cache, blocks in ((one.expand(-1, 1 << 40, -1, -1, -1), table), (one, torch.zeros_like(table))):
        metadata = AttentionMetadata(rows, starts, lengths, starts, (starts,), (blocks,), 3, 3, 1, 40)
        outs.append(TorchSdpa().forward(q, cache, metadata, spec))
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
