"""Attention in which each token of a text sees all others, against one text at a time in plain torch."""

from dataclasses import replace

import pytest
import torch

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.attention.table import load_backend, select_backend

SPEC = AttentionSpec(6, 2, 10, 0.3, 16, "float32", causal=False, device_type="cpu")


def step_of(lengths: list[int], padding: int) -> AttentionMetadata:
    """A step of whole texts, and of `padding` tokens that are nobody's."""
    counts = torch.tensor([*lengths, padding])
    total = int(counts.sum())
    return AttentionMetadata(
        rows=torch.arange(len(counts), dtype=torch.int32),
        query_start_loc=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        positions=torch.zeros(total, dtype=torch.int64),
        slot_mappings=(),
        block_tables=(),
        num_reqs=len(counts),
        num_tokens=total,
        max_query_len=int(counts.max()),
        max_seq_len=max(lengths),
    )


@pytest.mark.parametrize("lengths", [[1], [7], [9, 43, 7], [5, 5, 5], [30, 1, 29, 18, 2, 1]])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("padding", [0, 4])
def test_each_text_is_attended_to_alone(lengths: list[int], window: int | None, padding: int) -> None:
    spec = replace(SPEC, sliding_window=window)
    chosen = select_backend([spec])
    assert (chosen.name, chosen.full_graphs) == ("TORCH_WHOLE", "none")
    generator = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths) + padding
    q, k, v = (torch.randn(total, heads, 10, generator=generator) for heads in (6, 2, 2))
    out = load_backend(chosen.name).forward(q, k, v, step_of(lengths, padding), spec)
    first = 0
    for length in lengths:
        query, key, value = (x[first : first + length].transpose(0, 1) for x in (q, k, v))
        scores = query @ key.repeat_interleave(3, 0).transpose(1, 2) * spec.scale
        places = torch.arange(length)
        if window is not None:
            scores = scores.masked_fill((places[:, None] - places).abs() >= window, float("-inf"))
        expected = scores.softmax(-1) @ value.repeat_interleave(3, 0)
        torch.testing.assert_close(out[first : first + length], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)
        first += length
    assert not out[first:].any()
