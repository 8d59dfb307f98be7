"""Which KV blocks a request owns, and which of them hold a prefix that another request can share.

A full block is known by a SHA-256 digest chained over everything before it, so equal digests mean equal tokens from
the start of the sequence, under the same salt. Knows nothing of budgets, rows or steps.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from headrace.request import Request
from headrace.scheduler.block_pool import BlockPool


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


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_cached(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix of the request's known tokens, the last token excepted: that one must be
        computed, as its logits are what is wanted. Holds nothing yet."""
        if not self.enable_prefix_caching or request.core_request.params.prompt_logprobs is not None:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request, num_blocks, self.block_size)
        found: list[int] = []
        find = self.pool.find
        for digest in request.block_hashes[:num_blocks]:
            block = find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, request: Request, cached: list[int], num_tokens: int) -> bool:
        """Give a request without blocks the `cached` ones and fresh ones up to `num_tokens` tokens. False, and nothing
        changes, unless all its known tokens would fit: one admitted for its first chunk alone would soon be preempted,
        and its work lost."""
        pool = self.pool
        unheld = sum(pool.ref_count(block) == 0 for block in cached)
        if self.num_blocks_for(request.num_tokens) - len(cached) > pool.num_available - unheld:
            return False
        pool.hold(cached)
        request.block_ids = list(cached)
        request.num_registered_blocks = len(cached)
        self.grow(request, num_tokens)
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Fresh blocks, appended to the request's own, so that `num_tokens` tokens fit; None, and nothing changes, if
        the pool has not as many."""
        fresh = self.pool.allocate(self.num_blocks_for(num_tokens) - len(request.block_ids))
        if fresh is not None:
            request.block_ids.extend(fresh)
        return fresh

    def register(self, request: Request, num_tokens: int) -> None:
        """Offer the request's full blocks among its first `num_tokens` tokens to others. Those tokens must be known to
        the host, and the step that computed them must have come back."""
        if not self.enable_prefix_caching:
            return
        num_full = num_tokens // self.block_size
        extend_block_hashes(request, num_full, self.block_size)
        for index in range(request.num_registered_blocks, num_full):
            self.pool.register(request.block_ids[index], request.block_hashes[index])
        request.num_registered_blocks = num_full

    def free(self, request: Request) -> None:
        """Let go of all blocks; registered ones stay in the cache until they are evicted."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0

    def forget_after(self, request: Request, num_tokens: int) -> None:
        """Take full blocks with tokens beyond the first `num_tokens` out of the cache, unless a live request shares
        them. The request itself has let go of its blocks already."""
        for digest in request.block_hashes[num_tokens // self.block_size :]:
            self.pool.forget(digest)
