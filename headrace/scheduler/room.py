"""Whether newcomers of a step find blocks to their ends beside those who run.

Puts the pool, what is guessed of lengths, and the priority of requests together; admits nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.request import Request
from headrace.scheduler.forecast import LengthForecast, Occupancy
from headrace.scheduler.kv_cache_manager import KVCacheManager


class Room:
    """What there is in the cache for newcomers of one step, none of which is before `first` in order. Requests of a
    worse priority would be preempted for that one, so they take no room from it."""

    def __init__(
        self, kv_cache: KVCacheManager, lengths: LengthForecast, running: Iterable[Request], first: Request
    ) -> None:
        holders, held, unclaimed = [], 0, kv_cache.pool.num_available
        for request in running:
            blocks = len(request.block_ids)
            if request.order[0] > first.order[0]:
                unclaimed += blocks
                continue
            # a prompt under way claims the rest of it
            missing = max(0, kv_cache.num_blocks_for(request.num_tokens) - blocks)
            unclaimed -= missing
            held += blocks + missing
            holders.append((lengths.remaining(request), blocks + missing))
        self._kv_cache, self._lengths = kv_cache, lengths
        self._capacity = unclaimed + held
        self._occupancy = Occupancy(kv_cache.block_size, holders)

    def has_place_for(self, newcomer: Request, cached: list[int]) -> bool:
        """Whether all before it could go on to their ends beside it; then it is one of them. `cached`: blocks of its
        prefix, of which it takes those that nobody holds."""
        kv_cache = self._kv_cache
        shared = sum(kv_cache.pool.ref_count(block) > 0 for block in cached)
        claim = self._lengths.remaining(newcomer), kv_cache.num_blocks_for(newcomer.num_tokens) - shared
        if not self._occupancy.fits(*claim, self._capacity):
            return False
        self._occupancy.add(*claim)
        return True
