"""Describes how the caches of different layers share one arena: layers that cache alike form a group, and groups share
pages.

The arena has `num_pages` pages and one more, which is scratch for padding. Page sizes are chosen so that block b of a
group begins at byte b * block_stride of the arena, whichever page holds it; a reader needs one stride and no table of
pages. Where all layers are alike a page is one block. This file imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.mixers import STATE_BYTES, Attention, LatentAttention, Mixer
from headrace.model_spec import ModelSpec
from headrace.stages import WHOLE, Stage

CacheKind = Literal["full", "window", "chunk", "latent", "state"]
ALIGNMENT = 256
"""Bytes to whose multiples blocks are aligned where groups share pages; the strides of blocks of tokens are also a
multiple of a layer's bytes for a token"""
MOST_PAGE_BYTES = 32 << 20
"""Largest page, unless one block is larger"""
MOST_WASTE = 0.02
"""Share of a page that a group's blocks may leave unused, if a page of at most MOST_PAGE_BYTES allows it"""
MOST_TRIED = 64
"""Page sizes that are tried for each group"""


@dataclass(frozen=True)
class CacheGroup:
    """Describes layers that keep what they cache equally long, and cache equally many bytes for a token, but for the
    keys of indexes that some layers of latents have. A block holds the cache of all of them."""

    layers: tuple[int, ...]
    kind: CacheKind
    window: int | None
    """keys that a query of a sliding window sees, its own included; size of a chunk; None: all keys"""
    block_size: int
    """tokens of a block; a block of recurrent states is the whole state of all the group's layers instead"""
    block_bytes: int
    """of all the group's layers on one rank; a block is laid out as (layer, K or V, token, head, dim), or as the
    states"""
    blocks_per_page: int = 1
    block_stride: int = 0
    """bytes from one block to the next; a little more than `block_bytes` where blocks do not fill a page"""

    @property
    def is_state(self) -> bool:
        """True if a block holds recurrent states instead of tokens."""
        return self.kind == "state"

    @property
    def grows_on(self) -> bool:
        """True if a sequence's cache grows with every token, without a bound."""
        return self.window is None and not self.is_state

    def first_needed(self, start: int) -> int:
        """Return the first block that queries from position `start` on read; no earlier block is needed any more."""
        if self.window is None:
            return 0
        key = start // self.window * self.window if self.kind == "chunk" else max(0, start - self.window + 1)
        return key // self.block_size

    def most_blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Return the most blocks that a sequence holds at once until it has `num_tokens`, if a step computes at most
        `step_tokens` of them."""
        if self.is_state:
            return 1
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        # Consecutive keys touch the most blocks if the first key is the last of its block.
        keys = self.window - 1 + step_tokens
        return min(blocks, (keys + self.block_size - 2) // self.block_size + 1)


@dataclass(frozen=True)
class CacheLayout:
    """Describes how one rank's caches share the arena."""

    groups: tuple[CacheGroup, ...]
    """in the order of their first layers"""
    page_bytes: int

    @property
    def block_size(self) -> int:
        """The tokens of a block, the same in every group."""
        return self.groups[0].block_size

    @property
    def bytes_per_token(self) -> int:
        """The bytes cached for a token in all groups together, while no window has moved past it."""
        return sum(group.block_bytes // group.block_size for group in self.groups if not group.is_state)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each layer that caches something."""
        return {layer: number for number, group in enumerate(self.groups) for layer in group.layers}

    def blocks(self, group: int, page: int) -> range:
        """Return the blocks of `group` that lie in `page` while the page belongs to the group."""
        count = self.groups[group].blocks_per_page
        return range(page * count, (page + 1) * count)

    def pages_for(self, num_tokens: int, step_tokens: int = 1, sequences: int = 1) -> int:
        """Return the most pages that so many sequences hold, each until it has `num_tokens`."""
        pages = 0
        for group in self.groups:
            blocks = sequences * group.most_blocks(num_tokens, step_tokens)
            if group.window is not None:  # a page is given back only when its last block has fallen behind the window
                blocks += group.blocks_per_page - 1
            pages += -(-blocks // group.blocks_per_page)
        return pages

    def longest(self, num_pages: int, most: int, step_tokens: int = 1) -> int:
        """Return the tokens, at most `most`, of the longest sequence that fits into so many pages while its prompt is
        computed; 0 if none does."""
        if self.pages_for(most, step_tokens) <= num_pages:
            return most
        ends = range(self.block_size, most, self.block_size)
        return bisect_right(ends, num_pages, key=lambda end: self.pages_for(end, step_tokens)) * self.block_size

    def tokens_in(self, num_pages: int, length: int) -> int:
        """Return how many tokens of sequences of `length` fit into so many pages once their prompts are computed."""
        length = -(-length // self.block_size) * self.block_size
        return num_pages * self.page_bytes * length // self.sequence_bytes(length)

    def sequence_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks of a sequence that has so many tokens."""
        return sum(group.most_blocks(num_tokens) * group.block_stride for group in self.groups)


def same_layout(block_size: int, block_bytes: int = 1) -> CacheLayout:
    """Return the layout of layers that all cache every token, and equally many bytes for it."""
    return CacheLayout((CacheGroup((), "full", None, block_size, block_bytes, 1, block_bytes),), block_bytes)


def cache_layout(spec: ModelSpec, ranks: int, itemsize: int, block_size: int, stage: Stage = WHOLE) -> CacheLayout:
    """Return what one of `ranks` of a pipeline stage caches of a model, if a cached value has `itemsize` bytes.

    All stages have the same groups with as many blocks in a page, so that a step means the same to each; a page is only
    as large as the stage's own layers need. Layers count from the stage's first.
    """
    members: dict[tuple[CacheKind, int | None, tuple[int, ...]], dict[int, tuple[int, ...]]] = {}
    held: dict[int, tuple[CacheKind, tuple[int, ...]]] = {}
    for index, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if id(mixer) not in held:
            held[id(mixer)] = _kind(mixer), _sizes(mixer, ranks, itemsize)
        kind, sizes = held[id(mixer)]
        if any(sizes):
            alike = () if kind == "latent" else sizes
            members.setdefault((kind, mixer.window, alike), {})[index] = sizes
    if not members:  # of an encoder: requests hold blocks of next to nothing, as the tables have a place for them
        return same_layout(block_size)
    stages = [stage] if stage.is_only else [Stage(number, stage.partition) for number in range(len(stage.partition))]
    numbers = range(len(spec.layers))
    groups, units, fullest = [], [], []
    for (kind, window, _), of in members.items():
        tokens = 1 if kind == "state" else block_size
        bytes_of = [tokens * sum(sum(of.get(layer, ())) for layer in numbers[each.layers]) for each in stages]
        own = tuple(layer - stage.first for layer in numbers[stage.layers] if layer in of)
        groups.append(CacheGroup(own, kind, window, block_size, bytes_of[stage.number]))
        fullest.append(max(bytes_of))
        sizes_of_group = {size for each in of.values() for size in each}
        units.append(ALIGNMENT if kind == "state" else math.lcm(ALIGNMENT, *sizes_of_group))
    if len(groups) < 2:
        page, counts = max(1, sum(group.block_bytes for group in groups)), [1] * len(groups)
    else:
        page, counts = _best_page(fullest, units)
        if not stage.is_only:
            own_bytes = [count * group.block_bytes for count, group in zip(counts, groups, strict=True)]
            page = max(1, _aligned(max(own_bytes), counts, units))
    paged = [
        replace(group, blocks_per_page=count, block_stride=page // count)
        for group, count in zip(groups, counts, strict=True)
    ]
    return CacheLayout(tuple(paged), page)


def _sizes(mixer: Mixer, ranks: int, itemsize: int) -> tuple[int, ...]:
    """Return the bytes that a layer caches for a token, or for a state: of an index's keys beside the others."""
    share = mixer.cache_share(ranks)
    if isinstance(mixer, LatentAttention) and mixer.index_dim:
        return mixer.latent_values * itemsize, mixer.index_dim * itemsize
    return (round(mixer.cached_values * share) * itemsize + round(mixer.state_values * share) * STATE_BYTES,)


def _kind(mixer: Mixer) -> CacheKind:
    if mixer.kind == "state":
        return "state"
    if mixer.kind == "mla":
        return "latent"
    if mixer.window is None:
        return "full"
    return "chunk" if isinstance(mixer, Attention) and mixer.chunked else "window"


def _best_page(sizes: list[int], units: list[int]) -> tuple[int, list[int]]:
    """Return the bytes of a page, and how many blocks of each size it holds at strides that are multiples of `units`.

    It is the smallest page of which no size leaves more than MOST_WASTE unused, or else the one with the least waste.
    """
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
        powers = [1 << count.bit_length() - 1 for count in most]  # their common multiples are smaller
        for counts in (most, powers):
            page = _aligned(blocks, counts, units)
            waste = max(1 - count * size / page for count, size in zip(counts, sizes, strict=True))
            if waste < best[0] and (page <= limit or not best[1]):
                best = waste, page, counts
        if best[0] <= MOST_WASTE:
            break
    return best[1:]


def _aligned(size: int, counts: list[int], units: list[int]) -> int:
    """Return the bytes of the smallest page of at least `size`, if it holds so many blocks of each group at strides
    that are multiples of `units`."""
    common = math.lcm(*(count * unit for count, unit in zip(counts, units, strict=True)))
    return -(-size // common) * common
