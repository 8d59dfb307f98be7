"""How many tokens of long sequences a cache holds, once windows give back what they have passed: by the layout, by
arithmetic on the layers alone, and by filling it. Run with `-s` to see the figures."""

from __future__ import annotations

import pytest

from headrace.cache_groups import cache_layout
from headrace.mixers import Attention
from headrace.planner.catalogue import catalogue
from headrace.planner.shapes import shape_of
from headrace.request import Request
from headrace.scheduler.kv_cache_manager import KVCacheManager
from tests.scheduler.support import make_request

BLOCK, STEP = 16, 2048
"""tokens of a block, and of a prompt in a step"""


@pytest.mark.parametrize(
    ("name", "gib", "gain"), [("mistral-7b", 40, 8.0), ("gpt-oss-20b", 40, 2.0), ("gemma-3-27b", 160, 5.3)]
)
def test_long_sequences_take_what_their_layers_see(name: str, gib: int, gain: float) -> None:
    pool, length = gib << 30, 32768
    config = dict(catalogue()[name].config)
    if name == "mistral-7b":
        config["sliding_window"] = 4096  # as its first version had
    spec = shape_of(config, name).spec
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Attention)]
    sequence = sum(min(length, mixer.window or length) * mixer.cached_values * 2 for mixer in mixers)
    everything = sum(length * mixer.cached_values * 2 for mixer in mixers)
    arithmetic = pool / sequence * length

    layout = cache_layout(spec, 1, 2, BLOCK)
    num_pages = pool // layout.page_bytes
    planned = layout.tokens_in(num_pages, length)

    manager = KVCacheManager(layout, num_pages, enable_prefix_caching=False, step_tokens=STEP)
    held = 0
    while True:
        request = Request(make_request(str(held), length))
        if not manager.admit(request, manager.nothing_cached(), STEP):
            break
        for computed in range(STEP, length + 1, STEP):
            request.num_computed_tokens = computed
            assert manager.grow(request, min(computed + STEP, length + 1)) is not None
        held += 1
    manager.pages.check_invariant()

    print(
        f"\n{name}, sequences of {length:,} tokens: {planned:,} planned, {held * length:,} held, {arithmetic:,.0f} by "
        f"arithmetic, {pool / everything * length:,.0f} if every layer kept everything"
    )
    assert planned == pytest.approx(arithmetic, rel=0.03)
    assert held * length == pytest.approx(arithmetic, rel=0.03)
    assert held * everything / pool == pytest.approx(gain, rel=0.05)
