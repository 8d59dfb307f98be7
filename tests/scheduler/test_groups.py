"""Layers that keep unlike things: what windows have passed goes back, states have snapshots, and a prefix hit is what
all of them can continue from."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.cache_groups import CacheGroup, CacheKind, CacheLayout
from headrace.request import Request
from headrace.scheduler.kv_cache_manager import KVCacheManager
from headrace.scheduler.scheduler import Scheduler

from .support import FakeDevice, Script, make_request, make_scheduler

BLOCK = 4


def layout(*kinds: tuple[CacheKind, int | None], per_page: int = 1) -> CacheLayout:
    groups = [CacheGroup((index,), kind, window, BLOCK, 1, per_page, 1) for index, (kind, window) in enumerate(kinds)]
    return CacheLayout(tuple(groups), per_page)


FULL, WINDOW, CHUNK, STATE = ("full", None), ("window", 8), ("chunk", 8), ("state", None)


def cached(manager: KVCacheManager, prompt: list[int], lost: dict[int, list[int]] | None = None) -> list[bytes]:
    """Leaves all full blocks of a prompt in the cache, but of each group those that are `lost`."""
    request = Request(make_request("earlier", prompt))
    assert manager.admit(request, manager.nothing_cached(), len(prompt))
    manager.register(request, len(prompt))
    manager.free(request)
    for group, blocks in (lost or {}).items():
        for block in blocks:
            manager.pages.pools[group].forget(request.block_hashes[block])
    return request.block_hashes


def found(manager: KVCacheManager, prompt: list[int]) -> int:
    """Tokens of the prefix that a request like the earlier one would find."""
    prefix = manager.find_cached(Request(make_request("r", prompt)))
    for (_, group, _), blocks in zip(manager.groups, prefix.blocks, strict=True):
        if not group.is_state:
            assert len(blocks) == prefix.num_blocks - group.first_needed(prefix.num_blocks * BLOCK)
    return prefix.num_blocks * BLOCK


PROMPT = list(range(41))  # 10 full blocks, and a token


@pytest.mark.parametrize(
    ("lost", "tokens"),
    [({}, 40), ({1: [0, 1, 2, 3, 4, 5, 6, 7]}, 40), ({1: [8]}, 32), ({1: [9]}, 36), ({1: [9, 7]}, 28), ({0: [7]}, 28),
     ({0: [7], 1: [6]}, 24), ({0: [5], 1: [0, 1, 2, 3, 4]}, 0), ({1: list(range(1, 10))}, 4)],
)  # fmt: skip
def test_a_hit_is_every_block_of_full_layers_and_the_last_of_windows(lost: dict[int, list[int]], tokens: int) -> None:
    manager = KVCacheManager(layout(FULL, WINDOW), 40, True, step_tokens=64)
    cached(manager, PROMPT, lost)
    assert found(manager, PROMPT) == tokens


@pytest.mark.parametrize(
    ("lost", "length", "tokens"),
    [([], 38, 36), ([8], 38, 32), (list(range(8)), 38, 36), (list(range(10)), 38, 32), (list(range(10)), 41, 40)],
)
def test_a_chunk_needs_only_its_own_keys(lost: list[int], length: int, tokens: int) -> None:
    """A prefix that ends where a chunk of 8 does needs none."""
    manager = KVCacheManager(layout(CHUNK), 40, True, step_tokens=64)
    cached(manager, PROMPT, {0: lost})
    assert found(manager, PROMPT[:length]) == tokens


class Run:
    """A scheduler and the device that knows what every read must find."""

    def __init__(self, cache: CacheLayout, prompts: dict[str, list[int]], max_tokens: int = 1, **changes: Any) -> None:
        self.scheduler: Scheduler = make_scheduler(layout=cache, max_model_len=1000, **changes)
        requests = [
            make_request(name, prompt, max_tokens, seed=seed) for seed, (name, prompt) in enumerate(prompts.items())
        ]
        self.scripts = {one.request_id: Script(one, outcome=0, max_model_len=1000) for one in requests}
        self.device = FakeDevice(cache, list(self.scripts.values()))
        self.hits: dict[str, int] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.scheduler.add_request(self.scripts[name].request)

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        for output in self.scheduler.update(step, self.device.execute(step)):
            self.hits.setdefault(output.request_id, output.num_cached_tokens)
        self.scheduler.kv_cache.pages.check_invariant()

    def to_end(self, *names: str) -> None:
        self.add(*names)
        while self.scheduler.has_work():
            self.step()


@pytest.mark.parametrize("per_page", [1, 3])
def test_a_long_answer_needs_no_more_than_its_window(per_page: int) -> None:
    """200 tokens are 50 blocks, of which a window of 8 and a step of 4 want 4 at most."""
    run = Run(layout(WINDOW), {"a": PROMPT[:4]}, 196, num_pages=4, max_num_batched_tokens=4)
    run.to_end("a")
    run = Run(
        layout(FULL, WINDOW, CHUNK, per_page=per_page), {"a": PROMPT[:4]}, 196, num_pages=65 // per_page,
        max_num_batched_tokens=4,
    )  # fmt: skip
    run.add("a")
    most = 0
    while run.scheduler.has_work():
        run.step()
        most = max([most, *(pool.num_held for pool in run.scheduler.kv_cache.pages.pools[1:])])
    assert most <= 4


def test_a_prompt_in_chunks_gives_back_what_its_windows_have_passed() -> None:
    run = Run(layout(WINDOW), {"a": list(range(400))}, num_pages=8, max_num_batched_tokens=16)
    run.to_end("a")
    assert run.scheduler.stats().num_preemptions == 0


def test_a_state_is_kept_where_the_last_block_of_a_prompt_ends() -> None:
    run = Run(layout(FULL, STATE), {"a": PROMPT, "b": PROMPT, "c": PROMPT[:30]}, num_pages=60)
    for name in "abc":
        run.to_end(name)
    assert run.hits == {"a": 0, "b": 40, "c": 0}, "c's tokens are cached, but no state that has seen only them"


def test_without_a_block_for_it_there_is_no_snapshot() -> None:
    run = Run(layout(FULL, STATE), {"a": PROMPT, "b": PROMPT}, num_pages=12)
    run.to_end("a")
    run.to_end("b")
    assert run.hits == {"a": 0, "b": 0}


def test_a_snapshot_is_not_taken_away_in_the_step_that_reads_it() -> None:
    prompts = {"a": PROMPT[:9], "b": PROMPT[:9], "c": [50, 51, 52], "d": [60, 61, 62]}
    run = Run(layout(STATE, FULL), prompts, num_pages=8, look_ahead=False)  # d's tokens would get the page, cleared
    run.to_end("a")
    run.to_end("b", "c", "d")
    assert run.hits == {"a": 0, "b": 8, "c": 0, "d": 0}


def test_pages_that_a_refused_step_should_have_cleared_are_cleared_by_the_next() -> None:
    run = Run(layout(FULL, WINDOW), {"a": PROMPT, "b": PROMPT, "c": PROMPT}, num_pages=30, enable_prefix_caching=False)
    run.to_end("a")
    run.add("b")
    refused = run.scheduler.schedule()
    assert refused is not None
    assert refused.cleared_pages
    run.scheduler.fail(refused, "refused")
    run.to_end("c")
