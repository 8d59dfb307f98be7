"""Which KV blocks a request owns in each group of layers, and which of them hold a prefix that another can share.

A full block is known by a SHA-256 digest chained over everything before it, so equal digests mean equal tokens from
the start of the sequence, under the same salt; the snapshot of a state is known by the digest of the last block before
it. Blocks that no later query reads go back while the request runs, and can be found until they are evicted. Knows
nothing of budgets, rows or steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from headrace.cache_groups import CacheGroup, CacheLayout
from headrace.request import Request, Snapshot
from headrace.scheduler.block_pool import BlockPool, PagePool
from headrace.step import StateCopy


def root_digest(cache_salt: str | None) -> bytes:
    """What the first block is chained to: one value per salt, and one for no salt."""
    if cache_salt is None:
        return sha256(b"unsalted").digest()
    return sha256(b"salt:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def extend_block_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Bring `request.block_hashes` to `num_blocks` digests; their tokens must be known to the host."""
    hashes = request.block_hashes
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_digest(request.core_request.cache_salt)
    packed = array("q", request.token_ids[start * block_size : num_blocks * block_size]).tobytes()
    stride = block_size * 8
    for offset in range(0, len(packed), stride):
        parent = sha256(parent + packed[offset : offset + stride]).digest()
        hashes.append(parent)


class Prefix(NamedTuple):
    """What the cache holds of a request's beginning."""

    num_blocks: int
    """its length"""
    blocks: list[list[int]]
    """of each group those that what follows reads, the last ones of these; of a state its snapshot"""


class KVCacheManager:
    def __init__(self, layout: CacheLayout, num_pages: int, enable_prefix_caching: bool, step_tokens: int = 1) -> None:
        """`step_tokens`: of one request in one step, at most."""
        self.layout = layout
        self.pages = PagePool(num_pages, [group.blocks_per_page for group in layout.groups])
        self.block_size = layout.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.step_tokens = step_tokens
        self.groups: list[tuple[int, CacheGroup, BlockPool]] = [
            (index, *pair) for index, pair in enumerate(zip(layout.groups, self.pages.pools, strict=True))
        ]
        self.states = [index for index, group, _ in self.groups if group.is_state]
        self._keeping_tokens = [(index, pool) for index, group, pool in self.groups if not group.is_state]
        self._bounded = [(index, group, pool) for index, group, pool in self.groups if group.window is not None]
        self._copies: list[StateCopy] = []
        self._read: list[tuple[BlockPool, list[int]]] = []
        """snapshots that the step under construction copies from"""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_available_pages(self) -> int:
        """Pages' worth of blocks that nobody holds."""
        return self.available_bytes // self.layout.page_bytes

    @property
    def available_bytes(self) -> int:
        loose = sum(pool.num_loose * group.block_stride for _, group, pool in self.groups)
        return self.pages.num_available * self.layout.page_bytes + loose

    def bytes_of(self, counts: Sequence[int]) -> int:
        """of so many blocks of each group"""
        return sum(count * group.block_stride for count, group in zip(counts, self.layout.groups, strict=True))

    def find_cached(self, request: Request) -> Prefix:
        """The longest prefix of the request's known tokens that every group still has what is needed of, the last token
        excepted: that one must be computed, as its logits are what is wanted. Holds nothing yet."""
        if not self.enable_prefix_caching or request.core_request.params.prompt_logprobs is not None:
            return self.nothing_cached()
        length = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request, length, self.block_size)
        hashes = request.block_hashes
        found: dict[int, list[int]] = {}
        for index, group, pool in self.groups:
            if group.window is None and not group.is_state:
                found[index] = _leading(pool, hashes, length)
                length = len(found[index])
        before = -1
        while length != before:  # what one group lacks may move the others to lengths of which they lack something
            before = length
            for _, group, pool in self._bounded:
                length = self._bounded_length(group, pool, hashes, length)
            for state in self.states:
                length = _snapshot_length(self.pages.pools[state], hashes, length)
        blocks = []
        for index, group, pool in self.groups:
            if index in found:
                blocks.append(found[index][:length])
            else:
                first = length - 1 if group.is_state else group.first_needed(length * self.block_size)
                last = (pool.find(digest) for digest in hashes[max(0, first) : length])
                blocks.append([block for block in last if block is not None])
        return Prefix(length, blocks)

    def nothing_cached(self) -> Prefix:
        return Prefix(0, [[] for _ in self.groups])

    def _bounded_length(self, group: CacheGroup, pool: BlockPool, hashes: list[bytes], length: int) -> int:
        """The longest prefix up to `length` blocks whose last keys, as far as the next query sees them, are there."""
        index = length
        while index > group.first_needed(length * self.block_size):
            index -= 1
            if pool.find(hashes[index]) is None:  # every longer prefix reads this one, or one further to the right
                length = index
        return length

    def missing(self, request: Request, prefix: Prefix) -> list[int]:
        """Blocks of each group that a request without any would take at most until all it knows is computed."""
        counts = []
        for (_, group, _), cached in zip(self.groups, prefix.blocks, strict=True):
            most = group.most_blocks(request.num_tokens, self.step_tokens)
            if not group.is_state:
                behind = prefix.num_blocks - len(cached)
                most = min(most, self.num_blocks_for(request.num_tokens) - behind) - len(cached)
            counts.append(max(0, most))
        return counts

    def admit(self, request: Request, prefix: Prefix, num_tokens: int) -> bool:
        """Give a request without blocks those of `prefix` and fresh ones up to `num_tokens` tokens. False, and nothing
        changes, unless all its known tokens would fit: one admitted for its first chunk alone would soon be preempted,
        and its work lost."""
        pages = self.pages.num_available
        for (_, _, pool), cached, count in zip(self.groups, prefix.blocks, self.missing(request, prefix), strict=True):
            pages -= sum(pool.pages_beside(cached, count))
        if pages < 0:
            return False
        request.num_blocks = request.num_registered_blocks = prefix.num_blocks
        request.block_ids, request.first_blocks = [], []
        for (_, group, pool), cached in zip(self.groups, prefix.blocks, strict=True):
            pool.hold(cached)
            first = 0 if group.is_state else prefix.num_blocks - len(cached)
            request.first_blocks.append(first)
            request.block_ids.append([0] * first + ([] if group.is_state else cached))
        self._grow(request, num_tokens)
        for index in self.states:
            if snapshot := prefix.blocks[index]:
                self._copies.append(StateCopy(index, snapshot[0], request.block_ids[index][0]))
                self._read.append((self.pages.pools[index], snapshot))
        return True

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Fresh blocks of each group, if any, appended to the request's own, so that `num_tokens` tokens fit; None if
        there are not as many. What has fallen behind a window goes back first: as far as it can be found again, unless
        blocks are short."""
        if self._bounded:
            self._let_go_behind(request, request.num_registered_blocks)
        fresh = self._grow(request, num_tokens)
        if fresh is None and (self._bounded or request.snapshots):
            self._let_go_behind(request, request.num_blocks)
            self._drop_snapshots(request)
            fresh = self._grow(request, num_tokens)
        return fresh

    def _grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        count = -(-num_tokens // self.block_size) - request.num_blocks
        if count <= 0:
            return []
        counts = [count] * len(self.groups)
        for state in self.states:
            counts[state] = 1 - len(request.block_ids[state])
        fresh = self.pages.allocate(counts)
        if fresh is not None:
            for index, blocks in enumerate(fresh):
                request.block_ids[index] += blocks
            request.num_blocks += count
        return fresh

    def _let_go_behind(self, request: Request, known: int) -> None:
        """Let go of blocks that no query to come reads, among the first `known`, or all where nothing is cached. Until
        its result is there a step may turn out to have computed less than it counts as, but never less than all that
        the host knows but its last token."""
        start = min(request.num_computed_tokens, request.num_tokens - 1)
        for index, group, pool in self._bounded:
            first = group.first_needed(start)
            if self.enable_prefix_caching:
                first = min(first, known)
            behind = request.block_ids[index][request.first_blocks[index] : first]
            if behind:
                pool.release(behind)
                request.first_blocks[index] = first

    def register(self, request: Request, num_tokens: int) -> None:
        """Offer the request's full blocks among its first `num_tokens` tokens to others, and snapshots from before.
        Those tokens must be known to the host, and the step that computed them must have come back."""
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        extend_block_hashes(request, num_full, self.block_size)
        hashes = request.block_hashes
        for index, pool in self._keeping_tokens:
            block_ids = request.block_ids[index]
            for place in range(max(request.num_registered_blocks, request.first_blocks[index]), num_full):
                pool.register(block_ids[place], hashes[place])
        request.num_registered_blocks = num_full
        if request.snapshots:
            self._register_snapshots(request, num_tokens)

    def _register_snapshots(self, request: Request, num_tokens: int) -> None:
        for snapshot in [one for one in request.snapshots if one.num_tokens < num_tokens]:
            request.snapshots.remove(snapshot)
            pool = self.pages.pools[snapshot.group]
            pool.register(snapshot.block, request.block_hashes[snapshot.num_tokens // self.block_size - 1])
            pool.release([snapshot.block])

    def free(self, request: Request) -> None:
        """Let go of all blocks; registered ones stay in the cache until they are evicted."""
        if not request.block_ids:
            return
        for pool, block_ids, first in zip(self.pages.pools, request.block_ids, request.first_blocks, strict=True):
            pool.release(block_ids[first:])
        self._drop_snapshots(request)
        request.block_ids, request.first_blocks = [], []
        request.num_blocks = request.num_registered_blocks = 0

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """Take full blocks with tokens beyond the first `num_tokens` out of the cache, unless a live request shares
        them. The request itself has let go of its blocks already."""
        for digest in request.block_hashes[num_tokens // self.block_size :]:
            for pool in self.pages.pools:
                pool.forget(digest)

    # ---- states

    def cut(self, request: Request, start: int, count: int) -> int:
        """Of `count` tokens of a request from position `start` on as many as end where a snapshot of its state can be
        taken, if any do: where a block ends, and before the last known token."""
        if not self.states or not self.enable_prefix_caching:
            return count
        last = min(start + count, request.num_tokens - 1) // self.block_size * self.block_size
        return last - start if last > start else count

    def take_snapshots(self, requests: Sequence[Request]) -> None:
        """Before a step of them: of the states of those whose prompts are computed up to the end of a block. Where no
        block is to be had for one, there is none."""
        if not self.enable_prefix_caching:
            return
        for request in requests:
            computed = request.num_computed_tokens
            if not 0 < computed < request.num_prompt_tokens or computed % self.block_size:
                continue
            extend_block_hashes(request, computed // self.block_size, self.block_size)
            digest = request.block_hashes[computed // self.block_size - 1]
            for index in self.states:
                if self.pages.pools[index].find(digest) is not None:
                    continue
                fresh = self.pages.allocate([int(index == other) for other, _, _ in self.groups])
                if fresh is not None:
                    (block,) = fresh[index]
                    self._copies.append(StateCopy(index, request.block_ids[index][0], block))
                    request.snapshots.append(Snapshot(computed, index, block))

    def _drop_snapshots(self, request: Request) -> None:
        """Those that steps under way make: nobody will find them."""
        for snapshot in request.snapshots:
            self.pages.pools[snapshot.group].release([snapshot.block])
        request.snapshots.clear()

    def take_orders(self) -> tuple[list[int], list[StateCopy]]:
        """Pages to clear and states to copy in the step that has now been made."""
        for pool, blocks in self._read:
            pool.release(blocks)
        orders = self.pages.cleared, self._copies
        self.pages.cleared, self._copies, self._read = [], [], []
        return orders


def _leading(pool: BlockPool, hashes: list[bytes], most: int) -> list[int]:
    """The blocks that hold the first digests, up to the first that none holds."""
    found: list[int] = []
    for digest in hashes[:most]:
        block = pool.find(digest)
        if block is None:
            break
        found.append(block)
    return found


def _snapshot_length(pool: BlockPool, hashes: list[bytes], most: int) -> int:
    """The longest prefix up to `most` blocks behind which there is a snapshot."""
    return next((length for length in range(most, 0, -1) if pool.find(hashes[length - 1]) is not None), 0)
