"""How a layer's paged cache # [2 (K, V), num_blocks, block_size, Hkv, D] lies in memory.

The keys of a block are contiguous, and so are its values. Those lie behind all keys, or beside their block's keys in
memory where other layers have theirs in between.
"""

from __future__ import annotations

from torch import Tensor


def block_steps(kv_cache: Tensor) -> tuple[int, int]:
    """How far a block's values lie behind its keys, and the next block's keys behind those. Counted, as kernels do, in
    what the keys of a block take: the one factor of an address that is known when they are compiled."""
    to_values, to_block, to_token = kv_cache.stride()[:3]
    keys = kv_cache.shape[2] * to_token
    return to_values // keys, to_block // keys


def by_token(kv_cache: Tensor) -> Tensor:
    """A paged cache as # [2, places, Hkv, D], places as they lie in memory, other layers' among them."""
    _, num_blocks, block_size, *heads = kv_cache.shape
    to_values, to_block, *inner = kv_cache.stride()
    places = (num_blocks - 1) * (to_block // inner[0]) + block_size
    return kv_cache.as_strided((2, places, *heads), (to_values, *inner))


def token_places(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Where in `by_token` the tokens of `slots` are."""
    block_size = kv_cache.shape[2]
    _, block_step = block_steps(kv_cache)
    return slots if block_step == 1 else slots + slots // block_size * (block_step - 1) * block_size
