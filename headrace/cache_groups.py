"""How the caches of unlike layers share one arena: in groups of layers that keep alike, over pages that any borrows.

The arena is `num_pages` pages and one more, which is scratch for padding. A page lent to a group holds so many of its
blocks that block b of a group begins at byte b * block_stride of the arena, wherever its page lies: whoever reads needs
one stride and no table of pages. Where all layers are alike a page is one block. Integers alone: no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.model_spec import STATE_BYTES, Attention, Mixer, ModelSpec

CacheKind = Literal["full", "window", "chunk", "latent", "state"]
ALIGNMENT = 256
"""bytes: where blocks begin, if pages are shared; those of tokens also a whole number of a layer's tokens apart"""
MOST_PAGE_BYTES = 32 << 20
"""unless one block is larger"""
MOST_WASTE = 0.02
"""Share of a page that a group's blocks may leave unused, where a page of at most so many bytes allows it"""
MOST_TRIED = 64
"""sizes of page for each group"""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same number of bytes for a token, for as long; their blocks are given and taken together."""

    layers: tuple[int, ...]
    kind: CacheKind
    window: int | None
    """keys that a query of a window sees, itself included; size of a chunk; None: not bounded"""
    block_size: int
    """tokens of a block. A state has no tokens: one block is the whole state of all the group's layers."""
    block_bytes: int
    """of all the group's layers together, on one rank: (layer, K or V, token, head, dim) within it, or the states"""
    blocks_per_page: int = 1
    block_stride: int = 0
    """bytes from one block to the next; a little more than `block_bytes` where a page is no whole number of blocks"""

    @property
    def is_state(self) -> bool:
        return self.kind == "state"

    @property
    def grows_on(self) -> bool:
        """With every token, as long as a sequence is."""
        return self.window is None and not self.is_state

    def first_needed(self, start: int) -> int:
        """The first block that queries from position `start` on read: none before it is read again."""
        if self.window is None:
            return 0
        key = start // self.window * self.window if self.kind == "chunk" else max(0, start - self.window + 1)
        return key // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most that a sequence holds at once until it has `num_tokens`, of which a step computes at most
        `step_tokens`."""
        if self.is_state:
            return 1
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        # So many keys in a row lie in so many blocks at worst, where the first is the last of its block.
        keys = self.window - 1 + step_tokens
        return min(blocks, (keys + self.block_size - 2) // self.block_size + 1)


@dataclass(frozen=True)
class CacheLayout:
    groups: tuple[CacheGroup, ...]
    """in the order of their first layers"""
    page_bytes: int

    @property
    def block_size(self) -> int:
        """Tokens of a block, in every group that has tokens."""
        return self.groups[0].block_size

    @property
    def bytes_per_token(self) -> int:
        """In all groups together, as long as no window has passed it."""
        return sum(group.block_bytes // group.block_size for group in self.groups if not group.is_state)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """layer -> its group, of those that cache something"""
        return {layer: number for number, group in enumerate(self.groups) for layer in group.layers}

    def blocks(self, group: int, page: int) -> range:
        """The blocks of `group` that lie in `page`, if it is lent to it."""
        count = self.groups[group].blocks_per_page
        return range(page * count, (page + 1) * count)

    def pages_for(self, num_tokens: int, step_tokens: int = 1, sequences: int = 1) -> int:
        """That so many sequences hold at most, each until it has `num_tokens`."""
        pages = 0
        for group in self.groups:
            blocks = sequences * group.most_blocks(num_tokens, step_tokens)
            if group.window is not None:  # what has fallen behind it goes back with the last of its page
                blocks += group.blocks_per_page - 1
            pages += -(-blocks // group.blocks_per_page)
        return pages

    def longest(self, num_pages: int, most: int, step_tokens: int = 1) -> int:
        """Tokens, up to `most`, of the longest sequence that so many pages have room for while its prompt is computed:
        0 where there is none."""
        if self.pages_for(most, step_tokens) <= num_pages:
            return most
        ends = range(self.block_size, most, self.block_size)
        return bisect_right(ends, num_pages, key=lambda end: self.pages_for(end, step_tokens)) * self.block_size

    def tokens_in(self, num_pages: int, length: int) -> int:
        """Tokens of sequences of `length` that so many pages hold at once, once their prompts are computed."""
        length = -(-length // self.block_size) * self.block_size
        return num_pages * self.page_bytes * length // self.sequence_bytes(length)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Of the blocks of a sequence that has so many tokens."""
        return sum(group.most_blocks(num_tokens) * group.block_stride for group in self.groups)


def same_layout(block_size: int, block_bytes: int = 1) -> CacheLayout:
    """Of layers that all keep everything, and alike."""
    return CacheLayout((CacheGroup((), "full", None, block_size, block_bytes, 1, block_bytes),), block_bytes)


def cache_layout(spec: ModelSpec, ranks: int, itemsize: int, block_size: int) -> CacheLayout:
    """What one of `ranks` caches of a model, whose cached numbers have `itemsize` bytes."""
    members: dict[tuple[CacheKind, int | None, int], list[int]] = {}
    keys: dict[int, tuple[CacheKind, int | None, int]] = {}
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        key = keys.get(id(mixer))
        if key is None:
            share = mixer.cache_share(ranks)
            size = round(mixer.cached_values * share) * itemsize + round(mixer.state_values * share) * STATE_BYTES
            key = keys[id(mixer)] = _kind(mixer), mixer.window, size
        if key[2]:
            members.setdefault(key, []).append(index)
    groups = [
        CacheGroup(tuple(layers), kind, window, block_size, len(layers) * size * (1 if kind == "state" else block_size))
        for (kind, window, size), layers in members.items()
    ]
    sizes = [group.block_bytes for group in groups]
    units = [ALIGNMENT if kind == "state" else math.lcm(ALIGNMENT, size) for kind, _, size in members]
    page, counts = _best_page(sizes, units) if len(groups) > 1 else (sum(sizes), [1] * len(groups))
    paged = [
        replace(group, blocks_per_page=count, block_stride=page // count)
        for group, count in zip(groups, counts, strict=True)
    ]
    return CacheLayout(tuple(paged), page)


def _kind(mixer: Mixer) -> CacheKind:
    if mixer.kind == "state":
        return "state"
    if mixer.kind == "mla":
        return "latent"
    if mixer.window is None:
        return "full"
    return "chunk" if isinstance(mixer, Attention) and mixer.chunked else "window"


def _best_page(sizes: list[int], units: list[int]) -> tuple[int, list[int]]:
    """Bytes of the smallest page of which blocks of no size leave more than MOST_WASTE unused, or else of the one with
    the least waste; and how many blocks of each size it holds, which are multiples of `units` apart."""
    largest = max(sizes)
    limit = max(MOST_PAGE_BYTES, largest)
    least = [-(-largest // size) for size in sizes]
    pages = {
        size * count
        for size, first in zip(sizes, least, strict=True)
        for count in range(first, min(limit // size, first + MOST_TRIED) + 1)
    }
    best = (1.0, 0, least)
    for blocks in sorted(pages):
        most = [blocks // size for size in sizes]
        for counts in (most, [1 << count.bit_length() - 1 for count in most]):  # no common factors want large pages
            common = math.lcm(*(count * unit for count, unit in zip(counts, units, strict=True)))
            page = -(-blocks // common) * common
            waste = max(1 - count * size / page for count, size in zip(counts, sizes, strict=True))
            if waste < best[0] and (page <= limit or not best[1]):
                best = waste, page, counts
        if best[0] <= MOST_WASTE:
            break
    return best[1:]
