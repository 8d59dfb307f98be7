"""Gives requests KV blocks in each group of layers, and finds cached blocks that hold the beginning of a prompt.

A full block is known by a SHA-256 hash chained over everything before it, so equal hashes mean equal tokens from the
start of the sequence, under the same salt and adapter. A snapshot of a recurrent state is known by the hash of the last
block before it. Blocks that no later query reads go back to the pool while their request runs, and stay in the prefix
cache until they are evicted. Knows nothing of budgets, rows or steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from operator import mul
from typing import NamedTuple

from headrace.cache_groups import CacheGroup, CacheLayout
from headrace.request import Request, Snapshot
from headrace.scheduler.block_pool import BlockPool, PagePool
from headrace.step import StateCopy


def root_hash(cache_salt: str | None, adapter: int = 0) -> bytes:
    """Return what the first block's hash is chained to: one value for each salt, and one for none; each adapter, whose
    keys and values are its own, has others."""
    salt = b"unsalted" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    root = sha256(salt).digest()
    return root if not adapter else sha256(root + b"adapter:%d" % adapter).digest()


def extend_block_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Extend `request.block_hashes` to `num_blocks` hashes. The tokens of these blocks must be on the host."""
    hashes = request.block_hashes
    start = len(hashes)
    if start >= num_blocks:
        return
    parent = hashes[-1] if hashes else root_hash(request.core_request.cache_salt, request.core_request.adapter)
    packed = array("q", request.token_ids[start * block_size : num_blocks * block_size]).tobytes()
    stride = block_size * 8
    for offset in range(0, len(packed), stride):
        parent = sha256(parent + packed[offset : offset + stride]).digest()
        hashes.append(parent)


class Prefix(NamedTuple):
    """Holds the cached beginning of a request."""

    num_blocks: int
    """Its length in blocks."""
    blocks: list[list[int]]
    """For each layer group, the last of these blocks: those that later queries read. For a state, its snapshot."""


class KVCacheManager:
    """Owns the blocks of all requests, in all layer groups."""

    def __init__(
        self, layout: CacheLayout, num_pages: int, enable_prefix_caching: bool, step_tokens: int = 1,
        places: Callable[[int], int] = int,
    ) -> None:  # fmt: skip
        """`step_tokens`: most tokens that one step computes of one request. `places`: tells how many places a request
        needs that has computed so many tokens, itself at least."""
        self.places = places
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
        self.bounded = [(index, group, pool) for index, group, pool in self.groups if group.window is not None]
        self._strides = [group.block_stride for group in layout.groups]
        self._copies: list[StateCopy] = []
        self._read: list[tuple[BlockPool, list[int]]] = []
        """Snapshots that the step under construction copies from, held until it is made."""

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_available_pages(self) -> int:
        """Number of pages that the blocks which no request holds would fill."""
        return self.available_bytes // self.layout.page_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes of all blocks that no request holds, cached ones included."""
        spare = sum(pool.num_spare * group.block_stride for _, group, pool in self.groups)
        return self.pages.num_available * self.layout.page_bytes + spare

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(map(mul, counts, self._strides))

    def find_cached(self, request: Request) -> Prefix:
        """Return the longest cached prefix of a request: the longest for which every group has the blocks it needs. The
        last token is never part of it, because its logits have to be computed. No block is held yet."""
        if not self.enable_prefix_caching or request.core_request.needs_all_tokens:
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
        while length != before:  # a shorter length may need other blocks of another group
            before = length
            for _, group, pool in self.bounded:
                length = self._bounded_length(group, pool, hashes, length)
            for state in self.states:
                length = _snapshot_length(self.pages.pools[state], hashes, length)
        blocks = []
        for index, group, pool in self.groups:
            if index in found:
                blocks.append(found[index][:length])
            else:
                first = length - 1 if group.is_state else group.first_needed(length * self.block_size)
                last = (pool.find(block_hash) for block_hash in hashes[max(0, first) : length])
                blocks.append([block for block in last if block is not None])
        return Prefix(length, blocks)

    def nothing_cached(self) -> Prefix:
        return Prefix(0, [[] for _ in self.groups])

    def _bounded_length(self, group: CacheGroup, pool: BlockPool, hashes: list[bytes], length: int) -> int:
        """Return the longest prefix, up to `length` blocks, of which the window of the next query is cached."""
        index = length
        while index > group.first_needed(length * self.block_size):
            index -= 1
            if pool.find(hashes[index]) is None:  # every longer prefix needs this block or a later one
                length = index
        return length

    def missing(self, request: Request, prefix: Prefix) -> list[int]:
        """Return how many blocks of each group a request still needs, at most, until its known tokens are computed."""
        counts, places = [], self.places(request.num_tokens)
        for (_, group, _), cached in zip(self.groups, prefix.blocks, strict=True):
            most = group.most_blocks(places, self.step_tokens)
            if not group.is_state:
                behind = prefix.num_blocks - len(cached)
                most = min(most, self.num_blocks_for(places) - behind) - len(cached)
            counts.append(max(0, most))
        return counts

    def admit(self, request: Request, prefix: Prefix, num_tokens: int) -> bool:
        """Give a request without blocks those of `prefix`, and fresh ones for `num_tokens` tokens. Returns False, and
        changes nothing, unless all its known tokens would fit. If only its first chunk did, it would soon be preempted,
        and that work lost."""
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
        self._grow(request, self.places(num_tokens))
        for index in self.states:
            if snapshot := prefix.blocks[index]:
                self._copies.append(StateCopy(index, snapshot[0], request.block_ids[index][0]))
                self._read.append((self.pages.pools[index], snapshot))
        return True

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Give a request the blocks that it lacks for `num_tokens` tokens; return the fresh ones of each group. Returns
        None if there are too few. Blocks behind a window are released first: those that are in the prefix cache by now,
        and if blocks are short all others too."""
        if self.bounded:
            self._release_behind_window(request, request.num_registered_blocks)
        fresh = self._grow(request, self.places(num_tokens))
        if fresh is None and (self.bounded or request.snapshots):
            self._release_behind_window(request, request.num_blocks)
            self._drop_snapshots(request)
            fresh = self._grow(request, self.places(num_tokens))
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

    def _release_behind_window(self, request: Request, known: int) -> None:
        """Release blocks that no later query reads: of the first `known` blocks, or all without a prefix cache. A step
        with drafts may turn out to have computed fewer tokens than it counts as, but never fewer than all that the host
        knows except the last one."""
        start = min(request.num_computed_tokens, request.num_tokens - 1)
        for index, group, pool in self.bounded:
            first = group.first_needed(start)
            if self.enable_prefix_caching:
                first = min(first, known)
            behind = request.block_ids[index][request.first_blocks[index] : first]
            if behind:
                pool.release(behind)
                request.first_blocks[index] = first

    def register(self, request: Request, num_tokens: int) -> None:
        """Put the full blocks of a request's first `num_tokens` tokens into the prefix cache, and snapshots before
        them. The tokens must be on the host, and the result of the step that computed them must be back."""
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
        """Release all blocks of a request. Those in the prefix cache stay there until they are evicted."""
        if not request.block_ids:
            return
        for pool, block_ids, first in zip(self.pages.pools, request.block_ids, request.first_blocks, strict=True):
            pool.release(block_ids[first:])
        self._drop_snapshots(request)
        request.block_ids, request.first_blocks = [], []
        request.num_blocks = request.num_registered_blocks = 0

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """Remove full blocks with tokens after the first `num_tokens` from the prefix cache, unless a request holds
        them. The request itself must have released its blocks already."""
        for block_hash in request.block_hashes[num_tokens // self.block_size :]:
            for pool in self.pages.pools:
                pool.forget(block_hash)

    # ---- recurrent states

    def align_chunk(self, request: Request, start: int, count: int) -> int:
        """Return how many of `count` tokens from position `start` on to compute so that a snapshot can be taken after.
        A snapshot is taken at the end of a block, before the last known token. Where none lies in reach, or no layer
        keeps a state, that is `count`."""
        if not self.states or not self.enable_prefix_caching:
            return count
        last = min(start + count, request.num_tokens - 1) // self.block_size * self.block_size
        return last - start if last > start else count

    def take_snapshots(self, requests: Sequence[Request]) -> None:
        """Copy the states of requests whose prompts are computed up to the end of a block, before their next step. A
        request for whose snapshot there is no free block goes without."""
        if not self.enable_prefix_caching:
            return
        for request in requests:
            computed = request.num_computed_tokens
            if not 0 < computed < request.num_prompt_tokens or computed % self.block_size:
                continue
            extend_block_hashes(request, computed // self.block_size, self.block_size)
            block_hash = request.block_hashes[computed // self.block_size - 1]
            for index in self.states:
                if self.pages.pools[index].find(block_hash) is not None:
                    continue
                fresh = self.pages.allocate([int(index == other) for other, _, _ in self.groups])
                if fresh is not None:
                    (block,) = fresh[index]
                    self._copies.append(StateCopy(index, request.block_ids[index][0], block))
                    request.snapshots.append(Snapshot(computed, index, block))

    def _drop_snapshots(self, request: Request) -> None:
        """Release the snapshots that steps under way make; they do not reach the prefix cache."""
        for snapshot in request.snapshots:
            self.pages.pools[snapshot.group].release([snapshot.block])
        request.snapshots.clear()

    def take_clears_and_copies(self) -> tuple[list[int], list[StateCopy]]:
        """Return the pages to clear and the states to copy in the step that is being made, and forget them."""
        for pool, blocks in self._read:
            pool.release(blocks)
        clears_and_copies = self.pages.to_clear, self._copies
        self.pages.to_clear, self._copies, self._read = [], [], []
        return clears_and_copies


def _leading(pool: BlockPool, hashes: list[bytes], most: int) -> list[int]:
    """Return the cached blocks of the first `most` hashes, up to the first hash without one."""
    found: list[int] = []
    for block_hash in hashes[:most]:
        block = pool.find(block_hash)
        if block is None:
            break
        found.append(block)
    return found


def _snapshot_length(pool: BlockPool, hashes: list[bytes], most: int) -> int:
    """Return the longest prefix, up to `most` blocks, at whose end there is a snapshot; 0 if there is none."""
    return next((length for length in range(most, 0, -1) if pool.find(hashes[length - 1]) is not None), 0)
