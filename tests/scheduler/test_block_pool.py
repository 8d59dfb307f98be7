"""The pool's books: every block is free, held or cached, and content is found by its digest until it is evicted."""

from __future__ import annotations

import pytest

from headrace.scheduler.block_pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_invariant()
    return pool.num_free, pool.num_held, pool.num_cached


def test_blocks_go_out_and_come_back() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    assert counts(pool) == (2, 3, 0)
    pool.release(blocks)
    assert counts(pool) == (5, 0, 0)


def test_asking_for_too_many_changes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) is not None
    assert pool.allocate(2) is None
    assert counts(pool) == (1, 2, 0)
    assert pool.allocate(0) == []


def test_released_content_stays_findable_until_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"content")
    assert pool.find(b"content") == block
    pool.release([block])
    assert counts(pool) == (1, 0, 1)
    assert pool.find(b"content") == block

    assert pool.allocate(1) != [block], "free blocks are taken before cached ones"
    assert pool.allocate(1) == [block]
    assert pool.find(b"content") is None
    assert counts(pool) == (0, 2, 0)


def test_a_cached_block_can_be_held_again_and_by_several() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"content")
    pool.release([block])
    pool.hold([block])
    pool.hold([block])
    assert pool.ref_count(block) == 2
    assert counts(pool) == (0, 1, 0)
    pool.release([block])
    assert counts(pool) == (0, 1, 0), "its other holder still has it"
    assert pool.allocate(1) is None
    pool.release([block])
    assert counts(pool) == (0, 0, 1)


def test_the_least_recently_released_is_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    older, newer = pool.allocate(2), pool.allocate(2)
    for name, blocks in (("older", older), ("newer", newer)):
        for index, block in enumerate(blocks):
            pool.register(block, f"{name} {index}".encode())
    pool.release(older)
    pool.release(newer)
    pool.hold(older[:1])
    pool.release(older[:1])  # used again: now the most recent
    evicted = [pool.allocate(1) for _ in range(4)]
    assert evicted == [[older[1]], [newer[1]], [newer[0]], [older[0]]]


def test_equal_content_is_registered_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    pool.release([first, second])
    assert counts(pool) == (1, 0, 1)


def test_forgetting_content() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"content")
    pool.forget(b"content")
    assert pool.find(b"content") == block, "somebody holds it"
    pool.release([block])
    pool.forget(b"content")
    assert pool.find(b"content") is None
    assert counts(pool) == (2, 0, 0)
    pool.forget(b"never seen")


def test_the_check_notices_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool._ref_counts[0] = 0
    with pytest.raises(RuntimeError, match="pool of 2 is inconsistent: 1 free, 0 held, 0 cached"):
        pool.check_invariant()
