"""The pool's books: every block is free, held or cached, and content is found by its digest until it is evicted; every
page is free or one group's."""

from __future__ import annotations

import random

import pytest

from headrace.scheduler.block_pool import BlockPool, PagePool


class Blocks:
    """One group whose pages are blocks."""

    def __init__(self, count: int) -> None:
        self.pages = PagePool(count, [1])
        self.pool: BlockPool = self.pages.pools[0]

    def allocate(self, count: int) -> list[int] | None:
        found = self.pages.allocate([count])
        return None if found is None else found[0]

    def take(self, count: int) -> list[int]:
        found = self.allocate(count)
        assert found is not None
        return found

    @property
    def counts(self) -> tuple[int, int, int]:
        self.pages.check_invariant()
        return len(self.pages.free), self.pool.num_held, self.pool.num_cached


def test_released_content_stays_findable_until_evicted() -> None:
    blocks = Blocks(2)
    pool = blocks.pool
    (block,) = blocks.take(1)
    pool.register(block, b"content")
    assert pool.find(b"content") == block
    pool.release([block])
    assert blocks.counts == (1, 0, 1)
    assert pool.find(b"content") == block

    assert blocks.take(1) != [block], "free blocks are taken before cached ones"
    assert blocks.take(1) == [block]
    assert pool.find(b"content") is None
    assert blocks.counts == (0, 2, 0)


def test_the_least_recently_released_is_evicted_first_and_tails_before_heads() -> None:
    blocks = Blocks(4)
    pool = blocks.pool
    older, newer = blocks.take(2), blocks.take(2)
    for name, some in (("older", older), ("newer", newer)):
        for index, block in enumerate(some):
            pool.register(block, f"{name} {index}".encode())
    pool.release(older)
    pool.release(newer)
    pool.hold(older[:1])
    pool.release(older[:1])  # used again: now the most recent
    evicted = [blocks.take(1) for _ in range(4)]
    assert evicted == [[older[1]], [newer[1]], [newer[0]], [older[0]]]


def test_forgetting_content() -> None:
    blocks = Blocks(2)
    pool = blocks.pool
    (block,) = blocks.take(1)
    pool.register(block, b"content")
    pool.forget(b"content")
    assert pool.find(b"content") == block, "somebody holds it"
    pool.release([block])
    pool.forget(b"content")
    assert pool.find(b"content") is None
    assert blocks.counts == (2, 0, 0)
    pool.forget(b"never seen")


def test_the_check_notices_a_leak() -> None:
    blocks = Blocks(2)
    blocks.take(1)
    blocks.pool._ref_counts[0] = 0
    with pytest.raises(RuntimeError, match="pool of 0 pages is inconsistent: 0 free, 0 held, 0 cached"):
        blocks.pages.check_invariant()


# ---- several groups


def test_a_page_serves_one_group_and_then_another() -> None:
    pages = PagePool(2, [3, 2])
    wide, narrow = pages.pools
    assert pages.allocate([4, 0]) == [[0, 1, 2, 3], []]
    assert pages.allocate([0, 1]) is None, "both pages are the first group's"
    wide.release([3])
    assert pages.allocate([2, 2]) is None, "five blocks of the first group leave no page"
    assert pages.allocate([0, 2]) == [[], [2, 3]]
    assert pages.to_clear == [1], "it holds numbers of another type"
    narrow.release([2, 3])
    assert pages.allocate([0, 1]) == [[], [2]]
    assert pages.to_clear == [1], "and these are its own"
    pages.check_invariant()


def test_what_has_been_idle_for_longest_is_given_up_whosever_it_is() -> None:
    pages = PagePool(3, [2, 1])
    wide, narrow = pages.pools
    assert pages.allocate([2, 2]) == [[0, 1], [1, 2]]
    for pool, block, digest in ((narrow, 1, b"first"), (wide, 0, b"second"), (wide, 1, b"third"), (narrow, 2, b"last")):
        pool.register(block, digest)
        pool.release([block])
    assert [wide.find(digest) for digest in (b"second", b"third")] == [0, 1]
    pages.allocate([1, 0])
    assert narrow.find(b"first") is None
    pages.allocate([0, 1])
    assert wide.find(b"second") is wide.find(b"third") is None, "a page goes with all that is cached in it"
    assert narrow.find(b"last") == 2
    pages.check_invariant()


def test_blocks_beside_held_ones_are_evicted_where_pages_end() -> None:
    pages = PagePool(1, [3, 1])
    wide = pages.pools[0]
    pages.allocate([3, 0])
    for block in (1, 2):
        wide.register(block, bytes([block]))
        wide.release([block])
    assert pages.allocate([1, 1]) is None
    assert pages.allocate([1, 0]) == [[1], []], "the least recently released"
    assert (wide.find(b"\1"), wide.find(b"\2")) == (None, 2)
    pages.check_invariant()


def test_what_is_promised_is_given_whatever_came_before() -> None:
    """Random groups that allocate, register, release, hold again and forget: `allocate` gives exactly where the books
    say that there is enough, and the books balance."""
    chance = random.Random(8)
    for _ in range(150):
        pages = PagePool(chance.randint(1, 8), [chance.choice([1, 2, 3, 5]) for _ in range(chance.randint(1, 3))])
        held: list[tuple[BlockPool, int]] = []
        for turn in range(60):
            action = chance.random()
            if action < 0.5:
                counts = [chance.choice([0, 0, 1, 2, 6]) for _ in pages.pools]
                wanted = sum(pool.pages_for(count) for pool, count in zip(pages.pools, counts, strict=True))
                fits = wanted <= pages.num_available
                found = pages.allocate(counts)
                assert (found is not None) == fits
                for pool, blocks, count in zip(pages.pools, found or [], counts, strict=found is not None):
                    assert len({*blocks}) == count
                    held += [(pool, block) for block in blocks]
                    if chance.random() < 0.7:
                        for index, block in enumerate(blocks):
                            pool.register(block, b"%d %d" % (turn, index))
            elif held and action < 0.9:
                chance.shuffle(held)
                pool, block = held.pop()
                pool.release([block])
            else:
                pool = chance.choice(pages.pools)
                digest = chance.choice([*pool._block_with] or [b""])
                found_block = pool.find(digest)
                if chance.random() < 0.5:
                    pool.forget(digest)
                elif found_block is not None:
                    woken, more = pool.pages_beside([found_block], 2)
                    before = pages.num_available
                    pool.hold([found_block])
                    assert (before - pages.num_available, pool.pages_for(2)) == (woken, more)
                    held.append((pool, found_block))
            pages.check_invariant()
