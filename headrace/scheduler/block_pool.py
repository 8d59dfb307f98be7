"""Who has which KV block: free, held by requests, or cached (held by nobody, but its content may be asked for again).

Knows block ids, digests and counts; nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Every block is in exactly one state: free + held + cached = total."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        """block -> digest, least recently released first"""
        self._ref_counts = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_with: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free ones, then cached ones by eviction."""
        return len(self._free) + len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, digest: bytes) -> int | None:
        """The block whose content has this digest, held or cached."""
        return self._block_with.get(digest)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks of undefined content, each held once; None (and nothing changes) if there are not as many."""
        free, cached = self._free, self._cached
        if count > len(free) + len(cached):
            return None
        blocks = []
        for _ in range(count):
            if free:
                block = free.pop()
            else:
                block, digest = cached.popitem(last=False)
                self._unregister(block, digest)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these held or cached blocks."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each of these blocks of one request, given in their order: the tail is let go first, so
        that it is evicted first, since a head without its tail is still a useful prefix and the reverse is not."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            digest = self._digest_of[block]
            if digest is None:
                self._free.append(block)
            else:
                self._cached[block] = digest

    def register(self, block: int, digest: bytes) -> None:
        """Let a held block be found by the digest of its content. Where another block already has that content, this
        one stays unknown: simple, and right."""
        if digest not in self._block_with:
            self._block_with[digest] = block
            self._digest_of[block] = digest

    def forget(self, digest: bytes) -> None:
        """Take the block with this content, if any, out of the cache, unless someone holds it."""
        block = self._block_with.get(digest)
        if block is not None and self._ref_counts[block] == 0:
            del self._cached[block]
            self._unregister(block, digest)
            self._free.append(block)

    def _unregister(self, block: int, digest: bytes) -> None:
        del self._block_with[digest]
        self._digest_of[block] = None

    def check_invariant(self) -> None:
        """Look at every block; raises RuntimeError if the books do not balance. For tests: it costs O(num_blocks)."""
        held = [block for block, count in enumerate(self._ref_counts) if count > 0]
        registered = {digest: block for block, digest in enumerate(self._digest_of) if digest is not None}
        in_one_state = sorted([*self._free, *self._cached, *held]) == list(range(self.num_blocks))
        no_negative = all(count >= 0 for count in self._ref_counts)
        findable = registered == self._block_with
        cached_have_digests = all(self._digest_of[block] == digest for block, digest in self._cached.items())
        free_have_none = all(self._digest_of[block] is None for block in self._free)
        if not (in_one_state and no_negative and findable and cached_have_digests and free_have_none):
            raise RuntimeError(
                f"block pool of {self.num_blocks} is inconsistent: {self.num_free} free, {len(held)} held, "
                f"{self.num_cached} cached, {len(registered)} registered, {len(self._block_with)} findable"
            )
