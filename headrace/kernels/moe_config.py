"""Lists how the experts' kernels are launched: tile sizes, warps and stages by tokens, experts and device family.

The "hip" rows are derived from the chip's 64-wide waves and 64 kB of LDS, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["float", "half", "fp8", "tiled8", "tiled4"]
"""How experts' weights are held: in 32 or 16 bits, in fp8 with activations in fp8, or tiled (tiled.py) in 8 or 4 bits
with activations of 16"""
BYTES: dict[Kind, float] = {"float": 4, "half": 2, "fp8": 1, "tiled8": 1, "tiled4": 0.5}
"""of a weight"""


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
    split: int = 1
    """programs that share an output's inputs; of tiled weights, whose block_k is a multiple of 128, and of which a
    program has a multiple of 64 rows"""


@dataclass(frozen=True)
class MoeConfig:
    """Describes how a layer's experts are computed."""

    block_m: int
    """(token, expert) pairs of a tile; 1: each token is computed by itself, by ordinary arithmetic or, if weights are
    tiled, by moe_vector.py: a program has a multiple of 16 outputs, and a warp holds num_stages blocks"""
    up: Tile
    """of the first product, to gate and up"""
    down: Tile
    """of the second"""


FEW_TOKENS: dict[tuple[str, Kind], int] = {
    **{(family, kind): 2 for family in ("cuda", "hip") for kind in BYTES},
    ("hip", "tiled4"): 0,
    ("hip", "tiled8"): 0,
}
"""(family, kind of weights) -> most tokens that are computed one by one: so few hardly share an expert, so nothing is
read twice, and neither sorting nor a third kernel is needed. AMD's matrix units take no 8 tokens (moe_vector.py)."""

FEW: dict[tuple[str, Kind], MoeConfig] = {
    ("cuda", "tiled4"): MoeConfig(1, Tile(16, 128, 4, 1), Tile(16, 128, 16, 1, group=4)),
    ("cuda", "tiled8"): MoeConfig(1, Tile(16, 128, 4, 1), Tile(16, 128, 8, 1, group=4)),
    ("cuda", "fp8"): MoeConfig(1, Tile(4, 2048, 8, 1), Tile(1, 1024, 2, 1, group=8)),
    ("cuda", "half"): MoeConfig(1, Tile(2, 2048, 8, 1), Tile(1, 1024, 1, 1, group=4)),
    ("cuda", "float"): MoeConfig(1, Tile(4, 512, 4, 1), Tile(4, 512, 4, 1, group=2)),
    ("hip", "fp8"): MoeConfig(1, Tile(8, 1024, 4, 1), Tile(4, 512, 2, 1, group=4)),
    ("hip", "half"): MoeConfig(1, Tile(4, 1024, 4, 1), Tile(4, 256, 2, 1, group=4)),
    ("hip", "float"): MoeConfig(1, Tile(4, 512, 4, 1), Tile(4, 256, 2, 1, group=4)),
}

MANY: dict[tuple[str, Kind], tuple[tuple[float, MoeConfig], ...]] = {
    # (most pairs per expert, what serves them); up to about 16, reading weights is all that costs. On NVIDIA, rows of
    # 16 bits and fp8 were measured on an H200 at the sizes of Qwen3-30B-A3B, those of 4 at gpt-oss-20b's too, up to 128
    # tokens; tiled ones of 8 at DeepSeek-V3's with 128 pairs each, which fill tiles of 64 better than those of 128.
    ("cuda", "tiled4"): (
        (12, MoeConfig(16, Tile(64, 128, 4, 4), Tile(128, 128, 4, 4))),
        (24, MoeConfig(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (96, MoeConfig(64, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (float("inf"), MoeConfig(128, Tile(64, 128, 8, 3), Tile(128, 128, 8, 3))),
    ),
    ("cuda", "tiled8"): (
        (12, MoeConfig(16, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (24, MoeConfig(32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3))),
        (192, MoeConfig(64, Tile(64, 128, 8, 3), Tile(128, 128, 8, 3))),
        (float("inf"), MoeConfig(128, Tile(64, 128, 8, 3), Tile(128, 128, 8, 3))),
    ),
    ("cuda", "half"): (
        (4, MoeConfig(16, Tile(32, 128, 4, 4, swap=True), Tile(128, 128, 4, 3, swap=True))),
        (12, MoeConfig(16, Tile(64, 128, 4, 3, swap=True), Tile(128, 128, 4, 3, swap=True))),
        (48, MoeConfig(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 4))),
        (256, MoeConfig(128, Tile(128, 64, 8, 3), Tile(256, 64, 8, 3))),
        (float("inf"), MoeConfig(128, Tile(128, 64, 8, 3), Tile(256, 32, 8, 5))),
    ),
    ("cuda", "float"): (
        (16, MoeConfig(16, Tile(16, 64, 4, 3), Tile(32, 64, 4, 3))),
        (float("inf"), MoeConfig(32, Tile(16, 32, 4, 3), Tile(32, 32, 4, 3))),
    ),
    ("hip", "half"): (
        (8, MoeConfig(16, Tile(32, 128, 4, 2), Tile(64, 128, 4, 2))),
        (64, MoeConfig(64, Tile(32, 64, 4, 2), Tile(64, 64, 4, 2))),
        (float("inf"), MoeConfig(128, Tile(64, 64, 8, 2), Tile(128, 64, 8, 2))),
    ),
    ("hip", "float"): (
        (16, MoeConfig(16, Tile(16, 64, 4, 2), Tile(32, 64, 4, 2))),
        (float("inf"), MoeConfig(32, Tile(16, 32, 4, 2), Tile(32, 32, 4, 2))),
    ),
}


def _as_many_bytes(config: MoeConfig) -> MoeConfig:
    """Return the configuration for weights of half the bytes: tiles with twice the inputs."""
    up, down = (replace(tile, block_k=2 * tile.block_k) for tile in (config.up, config.down))
    return replace(config, up=up, down=down)


for _family in ("cuda", "hip"):  # not measured beyond 12 pairs an expert
    MANY[_family, "fp8"] = tuple((most, _as_many_bytes(config)) for most, config in MANY[_family, "half"])
_FEW_IN_FP8 = MoeConfig(16, Tile(32, 256, 4, 3, swap=True), Tile(64, 128, 4, 3, swap=True))
MANY["cuda", "fp8"] = ((12, _FEW_IN_FP8), *MANY["cuda", "fp8"][2:])
# Four waves, or eight with twice the outputs, have more masks and addresses to hold than scalar registers.
_OF_EIGHT_WAVES = Tile(32, 128, 8, 2), Tile(64, 128, 8, 2)
MANY["hip", "tiled4"] = MANY["hip", "tiled8"] = (
    (12, MoeConfig(16, *_OF_EIGHT_WAVES)),
    (24, MoeConfig(32, *_OF_EIGHT_WAVES)),
    (96, MoeConfig(64, *_OF_EIGHT_WAVES)),
    (float("inf"), MoeConfig(128, *_OF_EIGHT_WAVES)),
)


INVARIANT: dict[tuple[str, Kind], MoeConfig] = {
    ("cuda", "tiled4"): MoeConfig(64, Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
    ("cuda", "tiled8"): MoeConfig(64, Tile(32, 128, 4, 3), Tile(64, 128, 4, 3)),
    ("cuda", "half"): MoeConfig(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    ("cuda", "float"): MoeConfig(16, Tile(16, 64, 4, 3), Tile(32, 64, 4, 3)),
    ("hip", "tiled4"): MoeConfig(64, *_OF_EIGHT_WAVES),
    ("hip", "tiled8"): MoeConfig(64, *_OF_EIGHT_WAVES),
    ("hip", "half"): MoeConfig(64, Tile(32, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("hip", "float"): MoeConfig(16, Tile(16, 64, 4, 2), Tile(32, 64, 4, 2)),
}
"""the configuration of batch invariance: one for all sizes of a batch, so that a token's sums are made by the same
instructions in the same order. Weights in fp8 do not go with it (planner/decisions.py)."""


def pick_moe_config(
    num_tokens: int, top_k: int, num_experts: int, kind: Kind, family: str, invariant: bool = False
) -> MoeConfig:
    """Return the tables' choice."""
    key = (family, kind)
    if invariant:
        return INVARIANT[key]
    if num_tokens <= FEW_TOKENS[key]:
        return FEW[key]
    return next(config for most, config in MANY[key] if num_tokens * top_k <= most * num_experts)
