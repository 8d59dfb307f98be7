"""How a layer's paged cache # [2 (K, V), num_blocks, block_size, Hkv, D] lies in memory.

The keys of a block are contiguous, and so are its values, which lie behind all keys or beside their block's. From one
block to the next it is a whole number of rows, of what a token's keys take; other layers' may lie in between.
"""

from __future__ import annotations

from torch import Tensor


def rows_between(kv_cache: Tensor) -> tuple[int, int]:
    """How many rows a block's values lie behind its keys, and the next block's keys behind those. (A row's size is
    known when a kernel is compiled, which takes fewer registers than strides in numbers do.)"""
    to_values, to_block, row = kv_cache.stride()[:3]
    return to_values // row, to_block // row


def by_row(kv_cache: Tensor) -> Tensor:
    """The cache as # [2, rows, Hkv, D], other layers' rows among them."""
    planes, num_blocks, block_size, *heads = kv_cache.shape
    rows = (num_blocks - 1) * rows_between(kv_cache)[1] + block_size
    return kv_cache.as_strided((planes, rows, *heads), (kv_cache.stride(0), *kv_cache.stride()[2:]))


def rows_of(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Where in `by_row` the tokens of `slots` are."""
    block_size, apart = kv_cache.shape[2], rows_between(kv_cache)[1]
    return slots if apart == block_size else slots + slots // block_size * (apart - block_size)
