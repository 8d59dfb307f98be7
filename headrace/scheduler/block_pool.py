"""Who has which block of the KV cache: free, held by requests, or cached (held by nobody, but its content may be asked
for again); and which group of layers has which page of the arena.

A page lent to a group is cut into its blocks. It is *held* while any of them is, *idle* while some are cached and none
is held, and goes back when all are free; idle ones are lent anew when no page is free. Where all layers are alike a
page is one block. Knows ids, digests and counts; nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Every page is free, or one group's."""

    def __init__(self, num_pages: int, blocks_per_page: Sequence[int]) -> None:
        """`blocks_per_page`: of each group."""
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.pools = [BlockPool(self, count) for count in blocks_per_page]
        self.num_releases = 0
        """so far: the clock by which idle pages of unlike groups are compared"""
        self.cleared: list[int] = []
        """pages lent to another group than the one before, since somebody emptied this list"""
        self._last: list[object] = [None] * num_pages
        """the group that had it last; None: nobody ever"""

    @property
    def num_available(self) -> int:
        """Pages that can be lent: free ones, then idle ones, whose content is lost."""
        return len(self.free) + sum(len(pool.idle) for pool in self.pools)

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        """So many blocks of each group, of undefined content, each held once; None (and nothing changes) if there are
        not as many."""
        if len(counts) == 1:
            pool, available = self.pools[0], len(self.free) + len(self.pools[0].idle)
            return None if pool.pages_for(counts[0]) > available else [pool.take(counts[0], available)[0]]
        fewest = [pool.pages_for(count) for pool, count in zip(self.pools, counts, strict=True)]
        spare = self.num_available - sum(fewest)
        if spare < 0:
            return None
        found = []
        for pool, count, pages in zip(self.pools, counts, fewest, strict=True):
            blocks, taken = pool.take(count, pages + spare)
            spare -= taken - pages
            found.append(blocks)
        return found

    def lend(self, pool: BlockPool, count: int) -> list[int]:
        """Pages for `pool`, which there must be: free ones, then those that have been idle for longest."""
        kept = max(0, len(self.free) - count)
        pages = self.free[kept:][::-1]
        del self.free[kept:]
        while len(pages) < count:
            pages.append(min((one for one in self.pools if one.idle), key=BlockPool.idle_since).evict_page())
        if len(self.pools) > 1:
            for page in pages:
                if self._last[page] is not pool:
                    if self._last[page] is not None:
                        self.cleared.append(page)
                    self._last[page] = pool
        return pages

    def not_cleared(self, pages: Iterable[int]) -> None:
        """The step that should have cleared them came to nothing: whoever is lent one, clears it."""
        for page in {*pages}.intersection(self.free):
            self._last[page] = self

    def check_invariant(self) -> None:
        """Look at every page and block; raises RuntimeError if the books do not balance. For tests: slow."""
        lent = [page for pool in self.pools for page in pool.check_invariant()]
        if sorted([*self.free, *lent]) != list(range(self.num_pages)):
            raise RuntimeError(
                f"of {self.num_pages} pages {len(self.free)} are free and {len(lent)} lent: inconsistent"
            )


class BlockPool:
    """The blocks of one group. Those that lie in its pages are free, held or cached."""

    def __init__(self, pages: PagePool, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.num_held = 0
        self.idle: OrderedDict[int, int] = OrderedDict()
        """idle page -> when it was released, earliest first"""
        self._pages = pages
        num_blocks = pages.num_pages * blocks_per_page
        self._free: dict[int, list[int]] = {}
        """held page -> its free blocks, if there are any"""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """least recently released first"""
        self._num_held_pages = 0
        self._held_in = [0] * pages.num_pages
        """blocks of a page"""
        self._ref_counts = [0] * num_blocks
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._known_in = [0] * pages.num_pages
        """blocks of a page that have a digest"""
        self._block_with: dict[bytes, int] = {}

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_loose(self) -> int:
        """Free and cached blocks beside held ones: what can be had without a page."""
        return self._num_held_pages * self.blocks_per_page - self.num_held

    def pages_for(self, count: int) -> int:
        """that `count` blocks take at least"""
        more = count - self._num_held_pages * self.blocks_per_page + self.num_held
        return -(-more // self.blocks_per_page) if more > 0 else 0

    def pages_beside(self, blocks: Sequence[int], count: int) -> tuple[int, int]:
        """Pages that holding these held or cached blocks wakes, and how many `count` more blocks then take."""
        unheld = [block for block in blocks if not self._ref_counts[block]]
        woken = len({block // self.blocks_per_page for block in unheld}.intersection(self.idle))
        loose = self.num_loose + woken * self.blocks_per_page - len(unheld)
        return woken, -(-max(0, count - loose) // self.blocks_per_page)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, digest: bytes) -> int | None:
        """The block whose content has this digest, held or cached."""
        return self._block_with.get(digest)

    def take(self, count: int, most_pages: int) -> tuple[list[int], int]:
        """`count` blocks, which there must be, and how many pages were taken for them: at most `most_pages`, before
        cached blocks beside held ones are evicted."""
        free, per_page, held_in = self._free, self.blocks_per_page, self._held_in
        blocks: list[int] = []
        while free and len(blocks) < count:
            page = next(reversed(free))
            blocks.append(free[page].pop())
            held_in[page] += 1
            if not free[page]:
                del free[page]
        taken = min(most_pages, -(-(count - len(blocks)) // per_page))
        for page in self._pages.lend(self, taken):
            if per_page == 1:
                blocks.append(page)
                held_in[page] = 1
                continue
            first, used = page * per_page, min(per_page, count - len(blocks))
            blocks.extend(range(first, first + used))
            held_in[page] = used
            if used < per_page:
                free[page] = list(range(first + per_page - 1, first + used - 1, -1))
        while len(blocks) < count:
            block = next(block for block in self._cached if held_in[block // per_page])
            del self._cached[block]
            self._unregister(block)
            blocks.append(block)
            held_in[block // per_page] += 1
        ref_counts = self._ref_counts
        for block in blocks:
            ref_counts[block] = 1
        self._num_held_pages += taken
        self.num_held += count
        return blocks, taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these held or cached blocks."""
        for block in blocks:
            if self._ref_counts[block]:
                self._ref_counts[block] += 1
                continue
            page = block // self.blocks_per_page
            del self._cached[block]
            if not self._held_in[page]:
                del self.idle[page]
                if unused := [other for other in self._blocks(page) if self._digest_of[other] is None]:
                    self._free[page] = unused
                self._num_held_pages += 1
            self._ref_counts[block] = 1
            self._held_in[page] += 1
            self.num_held += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each of these blocks of one request, given in their order: the tail is let go first, so
        that it is evicted first, since a head without its tail is still a useful prefix and the reverse is not."""
        pages, free, per_page = self._pages, self._free, self.blocks_per_page
        ref_counts, held_in, digest_of = self._ref_counts, self._held_in, self._digest_of
        pages.num_releases += 1
        let_go = emptied = 0
        for block in reversed(blocks):
            count = ref_counts[block] = ref_counts[block] - 1
            if count:
                continue
            let_go += 1
            page = block // per_page
            beside = held_in[page] = held_in[page] - 1
            if digest_of[block] is not None:
                self._cached[block] = None
            elif beside:
                free.setdefault(page, []).append(block)
            if beside:
                continue
            emptied += 1
            if page in free:
                del free[page]
            if self._known_in[page]:  # idle while something in it is cached, else it goes back
                self.idle[page] = pages.num_releases
            else:
                pages.free.append(page)
        self.num_held -= let_go
        self._num_held_pages -= emptied

    def register(self, block: int, digest: bytes) -> None:
        """Let a held block be found by the digest of its content. Where another block already has that content, this
        one stays unknown: simple, and right."""
        if digest not in self._block_with:
            self._block_with[digest] = block
            self._digest_of[block] = digest
            self._known_in[block // self.blocks_per_page] += 1

    def forget(self, digest: bytes) -> None:
        """Take the block with this content, if any, out of the cache, unless someone holds it."""
        block = self._block_with.get(digest)
        if block is None or self._ref_counts[block]:
            return
        del self._cached[block]
        self._unregister(block)
        page = block // self.blocks_per_page
        if self._held_in[page]:
            self._free.setdefault(page, []).append(block)
        elif not self._known_in[page]:
            del self.idle[page]
            self._pages.free.append(page)

    def idle_since(self) -> int:
        """When its oldest idle page was released."""
        return next(iter(self.idle.values()))

    def evict_page(self) -> int:
        """Give up the page that has been idle for longest, with all that is cached in it."""
        page, _ = self.idle.popitem(last=False)
        for block in self._blocks(page):
            if self._digest_of[block] is not None:
                del self._cached[block]
                self._unregister(block)
        return page

    def _blocks(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)

    def _unregister(self, block: int) -> None:
        digest = self._digest_of[block]
        assert digest is not None
        del self._block_with[digest]
        self._digest_of[block] = None
        self._known_in[block // self.blocks_per_page] -= 1

    def check_invariant(self) -> list[int]:
        """The group's pages; raises RuntimeError if the books of its blocks do not balance. For tests: slow."""
        held = [block for block, count in enumerate(self._ref_counts) if count > 0]
        held_pages = {block // self.blocks_per_page for block in held}
        pages = [*held_pages, *self.idle]
        registered = {digest: block for block, digest in enumerate(self._digest_of) if digest is not None}
        free = [block for blocks in self._free.values() for block in blocks]
        unused = [block for page in self.idle for block in self._blocks(page) if self._digest_of[block] is None]
        in_one_state = sorted([*free, *unused, *self._cached, *held]) == sorted(
            block for page in pages for block in self._blocks(page)
        )
        no_negative = all(count >= 0 for count in self._ref_counts)
        counted = self.num_held == len(held) and self._num_held_pages == len(held_pages)
        counted = counted and all(self._held_in[page] == 0 for page in {*range(len(self._held_in))} - held_pages)
        counted = counted and self._known_in == [
            sum(self._digest_of[block] is not None for block in self._blocks(page))
            for page in range(len(self._known_in))
        ]
        findable = registered == self._block_with
        cached_have_digests = all(self._digest_of[block] is not None for block in self._cached)
        free_have_none = all(self._digest_of[block] is None for block in free)
        if not (in_one_state and no_negative and counted and findable and cached_have_digests and free_have_none):
            raise RuntimeError(
                f"block pool of {len(pages)} pages is inconsistent: {len(free) + len(unused)} free, {len(held)} held, "
                f"{self.num_cached} cached, {len(registered)} registered, {len(self._block_with)} findable"
            )
        return pages
