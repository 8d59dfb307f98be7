"""Whether newcomers of a step find blocks to their ends beside those who run.

Puts the pools, what is guessed of lengths, and the priority of requests together; admits nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.request import Request
from headrace.scheduler.forecast import Holder, LengthForecast, Occupancy
from headrace.scheduler.kv_cache_manager import KVCacheManager, Prefix

ENDLESS = 1 << 60
"""tokens"""


class Room:
    """What there is in the cache for newcomers of one step, none of which is before `first` in order. Requests of a
    worse priority would be preempted for that one, so they take no room from it."""

    def __init__(
        self, kv_cache: KVCacheManager, lengths: LengthForecast, running: Iterable[Request], first: Request
    ) -> None:
        self._kv_cache, self._lengths = kv_cache, lengths
        holders, held, unclaimed = [], 0, kv_cache.available_bytes
        for request in running:
            blocks = [1 if group.is_state else request.num_blocks - request.first_blocks[index]
                      for index, group, _ in kv_cache.groups]  # fmt: skip
            now = kv_cache.bytes_of(blocks)
            if request.order[0] > first.order[0]:
                unclaimed += now
                continue
            if request.num_blocks < kv_cache.num_blocks_for(request.num_tokens):
                # a prompt under way claims the rest of it
                blocks = [max(count, group.most_blocks(request.num_tokens, kv_cache.step_tokens))
                          for count, (_, group, _) in zip(blocks, kv_cache.groups, strict=True)]  # fmt: skip
            holder = self._holder(request, blocks, kv_cache.bytes_of(blocks))
            unclaimed -= holder.held - now
            held += holder.held
            holders.append(holder)
        self._capacity = unclaimed + held
        self._occupancy = Occupancy(kv_cache.layout, holders)

    def has_place_for(self, newcomer: Request, prefix: Prefix) -> bool:
        """Whether all before it could go on to their ends beside it; then it is one of them. Of `prefix` it takes the
        blocks that nobody holds."""
        kv_cache = self._kv_cache
        missing = kv_cache.missing(newcomer, prefix)
        taken, blocks = [], []
        for count, cached, (_, _, pool) in zip(missing, prefix.blocks, kv_cache.groups, strict=True):
            taken.append(count + sum(pool.ref_count(block) == 0 for block in cached))
            blocks.append(count + len(cached))
        holder = self._holder(newcomer, blocks, kv_cache.bytes_of(taken))
        if not self._occupancy.fits(holder, self._capacity):
            return False
        self._occupancy.add(holder)
        return True

    def _holder(self, request: Request, blocks: Sequence[int], held: int) -> Holder:
        """Of a request that has so many blocks in each group."""
        bounds = tuple(
            max(0, group.most_blocks(ENDLESS) - count) * group.block_size
            for count, (_, group, _) in zip(blocks, self._kv_cache.groups, strict=True)
            if group.window is not None
        )
        return Holder(self._lengths.remaining(request), held, bounds)
