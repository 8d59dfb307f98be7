"""Describes a step's batch of sequences and the paged cache that holds their keys and values.

A layer's cache is a tensor # [2 (K, V), num_blocks, block_size, Hkv, D]. The keys of a block are contiguous, and so are
its values, which lie behind all keys or beside their block's keys. From one block to the next it is a whole number of
rows (a row is what a token's keys take in this layer); other layers' rows may lie in between.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from headrace.kernels._triton import tl, triton


class Sequences(NamedTuple):
    """Says which tokens of a step belong to which request, and where the request's keys are; R requests, int32 each.
    Request i has the tokens query_start_loc[i] : query_start_loc[i + 1]. They are the last of seq_lens[i] known ones,
    whose blocks are listed in block_table[rows[i]]."""

    block_table: Tensor
    """[max_rows, max_blocks]"""
    rows: Tensor
    """[R]"""
    query_start_loc: Tensor
    """[R + 1]"""
    seq_lens: Tensor
    """[R]: the step's own tokens included; 0 for padding"""


@triton.jit
def find_request(tile, query_start_loc_ptr, first_req, num_reqs, search_steps, BLOCK_Q: tl.constexpr):
    """Return the request whose tile of BLOCK_Q queries this is, where its queries begin, their number, and which of its
    tiles it is. Tiles are numbered through requests first_req : num_reqs. One with n queries has n // BLOCK_Q + 1
    tiles, the last of which may be empty, so that nobody needs to count them beforehand."""
    request = first_req
    high = num_reqs
    for _ in range(search_steps):  # the last request whose first tile is not behind this one
        middle = (request + high) // 2
        first_tile = (tl.load(query_start_loc_ptr + middle) - first_req) // BLOCK_Q + middle - first_req
        request = tl.where(first_tile <= tile, middle, request)
        high = tl.where(first_tile <= tile, high, middle)
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    tile -= (query_start - first_req) // BLOCK_Q + request - first_req
    return request, query_start, query_len, tile


def rows_between(kv_cache: Tensor) -> tuple[int, int]:
    """Return how many rows a block's values lie behind its keys, and the next block's keys behind those. Kernels count
    in rows, whose size they know when they are compiled: that takes fewer registers than strides do."""
    to_values, to_block, row = kv_cache.stride()[:3]
    return to_values // row, to_block // row


def by_row(kv_cache: Tensor) -> Tensor:
    """Return the cache as # [2, rows, Hkv, D], other layers' rows among them."""
    planes, num_blocks, block_size, *heads = kv_cache.shape
    rows = (num_blocks - 1) * rows_between(kv_cache)[1] + block_size
    return kv_cache.as_strided((planes, rows, *heads), (kv_cache.stride(0), *kv_cache.stride()[2:]))


def rows_of(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """Return the rows of `by_row` that hold the tokens of `slots`."""
    block_size, apart = kv_cache.shape[2], rows_between(kv_cache)[1]
    return slots if apart == block_size else slots + slots // block_size * (apart - block_size)
