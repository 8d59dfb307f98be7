"""Each layer's cache is a view of one arena: what a group's blocks hold of it is nobody else's."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.attention.spec import AttentionSpec
from headrace.cache_groups import cache_layout
from headrace.feed_forwards import DenseMLP
from headrace.mixers import Attention, LatentAttention, Mixer, RecurrentState
from headrace.model_spec import LayerSpec, ModelSpec
from headrace.runner.kv_cache import CacheShape, KVCache, allocate_alone, allocate_kv_cache
from headrace.step import SchedulerOutput, StateCopy

CPU = torch.device("cpu")
FULL, WINDOW = Attention(64, 8, 4, 8), Attention(64, 8, 2, 24, window=7)
LATENT = LatentAttention(64, 8, latent_dim=20, rope_dim=4, nope_dim=8, v_head_dim=8)
STATE, ENCODER = RecurrentState(64, 4, 4, 4, ()), Attention(64, 8, 4, 8, causal=False)
MODELS = {
    "alike": [FULL, FULL, FULL],
    "states alone": [STATE, STATE],
    "unlike": [WINDOW, FULL, ENCODER, LATENT, FULL, STATE, WINDOW, STATE, LATENT],
}


def shape_of(mixers: list[Mixer], dtype: torch.dtype = torch.float32) -> CacheShape:
    def spec(mixer: Mixer) -> AttentionSpec | None:
        if isinstance(mixer, Attention):
            return AttentionSpec(8, mixer.num_kv_heads, mixer.head_dim, 1.0, 4, "float32", mixer.window)
        if isinstance(mixer, LatentAttention):
            return AttentionSpec(8, 1, mixer.cached_values, 1.0, 4, "float32", latent_dim=mixer.latent_dim)
        return None

    model = ModelSpec("Made", 64, 100, 128, tuple(LayerSpec(mixer, DenseMLP(64, 128)) for mixer in mixers))
    return CacheShape(cache_layout(model, 1, dtype.itemsize, 4), tuple(map(spec, mixers)), dtype)


def pages_held(cache: KVCache, layer: int, block: int) -> set[int]:
    """Pages of which some byte changes where the layer's block is written."""
    cache.arena.zero_()
    view = cache.layers[layer]
    assert view is not None
    (view[block] if view.dim() == 2 else view[:, block]).view(torch.uint8).fill_(1)
    return set(cache.arena.any(dim=1).nonzero().flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_no_two_layers_share_a_byte_and_blocks_lie_in_the_pages_lent_for_them(name: str, dtype: torch.dtype) -> None:
    shape = shape_of(MODELS[name], dtype)
    cache = allocate_kv_cache(shape, 3, CPU)
    total = 0
    for number, group in enumerate(shape.layout.groups):
        cache.arena.zero_()
        for layer in group.layers:
            view = cache.layers[layer]
            assert view is not None
            alone = allocate_alone(shape, layer, 4 * group.blocks_per_page, CPU)
            assert alone is not None
            assert (view.shape, view.dtype) == (alone.shape, alone.dtype)
            written = view.view(torch.uint8)
            assert not written.any(), "another layer's"
            written.fill_(1)
            total += written.numel()
        held = 4 * group.blocks_per_page * group.block_bytes
        assert int(cache.arena.sum()) == held
        if len(shape.layout.groups) > 1 or group.is_state:
            page = random.randrange(4)
            for block in shape.layout.blocks(number, page):
                assert all(pages_held(cache, layer, block) == {page} for layer in group.layers)
    caching = [layer for layer, mixer in enumerate(MODELS[name]) if mixer is not ENCODER]
    assert [layer for layer, view in enumerate(cache.layers) if view is not None] == caching
    assert [cache.scratch_blocks[g] // group.blocks_per_page for g, group in enumerate(shape.layout.groups)] == [
        3 for _ in shape.layout.groups
    ]


def test_layers_that_are_alike_have_their_caches_in_one_piece_each() -> None:
    cache = allocate_kv_cache(shape_of(MODELS["alike"]), 5, CPU)
    assert all(view is not None and view.is_contiguous() for view in cache.layers)


def test_a_page_that_changes_hands_is_cleared_and_states_are_copied_after() -> None:
    cache = allocate_kv_cache(shape_of(MODELS["unlike"]), 4, CPU)
    layout = cache.shape.layout
    number = next(number for number, group in enumerate(layout.groups) if group.is_state)
    cache.arena.fill_(1)
    source, target = layout.blocks(number, 0)[0], layout.blocks(number, 2)[-1]
    states = [cache.layers[layer] for layer in layout.groups[number].layers]
    for place, state in enumerate(states):
        assert state is not None
        state[source] = torch.randn(state.shape[1]) + place
    step = SchedulerOutput(
        0, [], [], [], [], [], [], [], cleared_pages=[2, 1], state_copies=[StateCopy(number, source, target)]
    )
    cache.prepare(step)
    for state in states:
        assert state is not None
        assert torch.equal(state[source], state[target])
    assert not cache.arena[1].any()
    assert cache.arena[3:].eq(1).all()
    cleared = layout.blocks(number, 2)[0]
    assert cleared == target or all(not state[cleared].any() for state in states if state is not None)
