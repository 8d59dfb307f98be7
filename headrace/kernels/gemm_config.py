"""Lists the kernel configurations worth trying for linears over few tokens, by device family and element size.

Which of them serves a size is measured (quantization/gpu_linear.py). The "hip" rows are derived from the chip's 64-wide
waves and 64 kB of LDS, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """Describes one way to run kernels/gemm.py: a program computes block_n outputs."""

    block_m: int
    """tokens of a program, by the matrix units; 1: one token, by ordinary arithmetic or kernels/tiled_vector.py"""
    block_n: int
    block_k: int
    """inputs that are loaded together: by a program, or, for one token and a TiledWeight, by each of its warps"""
    num_warps: int
    num_stages: int = 1
    """such loads that are under way at once"""
    swap: bool = False
    """The weight is the left operand of the product."""
    split: int = 1
    """programs that share an output's inputs; of a TiledWeight"""


BUCKETS = (1, 16, 32, 64, 128)
"""numbers of tokens: a linear gets the configuration of the first that is not smaller; beyond the last, the library"""

CANDIDATES: dict[tuple[str, int | str, int], tuple[GemmConfig, ...]] = {
    # (family, what a weight is of, bucket): bytes of a number that has a scale an output, if any, or a name
    ("cuda", 2, 1): (
        GemmConfig(1, 4, 1024, 4),
        GemmConfig(1, 2, 4096, 4),
        GemmConfig(1, 2, 2048, 8),
    ),
    ("cuda", 2, 16): (
        GemmConfig(16, 64, 256, 4, 4, swap=True),
        GemmConfig(16, 16, 512, 2, 4),
        GemmConfig(16, 128, 128, 8, 4, swap=True),
    ),
    ("cuda", 2, 32): (
        GemmConfig(32, 64, 256, 4, 4, swap=True),
        GemmConfig(32, 32, 512, 4, 3),
        GemmConfig(32, 128, 128, 8, 4, swap=True),
    ),
    ("cuda", 2, 64): (
        GemmConfig(64, 32, 128, 4, 6),
        GemmConfig(64, 64, 128, 4, 5, swap=True),
        GemmConfig(64, 128, 128, 8, 4, swap=True),
    ),
    ("cuda", 2, 128): (
        GemmConfig(128, 256, 64, 8, 4, swap=True),
        GemmConfig(128, 128, 64, 8, 3),
        GemmConfig(64, 64, 128, 4, 5, swap=True),
    ),
    ("cuda", 1, 1): (
        GemmConfig(1, 8, 2048, 4),
        GemmConfig(1, 8, 2048, 2),
        GemmConfig(1, 16, 2048, 8),
    ),
    ("cuda", 1, 16): (
        GemmConfig(16, 64, 256, 4, 6, swap=True),
        GemmConfig(16, 64, 512, 4, 4, swap=True),
        GemmConfig(16, 64, 256, 4, 4, swap=True),
    ),
    ("cuda", 1, 32): (
        GemmConfig(32, 64, 256, 4, 6, swap=True),
        GemmConfig(32, 64, 512, 4, 4, swap=True),
        GemmConfig(32, 128, 256, 8, 4, swap=True),
    ),
    ("cuda", 1, 64): (
        GemmConfig(64, 64, 256, 4, 4, swap=True),
        GemmConfig(64, 32, 256, 4, 6),
        GemmConfig(64, 128, 128, 4, 4, swap=True),
    ),
    ("cuda", 1, 128): (
        GemmConfig(128, 128, 128, 8, 3),
        GemmConfig(128, 64, 256, 4, 4, swap=True),
        GemmConfig(64, 64, 256, 8, 5),
    ),
    ("cuda", "int8", 1): (
        GemmConfig(1, 8, 2048, 4),
        GemmConfig(1, 4, 2048, 2),
        GemmConfig(1, 16, 2048, 8),
    ),
    ("cuda", "int8", 16): (
        GemmConfig(16, 64, 256, 4, 6, swap=True),
        GemmConfig(16, 64, 256, 4, 4, swap=True),
        GemmConfig(16, 16, 1024, 2, 4),
    ),
    ("cuda", "int8", 32): (
        GemmConfig(32, 64, 256, 4, 6, swap=True),
        GemmConfig(32, 64, 256, 4, 4, swap=True),
    ),
    ("cuda", "int8", 64): (
        GemmConfig(64, 64, 256, 4, 5, swap=True),
        GemmConfig(64, 32, 256, 4, 6),
        GemmConfig(64, 64, 128, 4, 6),
    ),
    ("cuda", "int8", 128): (
        GemmConfig(64, 64, 256, 4, 5, swap=True),
        GemmConfig(128, 128, 128, 8, 3, swap=True),
    ),
    ("cuda", "fp8 blocks", 1): (
        GemmConfig(1, 8, 2048, 2),
        GemmConfig(1, 4, 2048, 4),
        GemmConfig(1, 16, 2048, 8),
    ),
    ("cuda", "fp8 blocks", 16): (
        GemmConfig(16, 64, 256, 4, 6, swap=True),
        GemmConfig(16, 128, 256, 4, 3, swap=True),
    ),
    ("cuda", "fp8 blocks", 32): (
        GemmConfig(32, 64, 256, 4, 6, swap=True),
        GemmConfig(32, 128, 128, 4, 4, swap=True),
    ),
    ("cuda", "fp8 blocks", 64): (
        GemmConfig(64, 64, 256, 4, 4),
        GemmConfig(64, 32, 256, 4, 6),
    ),
    ("cuda", "fp8 blocks", 128): (
        GemmConfig(64, 64, 256, 4, 4),
        GemmConfig(128, 64, 128, 4, 4, swap=True),
    ),
    ("hip", "int8", 1): (GemmConfig(1, 4, 2048, 4),),
    ("hip", "int8", 16): (GemmConfig(16, 32, 128, 4, 2),),
    ("hip", "int8", 32): (GemmConfig(32, 32, 128, 4, 2),),
    ("hip", "int8", 64): (GemmConfig(64, 64, 128, 4, 2),),
    ("hip", "int8", 128): (GemmConfig(128, 64, 128, 4, 2),),
    ("hip", "fp8 blocks", 1): (GemmConfig(1, 4, 2048, 4),),
    ("hip", "fp8 blocks", 16): (GemmConfig(16, 32, 128, 4, 2),),
    ("hip", "fp8 blocks", 32): (GemmConfig(32, 32, 128, 4, 2),),
    ("hip", "fp8 blocks", 64): (GemmConfig(64, 64, 128, 4, 2),),
    ("hip", "fp8 blocks", 128): (GemmConfig(128, 64, 128, 4, 2),),
    ("hip", 2, 1): (GemmConfig(1, 4, 1024, 4),),
    ("hip", 2, 16): (GemmConfig(16, 32, 256, 4, 2),),
    ("hip", 2, 32): (GemmConfig(32, 32, 256, 4, 2),),
    ("hip", 2, 64): (GemmConfig(64, 64, 128, 4, 2),),
    ("hip", 2, 128): (GemmConfig(128, 64, 64, 4, 2),),
}


MANY_TOKENS: dict[tuple[str, str], GemmConfig] = {
    # (family, what a weight is of): beyond the last bucket, of weights that no library serves
    ("cuda", "int8"): GemmConfig(128, 128, 128, 8, 3),
    ("cuda", "fp8 blocks"): GemmConfig(64, 128, 128, 4, 4),
    ("cuda", "fp8"): GemmConfig(64, 128, 128, 4, 4),
    ("hip", "int8"): GemmConfig(128, 128, 128, 8, 2),
    ("hip", "fp8 blocks"): GemmConfig(128, 128, 128, 8, 2),
    ("hip", "fp8"): GemmConfig(128, 128, 128, 8, 2),
}


def _tiles(block_m: int, *shapes: tuple[int, int, int, int, int]) -> tuple[GemmConfig, ...]:
    """Return configurations for a TiledWeight, given (outputs, inputs, programs, stages, warps) of each."""
    return tuple(
        GemmConfig(block_m, outputs, inputs, warps, stages, True, split)
        for outputs, inputs, split, stages, warps in shapes
    )


_FEW = ((64, 128, 8, 6, 4), (64, 256, 4, 4, 4), (64, 256, 2, 2, 4), (64, 128, 8, 3, 4))
TILED: dict[tuple[str, int], tuple[GemmConfig, ...]] = {
    # (family, bucket)
    ("cuda", 1): tuple(
        GemmConfig(1, outputs, 128, warps, ahead)
        for outputs, warps, ahead in ((32, 8, 1), (16, 8, 2), (16, 16, 1), (32, 4, 1), (32, 8, 2))
    )
    + _tiles(16, (64, 128, 8, 6, 4)),
    ("cuda", 16): _tiles(16, *_FEW),
    ("cuda", 32): _tiles(32, (64, 256, 4, 3, 4), (64, 128, 8, 4, 4), (128, 128, 2, 3, 4)),
    ("cuda", 64): _tiles(64, (64, 128, 2, 4, 4), (64, 128, 4, 4, 4), (128, 128, 1, 3, 4)),
    ("cuda", 128): _tiles(128, (128, 128, 1, 3, 8), (128, 128, 4, 4, 8))
    + _tiles(64, (64, 128, 1, 4, 4), (64, 128, 2, 4, 4)),
    ("hip", 1): _tiles(16, (64, 128, 4, 2, 4)),
    ("hip", 16): _tiles(16, (64, 128, 4, 2, 4)),
    ("hip", 32): _tiles(32, (64, 128, 4, 2, 8)),
    ("hip", 64): _tiles(64, (64, 128, 2, 2, 8)),
    ("hip", 128): _tiles(64, (64, 128, 1, 2, 8)),
}
"""what is worth trying for a TiledWeight (kernels/tiled.py)"""
