"""Block hashes say "same tokens from the start, same salt" and nothing less; hits leave the last token to compute."""

from __future__ import annotations

import itertools

from headrace.cache_groups import same_layout
from headrace.request import Request
from headrace.scheduler.kv_cache_manager import KVCacheManager, extend_block_hashes

from .support import make_request


def hashes(prompt: list[int], block_size: int = 2, cache_salt: str | None = None) -> list[bytes]:
    request = Request(make_request("r", prompt, cache_salt=cache_salt))
    extend_block_hashes(request, len(prompt) // block_size, block_size)
    return request.block_hashes


def cached_request(manager: KVCacheManager, prompt: list[int], cache_salt: str | None = None) -> Request:
    """A request that has computed its prompt and gone, leaving its full blocks in the cache."""
    request = Request(make_request("earlier", prompt, cache_salt=cache_salt))
    assert manager.admit(request, manager.nothing_cached(), len(prompt))
    manager.register(request, len(prompt))
    manager.free(request)
    return request


def test_equal_prefixes_have_equal_hashes() -> None:
    a, b = hashes([1, 2, 3, 4, 5, 6]), hashes([1, 2, 3, 4, 9, 9, 9])
    assert len(a) == len(b) == 3
    assert a[:2] == b[:2]
    assert a[2] != b[2]


def test_token_boundaries_and_salts_cannot_be_forged() -> None:
    prompts = [[1, 23], [12, 3], [123, 0], [0, 123], [258, 0], [2, 1]]
    salts = [None, "", "a", "b", "salt:", "unsalted", "\ud800"]
    found = [hashes(prompt, cache_salt=salt)[0] for prompt, salt in itertools.product(prompts, salts)]
    assert len(set(found)) == len(prompts) * len(salts)


def test_admission_counts_cached_blocks_that_nobody_holds_as_both_hit_and_taken() -> None:
    manager = KVCacheManager(same_layout(2), 4, True)
    cached_request(manager, [1, 2, 3, 4, 5])  # leaves 2 cached blocks, 2 free
    request = Request(make_request("r", [1, 2, 3, 4, *range(10, 15)]))  # needs 5 blocks
    cached = manager.find_cached(request)
    assert cached.num_blocks == 2
    assert not manager.admit(request, cached, 5)
    assert manager.pages.pools[0].num_held == 0

    request = Request(make_request("r", [1, 2, 3, 4, *range(10, 14)]))  # needs 4
    assert manager.admit(request, manager.find_cached(request), 5)
    assert request.block_ids[0][:2] == cached.blocks[0]
    assert len(request.block_ids[0]) == 3, "blocks for the first chunk only"
    manager.pages.check_invariant()


def test_what_lies_beyond_a_cut_is_forgotten() -> None:
    manager = KVCacheManager(same_layout(2), 10, True)
    request = cached_request(manager, [1, 2, 3, 4, 5, 6])
    manager.forget_after(request, 3)
    assert [manager.pages.pools[0].find(digest) is not None for digest in request.block_hashes] == [True, False, False]
    manager.pages.check_invariant()
