"""Tiles of queries over a ragged batch, for attention's kernels: of n queries a request touches n // BLOCK_Q + 1 tiles
at most, and nobody counts them beforehand. Knows nothing of keys.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton functions are typed by what they are launched with.
from __future__ import annotations

from headrace.kernels._triton import tl, triton


@triton.jit
def find_request(tile, query_start_loc_ptr, first_req, num_reqs, search_steps, BLOCK_Q: tl.constexpr):
    """-> (the request whose tile this is, where its queries begin, how many they are, which of its tiles it is)"""
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
