"""What captured steps are padded with: requests without tokens, and one of tokens that know nothing before them."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from test_attention_kernel import any_sinks

from headrace.kernels.attention import paged_attention, paged_attention_reference
from headrace.kernels.attention_config import AttentionConfig, plan_attention
from headrace.kernels.batch import prepare_batch, prepare_batch_reference
from headrace.kernels.paged import Sequences
from tests.sampled import sampled

SMALL = AttentionConfig(16, 16, 4, 1)
HEADS = (4, 2, 8)
BATCHES = {
    # (query length, tokens known) of each request
    "tokens": [(1, 37), (1, 5), (9, 9), (21, 60), (11, 0)],
    "tokens and requests": [(1, 37), (20, 50), (3, 0), (0, 0), (0, 0), (0, 0)],
    "requests": [(1, 37), (31, 31), (0, 0), (0, 0)],
    "more tokens than a tile": [(2, 2), (40, 0), (0, 0)],
}


@sampled(("kind", "whole_graph", "window"), BATCHES, [False, True], [None, 7])
def test_attention_gives_zeros_to_padding_and_leaves_others_alone(kind, whole_graph, window):
    counts, lengths = zip(*BATCHES[kind], strict=True)
    tokens, reqs = sum(counts), len(counts)
    splits = random.choice((1, 4))
    table = torch.randperm(8 * 5).view(8, 5).int()
    cache = torch.randn(2, 8 * 5, 16, *HEADS[1:])
    cache[:, table[7].long()] = float("nan")  # the scratch row's
    q = torch.randn(tokens, *HEADS[::2])
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    rows = torch.tensor([7 if known == 0 else row for row, known in enumerate(lengths)], dtype=torch.int32)
    inputs = (q, cache, Sequences(table, rows, starts, torch.tensor(lengths, dtype=torch.int32)))
    decodes = 0 if whole_graph else next(i for i, count in enumerate(counts) if count > 1)
    plan = plan_attention(reqs, tokens, decodes, 64, *HEADS, 4, "cuda", 1)
    tiles = (tokens - decodes) // (16 // 2) + reqs - decodes
    plan = replace(plan, decode=SMALL, prefill=SMALL, decode_splits=splits, prefill_splits=splits, prefill_tiles=tiles)
    out = torch.full_like(q, float("nan"))
    sinks = any_sinks(HEADS[0], torch.float32) if random.choice((False, True)) else None
    paged_attention(*inputs, 0.4, window, None, out, sinks, plan=plan)
    torch.testing.assert_close(out, paged_attention_reference(*inputs, 0.4, window, sinks=sinks))
    for start, count, known in zip(starts.tolist(), counts, lengths, strict=False):
        if known == 0:
            assert out[start : start + count].eq(0).all()


@pytest.mark.parametrize(
    "counts", [[1, 4, 3, 0, 0], [1, 1, 1, 1, 0], [3, 1, 1, 0, 0], [1, 1, 1], [8, 0, 0, 0, 0, 0, 0, 0]]
)
def test_requests_without_tokens_gather_nothing(counts):
    table = torch.randint(0, 99, (9, 40), dtype=torch.int32)
    blocks = torch.randint(0, 2**20, (9, 10), dtype=torch.int32)
    rows = torch.randperm(9)[: len(counts)].int()
    computed = torch.randint(0, 20, (len(counts),), dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    arguments = (rows, computed, starts, table, blocks, 4, sum(counts))
    expected = [(row, first + i) for row, first, n in zip(rows, computed, counts, strict=True) for i in range(n)]
    for function in (prepare_batch, prepare_batch_reference):
        ids, positions, slots = function(*arguments)
        assert ids.tolist() == [int(table[row, position]) for row, position in expected]
        assert positions.tolist() == [int(position) for _, position in expected]
        assert slots.tolist() == [int(blocks[row, p // 4]) * 4 + int(p % 4) for row, p in expected]
