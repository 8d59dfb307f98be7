"""Lists how the experts' kernels are launched: tile sizes, warps and stages by tokens, experts and device family.

The "hip" rows are derived from the chip's 64-wide waves and 64 kB of LDS, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Describes a program of one product: block_n outputs (of gate and of up each), block_k inputs at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    """The weight is the left operand of the matrix units."""
    group: int = 1
    """in the second product of a token by itself: experts whose weights are loaded at once"""


@dataclass(frozen=True)
class MoeConfig:
    """Describes how a layer's experts are computed."""

    block_m: int
    """(token, expert) pairs of a tile; 1: no tiles, each token is computed by itself, by ordinary arithmetic"""
    up: Tile
    """of the first product, to gate and up"""
    down: Tile
    """of the second"""


FEW_TOKENS = {(family, size): 2 for family in ("cuda", "hip") for size in (1, 2, 4)}
"""(family, bytes of a weight) -> most tokens that are computed one by one: so few hardly share an expert, so nothing is
read twice, and neither sorting nor a third kernel is needed"""

FEW: dict[tuple[str, int], MoeConfig] = {
    ("cuda", 1): MoeConfig(1, Tile(4, 2048, 8, 1), Tile(1, 1024, 2, 1, group=8)),
    ("cuda", 2): MoeConfig(1, Tile(2, 2048, 8, 1), Tile(1, 1024, 1, 1, group=4)),
    ("cuda", 4): MoeConfig(1, Tile(4, 512, 4, 1), Tile(4, 512, 4, 1, group=2)),
    ("hip", 1): MoeConfig(1, Tile(8, 1024, 4, 1), Tile(4, 512, 2, 1, group=4)),
    ("hip", 2): MoeConfig(1, Tile(4, 1024, 4, 1), Tile(4, 256, 2, 1, group=4)),
    ("hip", 4): MoeConfig(1, Tile(4, 512, 4, 1), Tile(4, 256, 2, 1, group=4)),
}

MANY: dict[tuple[str, int], tuple[tuple[float, MoeConfig], ...]] = {
    # (most pairs per expert, what serves them); up to about 16, reading weights is all that costs. The rows of 2 bytes
    # on NVIDIA were measured on an H200, at the sizes of Qwen3-30B-A3B.
    ("cuda", 2): (
        (4, MoeConfig(16, Tile(32, 128, 4, 4, swap=True), Tile(128, 128, 4, 3, swap=True))),
        (12, MoeConfig(16, Tile(64, 128, 4, 3, swap=True), Tile(128, 128, 4, 3, swap=True))),
        (48, MoeConfig(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 4))),
        (256, MoeConfig(128, Tile(128, 64, 8, 3), Tile(256, 64, 8, 3))),
        (float("inf"), MoeConfig(128, Tile(128, 64, 8, 3), Tile(256, 32, 8, 5))),
    ),
    ("cuda", 4): (
        (16, MoeConfig(16, Tile(16, 64, 4, 3), Tile(32, 64, 4, 3))),
        (float("inf"), MoeConfig(32, Tile(16, 32, 4, 3), Tile(32, 32, 4, 3))),
    ),
    ("hip", 2): (
        (8, MoeConfig(16, Tile(32, 128, 4, 2), Tile(64, 128, 4, 2))),
        (64, MoeConfig(64, Tile(32, 64, 4, 2), Tile(64, 64, 4, 2))),
        (float("inf"), MoeConfig(128, Tile(64, 64, 8, 2), Tile(128, 64, 8, 2))),
    ),
    ("hip", 4): (
        (16, MoeConfig(16, Tile(16, 64, 4, 2), Tile(32, 64, 4, 2))),
        (float("inf"), MoeConfig(32, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2))),
    ),
}


def _as_many_bytes(config: MoeConfig) -> MoeConfig:
    """Return the configuration for weights of half the bytes: tiles with twice the inputs."""
    up, down = (replace(tile, block_k=2 * tile.block_k) for tile in (config.up, config.down))
    return replace(config, up=up, down=down)


for _family in ("cuda", "hip"):  # not measured for weights of one byte
    MANY[_family, 1] = tuple((most, _as_many_bytes(config)) for most, config in MANY[_family, 2])


INVARIANT: dict[tuple[str, int], MoeConfig] = {
    ("cuda", 2): MoeConfig(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("cuda", 4): MoeConfig(16, Tile(16, 64, 4, 3), Tile(32, 64, 4, 3)),
    ("hip", 2): MoeConfig(64, Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("hip", 4): MoeConfig(16, Tile(16, 64, 4, 2), Tile(32, 64, 4, 2)),
}
"""the configuration of batch invariance: one for all sizes of a batch, so that a token's sums are made by the same
instructions in the same order. Weights in fp8 do not go with it (planner/decisions.py)."""


def pick_moe_config(
    num_tokens: int, top_k: int, num_experts: int, element_size: int, family: str, invariant: bool = False
) -> MoeConfig:
    """Return the tables' choice. `element_size`: bytes of a weight."""
    key = (family, element_size)
    if invariant:
        return INVARIANT[key]
    if num_tokens <= FEW_TOKENS[key]:
        return FEW[key]
    return next(config for most, config in MANY[key] if num_tokens * top_k <= most * num_experts)
