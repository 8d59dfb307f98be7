"""Tracks the KV cache's blocks, and the pages of memory in which they lie.

A block is *free*, *held* by one or more requests, or *cached*: held by none, but its content can still be reused. A
page is lent to one group of layers at a time and cut into that group's blocks. A page is *held* while any of its blocks
is, *idle* while some are cached and none is held, and free again once all its blocks are free; idle pages are lent anew
when no page is free. Where all layers are alike, a page is one block. Knows ids, hashes and counts; nothing of
requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PagePool:
    """Owns all pages. Each is free, or lent to the block pool of one layer group."""

    def __init__(self, num_pages: int, blocks_per_page: Sequence[int]) -> None:
        """`blocks_per_page`: one entry for each layer group."""
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))
        self.pools = [BlockPool(self, count) for count in blocks_per_page]
        self.num_releases = 0
        """Releases so far: the clock by which idle pages of different groups are compared."""
        self.to_clear: list[int] = []
        """Pages lent to another group than before, for the next step to clear; whoever makes that step empties the
        list."""
        self._last: list[object] = [None] * num_pages
        """The pool that last had each page; None: no pool yet."""

    @property
    def num_available(self) -> int:
        """Pages that can be lent: free ones, and idle ones, whose cached blocks would be evicted."""
        return len(self.free) + sum(len(pool.idle) for pool in self.pools)

    def allocate(self, counts: Sequence[int]) -> list[list[int]] | None:
        """Return so many blocks of each group, each held once, or None (and change nothing) if there are too few. What
        the blocks contain is undefined."""
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
        """Lend `count` pages to `pool`: free ones, then those that have been idle for longest. There must be as
        many."""
        kept = max(0, len(self.free) - count)
        pages = self.free[kept:][::-1]
        del self.free[kept:]
        while len(pages) < count:
            pages.append(min((one for one in self.pools if one.idle), key=BlockPool.idle_since).evict_page())
        if len(self.pools) > 1:
            for page in pages:
                if self._last[page] is not pool:
                    if self._last[page] is not None:
                        self.to_clear.append(page)
                    self._last[page] = pool
        return pages

    def clear_again(self, pages: Iterable[int]) -> None:
        """Mark pages as not cleared, because the step that should have done it failed. Pages in use by now stay so."""
        for page in {*pages}.intersection(self.free):
            self._last[page] = self

    def check_invariant(self) -> None:
        """Check every page and block; raise RuntimeError if one is counted wrongly. For tests: slow."""
        lent = [page for pool in self.pools for page in pool.check_invariant()]
        if sorted([*self.free, *lent]) != list(range(self.num_pages)):
            raise RuntimeError(
                f"of {self.num_pages} pages {len(self.free)} are free and {len(lent)} lent: inconsistent"
            )


class BlockPool:
    """Owns the blocks of one layer group, in the pages lent to it."""

    def __init__(self, pages: PagePool, blocks_per_page: int) -> None:
        self.blocks_per_page = blocks_per_page
        self.num_held = 0
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Idle page -> when it was released, earliest first."""
        self._pages = pages
        num_blocks = pages.num_pages * blocks_per_page
        self._free: dict[int, list[int]] = {}
        """Held page -> its free blocks, if there are any."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks, least recently released first."""
        self._num_held_pages = 0
        self._held_in = [0] * pages.num_pages
        """Held blocks of each page."""
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._hashed_in = [0] * pages.num_pages
        """Blocks of each page that have a hash."""
        self._block_with: dict[bytes, int] = {}

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_spare(self) -> int:
        """Blocks that can be had without another page: free and cached ones in held pages."""
        return self._num_held_pages * self.blocks_per_page - self.num_held

    def pages_for(self, count: int) -> int:
        """Return how many more pages `count` blocks need at least."""
        more = count - self._num_held_pages * self.blocks_per_page + self.num_held
        return -(-more // self.blocks_per_page) if more > 0 else 0

    def pages_beside(self, blocks: Sequence[int], count: int) -> tuple[int, int]:
        """Return how many idle pages holding these blocks would take, and how many more `count` further blocks need."""
        unheld = [block for block in blocks if not self._ref_counts[block]]
        woken = len({block // self.blocks_per_page for block in unheld}.intersection(self.idle))
        spare = self.num_spare + woken * self.blocks_per_page - len(unheld)
        return woken, -(-max(0, count - spare) // self.blocks_per_page)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def find(self, block_hash: bytes) -> int | None:
        """Return the held or cached block with this hash, if there is one."""
        return self._block_with.get(block_hash)

    def take(self, count: int, most_pages: int) -> tuple[list[int], int]:
        """Return `count` blocks, of which there must be as many, and how many pages were taken for them. Free blocks of
        held pages go first, then up to `most_pages` further pages, then cached blocks of held pages."""
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
        """Count one more holder for each of these held or cached blocks."""
        for block in blocks:
            if self._ref_counts[block]:
                self._ref_counts[block] += 1
                continue
            page = block // self.blocks_per_page
            del self._cached[block]
            if not self._held_in[page]:
                del self.idle[page]
                if unused := [other for other in self._blocks(page) if self._hash_of[other] is None]:
                    self._free[page] = unused
                self._num_held_pages += 1
            self._ref_counts[block] = 1
            self._held_in[page] += 1
            self.num_held += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Count one holder less for each of these blocks of one request, given in the order of its tokens. The last
        block is released first and so evicted first: a prefix is useful without its end, but not the reverse."""
        pages, free, per_page = self._pages, self._free, self.blocks_per_page
        ref_counts, held_in, hash_of = self._ref_counts, self._held_in, self._hash_of
        pages.num_releases += 1
        released = emptied = 0
        for block in reversed(blocks):
            count = ref_counts[block] = ref_counts[block] - 1
            if count:
                continue
            released += 1
            page = block // per_page
            beside = held_in[page] = held_in[page] - 1
            if hash_of[block] is not None:
                self._cached[block] = None
            elif beside:
                free.setdefault(page, []).append(block)
            if beside:
                continue
            emptied += 1
            if page in free:
                del free[page]
            if self._hashed_in[page]:  # idle while something in it is cached, else it goes back
                self.idle[page] = pages.num_releases
            else:
                pages.free.append(page)
        self.num_held -= released
        self._num_held_pages -= emptied

    def register(self, block: int, block_hash: bytes) -> None:
        """Put a held block into the prefix cache, unless another block with the same hash is there already."""
        if block_hash not in self._block_with:
            self._block_with[block_hash] = block
            self._hash_of[block] = block_hash
            self._hashed_in[block // self.blocks_per_page] += 1

    def forget(self, block_hash: bytes) -> None:
        """Remove the block with this hash, if there is one, from the prefix cache, unless a request holds it."""
        block = self._block_with.get(block_hash)
        if block is None or self._ref_counts[block]:
            return
        del self._cached[block]
        self._unregister(block)
        page = block // self.blocks_per_page
        if self._held_in[page]:
            self._free.setdefault(page, []).append(block)
        elif not self._hashed_in[page]:
            del self.idle[page]
            self._pages.free.append(page)

    def idle_since(self) -> int:
        """Return when the page that has been idle for longest was released."""
        return next(iter(self.idle.values()))

    def evict_page(self) -> int:
        """Evict the blocks of the page that has been idle for longest, and return the page."""
        page, _ = self.idle.popitem(last=False)
        for block in self._blocks(page):
            if self._hash_of[block] is not None:
                del self._cached[block]
                self._unregister(block)
        return page

    def _blocks(self, page: int) -> range:
        return range(page * self.blocks_per_page, (page + 1) * self.blocks_per_page)

    def _unregister(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_with[block_hash]
        self._hash_of[block] = None
        self._hashed_in[block // self.blocks_per_page] -= 1

    def check_invariant(self) -> list[int]:
        """Return the group's pages; raise RuntimeError if one of its blocks is counted wrongly. For tests: slow."""
        held = [block for block, count in enumerate(self._ref_counts) if count > 0]
        held_pages = {block // self.blocks_per_page for block in held}
        pages = [*held_pages, *self.idle]
        registered = {known: block for block, known in enumerate(self._hash_of) if known is not None}
        free = [block for blocks in self._free.values() for block in blocks]
        unused = [block for page in self.idle for block in self._blocks(page) if self._hash_of[block] is None]
        in_one_state = sorted([*free, *unused, *self._cached, *held]) == sorted(
            block for page in pages for block in self._blocks(page)
        )
        no_negative = all(count >= 0 for count in self._ref_counts)
        counted = self.num_held == len(held) and self._num_held_pages == len(held_pages)
        counted = counted and all(self._held_in[page] == 0 for page in {*range(len(self._held_in))} - held_pages)
        counted = counted and self._hashed_in == [
            sum(self._hash_of[block] is not None for block in self._blocks(page))
            for page in range(len(self._hashed_in))
        ]
        findable = registered == self._block_with
        cached_have_hashes = all(self._hash_of[block] is not None for block in self._cached)
        free_have_none = all(self._hash_of[block] is None for block in free)
        if not (in_one_state and no_negative and counted and findable and cached_have_hashes and free_have_none):
            raise RuntimeError(
                f"block pool of {len(pages)} pages is inconsistent: {len(free) + len(unused)} free, {len(held)} held, "
                f"{self.num_cached} cached, {len(registered)} registered, {len(self._block_with)} findable"
            )
        return pages
