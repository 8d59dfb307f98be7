"""Layers that keep alike form a group; unlike groups share pages, with little left over, and addresses stay linear."""

from __future__ import annotations

import random

import pytest

from headrace.cache_groups import ALIGNMENT, MOST_PAGE_BYTES, MOST_WASTE, CacheGroup, cache_layout, same_layout
from headrace.feed_forwards import DenseMLP
from headrace.mixers import Attention, LatentAttention, Mixer, RecurrentState
from headrace.model_spec import LayerSpec, ModelSpec

FULL = Attention(64, 8, 4, 64)
WINDOW = Attention(64, 8, 2, 96, window=32)
CHUNK = Attention(64, 8, 4, 64, window=32, chunked=True)
LATENT = LatentAttention(64, 8, latent_dim=80, rope_dim=16, nope_dim=32, v_head_dim=32)
STATE = RecurrentState(64, 4, 16, 16, ())
ENCODER = Attention(64, 8, 4, 64, causal=False)


def model(*mixers: Mixer) -> ModelSpec:
    return ModelSpec("Made", 64, 100, 128, tuple(LayerSpec(mixer, DenseMLP(64, 128)) for mixer in mixers))


def test_a_model_whose_layers_are_alike_has_one_group_and_pages_of_one_block() -> None:
    layout = cache_layout(model(FULL, FULL, FULL), ranks=1, itemsize=2, block_size=16)
    (group,) = layout.groups
    assert (group.layers, group.kind, group.blocks_per_page) == ((0, 1, 2), "full", 1)
    assert layout.page_bytes == group.block_stride == group.block_bytes == 3 * 16 * 2 * 4 * 64 * 2


def test_groups_are_kinds_windows_and_sizes_in_the_order_of_their_first_layers() -> None:
    layout = cache_layout(model(WINDOW, FULL, ENCODER, CHUNK, FULL, LATENT, STATE, WINDOW, STATE), 1, 4, 16)
    assert [(group.kind, group.layers) for group in layout.groups] == [
        ("window", (0, 7)), ("full", (1, 4)), ("chunk", (3,)), ("latent", (5,)), ("state", (6, 8)),
    ]  # fmt: skip
    window, full, chunk, latent, state = (group.block_bytes for group in layout.groups)
    assert window == 2 * 16 * (2 * 2 * 96) * 4
    assert full == 2 * chunk == 2 * 16 * (2 * 4 * 64) * 4
    assert latent == 16 * (80 + 16) * 4
    assert state == 2 * (4 * 16 * 16) * 4, "of one sequence, whatever its length"


def test_a_model_without_a_cache_has_one_group_of_no_layers_and_next_to_no_bytes() -> None:
    layout = cache_layout(model(ENCODER), 1, 2, 16)
    assert [(group.layers, group.block_size) for group in layout.groups] == [((), 16)]
    assert (layout.page_bytes, layout.bytes_per_token, layout.group_of) == (1, 0, {})


def test_ranks_hold_their_heads_and_a_latent_whole() -> None:
    one, four, many = (cache_layout(model(FULL, LATENT), ranks, 2, 16).groups for ranks in (1, 4, 8))
    assert one[0].block_bytes == 4 * four[0].block_bytes == 4 * many[0].block_bytes
    assert one[1].block_bytes == four[1].block_bytes


def test_pages_lend_whole_blocks_at_linear_addresses() -> None:
    chance = random.Random(4)
    for _ in range(200):
        mixers = [
            Attention(64, 8, chance.choice([1, 2, 4, 8]), chance.choice([48, 64, 80, 128]), window=window)
            for window in (None, 16, 128)
            for _ in range(chance.randint(1, 60))
        ]
        layout = cache_layout(model(*mixers), 1, chance.choice([1, 2]), chance.choice([16, 32]))
        page_bytes = layout.page_bytes
        assert page_bytes <= 1.05 * MOST_PAGE_BYTES
        for number, group in enumerate(layout.groups):
            assert group.block_stride * group.blocks_per_page == page_bytes
            assert group.block_stride % ALIGNMENT == 0 or len(layout.groups) == 1
            token_bytes = group.block_bytes // group.block_size // len(group.layers)
            assert group.block_stride % token_bytes == 0
            assert group.block_bytes <= group.block_stride
            for page in (0, 1, 7):
                first, *_ = blocks = layout.blocks(number, page)
                assert first * group.block_stride == page * page_bytes
                assert blocks[-1] * group.block_stride + group.block_bytes <= (page + 1) * page_bytes


@pytest.mark.parametrize("counts", [(10, 52), (12, 12), (8, 40), (1, 3)])
def test_little_of_a_page_is_left_over(counts: tuple[int, int]) -> None:
    full, windows = counts
    sliding = Attention(64, 8, 4, 64, window=32)
    layout = cache_layout(model(*[FULL] * full, *[sliding] * windows), 1, 2, 16)
    for group in layout.groups:
        assert group.block_bytes >= (1 - MOST_WASTE) * group.block_stride
    if full == windows:
        assert [group.blocks_per_page for group in layout.groups] == [1, 1]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_bounded_group_needs_what_its_queries_see(kind: str, block_size: int) -> None:
    """Against each key of each query, and the blocks that sequences of any length and step hold."""
    for window in (1, 2, 5, 16, 17):
        group = CacheGroup((0,), "chunk" if kind == "chunk" else "window", window, block_size, 1)
        for start in range(60):
            first_key = start // window * window if kind == "chunk" else max(0, start - window + 1)
            assert group.first_needed(start) == first_key // block_size
            for count in (1, 7, 20):
                held = -(-(start + count) // block_size) - group.first_needed(start)
                assert held <= group.most_blocks(start + count, step_tokens=count)
        most = max(-(-(start + 7) // block_size) - group.first_needed(start) for start in range(1000))
        assert group.most_blocks(1007, step_tokens=7) <= most + (kind == "chunk") * -(-7 // block_size) + 1


def test_pages_for_many_sequences() -> None:
    layout = same_layout(16)
    assert layout.pages_for(33) == 3
    assert layout.pages_for(33, sequences=5) == 15
    mixed = cache_layout(model(FULL, Attention(64, 8, 4, 64, window=32), STATE), 1, 2, 16)
    full, window, state = mixed.groups
    assert window.most_blocks(1000) == 3 < full.most_blocks(1000) == 63
    assert state.most_blocks(1000) == 1
    whole = [-(-10 * most // group.blocks_per_page) for most, group in zip((63, 3, 1), mixed.groups, strict=True)]
    assert mixed.pages_for(1000, sequences=10) == sum(whole)
