"""Plans how attention's kernels are launched: tile sizes, warps, stages and splits by shape and device family.

Imports no torch. Tests compile what the tables say ahead of time for GPUs that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True)
class AttentionConfig:
    """Describes one way to run an attention kernel: a tile is block_m rows (queries x GQA group) by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fp_fusion: bool = True
    """A product and a sum may become one instruction, which rounds once. That is faster, but where it happens may
    differ from loop to loop."""
    copy_engine: bool = False
    """The kernel is that of prefill.py, for NVIDIA GPUs of compute capability 9.0, which splits no keys."""
    early_keys: bool = False
    """The fused decode kernel loads a part's first tile of keys and values before its query is there."""


DECODE: dict[tuple[str, int, int], AttentionConfig] = {
    # (family, bytes of an element of the cache, widest head_dim): many stages and few warps, to have keys in flight
    # (1: an fp8 cache. Its rows but that of 128, and hip's, are derived, not measured)
    ("cuda", 1, 64): AttentionConfig(16, 64, 2, 4),
    ("cuda", 1, 128): AttentionConfig(16, 32, 1, 6),
    ("cuda", 1, 256): AttentionConfig(16, 32, 4, 4),
    ("cuda", 2, 64): AttentionConfig(16, 64, 2, 4),
    ("cuda", 2, 128): AttentionConfig(16, 32, 1, 4),
    ("cuda", 2, 256): AttentionConfig(16, 32, 4, 3),
    ("cuda", 4, 64): AttentionConfig(16, 32, 4, 3),
    ("cuda", 4, 128): AttentionConfig(16, 32, 4, 2),
    ("cuda", 4, 256): AttentionConfig(16, 16, 4, 2),
    ("hip", 1, 64): AttentionConfig(16, 64, 4, 2),
    ("hip", 1, 128): AttentionConfig(16, 64, 4, 2),
    ("hip", 1, 256): AttentionConfig(16, 32, 4, 2),
    ("hip", 2, 64): AttentionConfig(16, 64, 4, 2),
    ("hip", 2, 128): AttentionConfig(16, 64, 4, 2),
    ("hip", 2, 256): AttentionConfig(16, 32, 4, 2),
    ("hip", 4, 64): AttentionConfig(16, 32, 4, 1),
    ("hip", 4, 128): AttentionConfig(16, 32, 4, 1),
    ("hip", 4, 256): AttentionConfig(16, 16, 4, 1),
}

PREFILL: dict[tuple[str, int, int], AttentionConfig] = {
    ("cuda", 1, 64): AttentionConfig(64, 64, 4, 2),
    ("cuda", 1, 128): AttentionConfig(64, 64, 4, 2),
    ("cuda", 1, 256): AttentionConfig(64, 32, 8, 2),
    ("cuda", 2, 64): AttentionConfig(128, 64, 4, 3),
    ("cuda", 2, 128): AttentionConfig(64, 64, 4, 2),
    ("cuda", 2, 256): AttentionConfig(64, 32, 8, 2),
    ("cuda", 4, 64): AttentionConfig(32, 32, 4, 2),
    ("cuda", 4, 128): AttentionConfig(32, 32, 4, 2),
    ("cuda", 4, 256): AttentionConfig(16, 16, 4, 2),
    ("hip", 1, 64): AttentionConfig(128, 32, 4, 1),
    ("hip", 1, 128): AttentionConfig(128, 32, 4, 1),
    ("hip", 1, 256): AttentionConfig(64, 32, 4, 1),
    ("hip", 2, 64): AttentionConfig(128, 32, 4, 1),
    ("hip", 2, 128): AttentionConfig(128, 32, 4, 1),
    ("hip", 2, 256): AttentionConfig(64, 32, 4, 1),
    ("hip", 4, 64): AttentionConfig(32, 32, 4, 1),
    ("hip", 4, 128): AttentionConfig(32, 32, 4, 1),
    ("hip", 4, 256): AttentionConfig(16, 16, 4, 1),
}

PARTIAL_PREFILL: dict[tuple[str, int, int], AttentionConfig] = {
    # like PREFILL, for heads that fill no power of two: beside their masks, two stages spill registers
    ("cuda", 2, 128): AttentionConfig(64, 64, 4, 3),
}
WINDOW_PREFILL: dict[tuple[str, int, int], AttentionConfig] = {
    # like PREFILL, for windows of up to SMALL_WINDOW keys: in smaller tiles fewer of the products are masked
    ("cuda", 2, 64): AttentionConfig(64, 32, 4, 3),
}
SMALL_WINDOW = 256

COPY_ENGINE_PREFILL: dict[int, AttentionConfig] = {
    # head_dim (a cache of the queries' type, 16 bits)
    64: AttentionConfig(128, 128, 4, 2, copy_engine=True),
    128: AttentionConfig(128, 64, 4, 2, copy_engine=True),
}
UNPACKED_BLOCK = 64
"""tokens of a block of the 16-bit cache into which an fp8 one is unpacked for COPY_ENGINE_PREFILL (fp8_cache.py)"""
UNPACKED_BYTES = 256 << 20
"""size of that cache, allocated once"""
UNPACKED_ROWS = 256
"""query tokens x GQA group of a prompt, on average, from which on unpacking saves more than it costs"""
FILLED = 1 / 2
"""COPY_ENGINE_PREFILL serves if at least this share of the multiprocessors get a tile (measured from 0.55 on)."""
MOST_GROUP = 64
"""the most query heads of a KV head that it serves: the rows of half a tile"""
SMALLEST_BOX = 8
"""the fewest tokens of a block of the cache that it serves, for the copy engine to place them"""

WIDEST_HEAD = 256
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4
"""programs wanted for each multiprocessor: several are resident at once, and lengths are ragged (measured on H200)"""
TILES_PER_SPLIT = 2
"""the fewest tiles of keys of a split, unless it is the only one"""


def pick_config(
    decode: bool, head_dim: int, group: int, element_size: int, family: str, window: int | None = None
) -> AttentionConfig:
    """Return the tables' choice; `group`: query heads of a KV head. Raises KeyError for heads over WIDEST_HEAD."""
    width = next(width for width in (64, 128, 256, head_dim) if head_dim <= width)
    key = family, element_size, width
    config = (DECODE if decode else PREFILL)[key]
    if not decode and head_dim < width:
        config = PARTIAL_PREFILL.get(key, config)
    if not decode and window is not None and window <= SMALL_WINDOW:
        config = WINDOW_PREFILL.get(key, config)
    block_m = max(config.block_m, 1 << (group - 1).bit_length())
    return replace(config, block_m=block_m)


def pick_splits(tiles_of_queries: int, num_kv_heads: int, max_seq_len: int, block_n: int, num_sms: int) -> int:
    """Return the number of splits of the keys of each tile of queries: a power of two, 1 if there are programs enough.

    It depends on the greatest possible length, not on current ones, so that a graph may contain it; programs of splits
    beyond a sequence's own length end at once.
    """
    programs = tiles_of_queries * num_kv_heads
    wanted = -(-PROGRAMS_PER_SM * num_sms // programs)
    useful = -(-max_seq_len // (block_n * TILES_PER_SPLIT))
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits - 1).bit_length()


@dataclass(frozen=True)
class AttentionPlan:
    """Describes a step's attention launches, which are the same for all layers of a shape."""

    num_decodes: int
    """requests at the front of the batch that run one token each; `decode` is theirs, `prefill` that of the others"""
    decode: AttentionConfig
    decode_splits: int
    prefill: AttentionConfig
    prefill_splits: int
    prefill_tiles: int
    """an upper bound of the tiles of queries of the requests behind the decodes; 0: there are none"""
    unpacked_blocks: int = 0
    """blocks of the unpacked cache for each of those requests; 0: they read the cache itself"""


@lru_cache(maxsize=1024)
def plan_attention(
    num_reqs: int,
    num_tokens: int,
    num_decodes: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    family: str,
    num_sms: int,
    batch_invariant: bool = False,
    copy_engine: bool = False,
    max_prompt_len: int = 0,
    window: int | None = None,
) -> AttentionPlan:
    """Return the launches for a step of these sizes.

    `window` is the most keys that a query sees, or None. `max_seq_len` is an upper bound, which for a graph holds for
    all later steps: max_model_len. `max_prompt_len` is one for the requests behind the decodes, or 0. `copy_engine`:
    COPY_ENGINE_PREFILL may serve prompts; it does if its tiles fill half of the chip, and an fp8 cache only if what
    prompts read fits unpacked, and is read often enough.
    `batch_invariant`: decodes run as prompts of one token, and keys are not split. So the keys of a query are added up
    in tiles that begin at multiples of block_n, in order, whatever else runs and wherever its prompt was cut.
    """
    group = num_heads // num_kv_heads
    if batch_invariant:
        config = replace(pick_config(False, head_dim, group, element_size, family, window), fp_fusion=False)
        return AttentionPlan(0, config, 1, config, 1, num_tokens // (config.block_m // group) + num_reqs)
    decode = pick_config(True, head_dim, group, element_size, family)
    prefill = pick_config(False, head_dim, group, element_size, family, window)
    decode_splits = prefill_splits = 1
    tiles, seen = 0, window or max_seq_len
    if num_decodes:
        decode_splits = pick_splits(num_decodes, num_kv_heads, min(max_seq_len, seen), decode.block_n, num_sms)
    if num_reqs > num_decodes:
        prompts, tokens = num_reqs - num_decodes, num_tokens - num_decodes
        if copy_engine and head_dim in COPY_ENGINE_PREFILL:
            plan = AttentionPlan(num_decodes, decode, decode_splits, prefill, 1, 0)
            longest = max_prompt_len or max_seq_len
            plan = by_copy_engine(plan, prompts, tokens, longest, head_dim, group, element_size)
            room = UNPACKED_BYTES // unpacked_block_bytes(num_kv_heads, head_dim)
            read = not plan.unpacked_blocks or (
                prompts * plan.unpacked_blocks <= room and tokens * group >= prompts * UNPACKED_ROWS
            )
            if read and plan.prefill_tiles * num_kv_heads >= FILLED * num_sms:
                return plan
        tiles = _tiles(prefill, prompts, tokens, group)
        # Two programs fill a multiprocessor; and where two thirds of the chip have work, combining the splits of so
        # many queries costs what they gain.
        longest = min(max_seq_len, seen + prefill.block_m // group)
        prefill_splits = pick_splits(3 * tiles, num_kv_heads, longest, prefill.block_n, num_sms)
    return AttentionPlan(num_decodes, decode, decode_splits, prefill, prefill_splits, tiles)


def by_copy_engine(
    plan: AttentionPlan, prompts: int, tokens: int, longest: int, head_dim: int, group: int, element_size: int
) -> AttentionPlan:
    """Return `plan` with its prompts, of `tokens` in all and `longest` keys at most, served by COPY_ENGINE_PREFILL."""
    config = COPY_ENGINE_PREFILL[head_dim]
    blocks = -(-longest // UNPACKED_BLOCK) if element_size == 1 else 0
    tiles = _tiles(config, prompts, tokens, group)
    return replace(plan, prefill=config, prefill_splits=1, prefill_tiles=tiles, unpacked_blocks=blocks)


def unpacked_block_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block of the unpacked cache: keys and values in 16 bits."""
    return 2 * 2 * UNPACKED_BLOCK * num_kv_heads * head_dim


def _tiles(config: AttentionConfig, prompts: int, tokens: int, group: int) -> int:
    """Return an upper bound of the prompts' tiles; one of n tokens has n // block_q + 1."""
    return tokens // (config.block_m // group) + prompts


class FewDecodes(NamedTuple):
    """Describes the fused decode kernel for few requests, when what counts is how soon each program is done."""

    config: AttentionConfig
    most: int
    """requests times KV heads up to which it serves"""
    wanted: int
    """programs wanted of each multiprocessor"""
    window: int | None = None
    """the widest window for which it serves; None: for any, and where there is none"""


FEW_DECODES: dict[tuple[str, int, int], tuple[FewDecodes, ...]] = {
    # like DECODE; the first that serves is taken. Those of two bytes are on the chip all at once.
    ("cuda", 1, 128): (FewDecodes(AttentionConfig(16, 128, 4, 2), 131, 8),),
    # a window of at most one tile of keys, which is all that a program waits for
    ("cuda", 2, 64): (FewDecodes(AttentionConfig(16, 128, 4, 2, early_keys=True), 131, 8, window=128),),
    ("cuda", 2, 128): (
        FewDecodes(AttentionConfig(16, 64, 4, 2, early_keys=True), 16, 2),  # leaves room for the kernels beside it
        FewDecodes(AttentionConfig(16, 128, 4, 2, early_keys=True), 264, 2),
    ),
}
DECODES_PER_SM = 8
"""programs wanted of the fused decode kernel for each multiprocessor: those beyond a sequence's end cost little, and
parts need no second kernel"""


@lru_cache(maxsize=1024)
def plan_decode(
    num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int, family: str, num_sms: int,
    window: int | None = None,
) -> tuple[AttentionConfig, int]:  # fmt: skip
    """Return the fused decode kernel's configuration, and the most parts that a request's keys are cut into. They do
    not depend on lengths, so a graph may contain them. `element_size` is that of the cache, `window` the most keys that
    a query sees."""
    group, programs = num_heads // num_kv_heads, num_reqs * num_kv_heads
    config, wanted = pick_config(True, head_dim, group, element_size, family), DECODES_PER_SM
    key = (family, element_size, next(width for width in (64, 128, 256) if head_dim <= width))
    for few in FEW_DECODES.get(key, ()):
        if programs <= few.most and (few.window is None or (window is not None and window <= few.window)):
            config, wanted = replace(few.config, block_m=config.block_m), few.wanted
            break
    splits = max(1, min(wanted * num_sms // programs, MAX_SPLITS))
    if window is not None:  # its keys in the cache: all but the new one
        splits = min(splits, max(1, -(-(window - 1) // (config.block_n * TILES_PER_SPLIT))))
    return config, 1 << (splits.bit_length() - 1)
