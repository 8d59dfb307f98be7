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
        self._windows = [(index, group.most_blocks(ENDLESS), group.block_size) for index, group, _ in kv_cache.bounded]
        demands, capacity, priority = [], kv_cache.available_bytes, first.order[0]
        for request in running:  # often hundreds, in every step that may admit one more
            blocks = [request.num_blocks - first_block for first_block in request.first_blocks]
            for index in kv_cache.states:
                blocks[index] = 1
            held = kv_cache.bytes_of(blocks)
            capacity += held
            if request.order[0] > priority:
                continue
            if request.num_blocks * kv_cache.block_size < len(request.token_ids):
                # It has yet to get blocks for the rest of its prompt.
                blocks = [max(count, group.most_blocks(request.num_tokens, kv_cache.step_tokens))
                          for count, (_, group, _) in zip(blocks, kv_cache.groups, strict=True)]  # fmt: skip
                held = kv_cache.bytes_of(blocks)
            demands.append(self._demand(request, blocks, held))
        self._capacity = capacity
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
        until_full = tuple([max(0, most - blocks[index]) * size for index, most, size in self._windows])
        return Demand(self._lengths.remaining(request), held, until_full)
