"""Decides whether a waiting request would find KV blocks to its end beside those that run.

Combines what the pools hold, what is expected of answers' lengths, and priorities. It admits and reserves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.request import Request
from headrace.scheduler.forecast import Demand, LengthForecast, MemoryForecast
from headrace.scheduler.kv_cache_manager import KVCacheManager, Prefix

ENDLESS = 1 << 60
"""A number of tokens beyond any sequence."""


class LookAhead:
    """Judges the requests that one step might admit, none of which is before `first` in order. Running requests of a
    worse priority than `first` do not count: they would be preempted for it."""

    def __init__(
        self, kv_cache: KVCacheManager, lengths: LengthForecast, running: Iterable[Request], first: Request
    ) -> None:
        self._kv_cache, self._lengths = kv_cache, lengths
        demands, held, available = [], 0, kv_cache.available_bytes
        for request in running:
            blocks = [1 if group.is_state else request.num_blocks - request.first_blocks[index]
                      for index, group, _ in kv_cache.groups]  # fmt: skip
            now = kv_cache.bytes_of(blocks)
            if request.order[0] > first.order[0]:
                available += now
                continue
            if request.num_blocks < kv_cache.num_blocks_for(request.num_tokens):
                # It has yet to get blocks for the rest of its prompt.
                blocks = [max(count, group.most_blocks(request.num_tokens, kv_cache.step_tokens))
                          for count, (_, group, _) in zip(blocks, kv_cache.groups, strict=True)]  # fmt: skip
            demand = self._demand(request, blocks, kv_cache.bytes_of(blocks))
            available -= demand.held - now
            held += demand.held
            demands.append(demand)
        self._capacity = available + held
        self._memory = MemoryForecast(kv_cache.layout, demands)

    def admit(self, request: Request, prefix: Prefix) -> bool:
        """Return whether all that run could go on to their ends beside `request`; if so, it counts among them. Blocks
        of `prefix`, its cached beginning, that other requests hold cost nothing."""
        kv_cache = self._kv_cache
        missing = kv_cache.missing(request, prefix)
        taken, blocks = [], []
        for count, cached, (_, _, pool) in zip(missing, prefix.blocks, kv_cache.groups, strict=True):
            taken.append(count + sum(pool.ref_count(block) == 0 for block in cached))
            blocks.append(count + len(cached))
        demand = self._demand(request, blocks, kv_cache.bytes_of(taken))
        if not self._memory.fits(demand, self._capacity):
            return False
        self._memory.add(demand)
        return True

    def _demand(self, request: Request, blocks: Sequence[int], held: int) -> Demand:
        """Return what a request that has `blocks` in each group holds, and how it will grow."""
        until_full = tuple(
            max(0, group.most_blocks(ENDLESS) - count) * group.block_size
            for count, (_, group, _) in zip(blocks, self._kv_cache.groups, strict=True)
            if group.window is not None
        )
        return Demand(self._lengths.remaining(request), held, until_full)
