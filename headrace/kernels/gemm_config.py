"""How linears over few tokens are launched, as data: which kernels are worth trying, by device family and element size.

Pure data; which of them serves which size is measured (quantization/gpu_linear.py). The "hip" rows are derived from the
chip's 64-wide waves and 64 kB of LDS, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmConfig:
    """One way to run a skinny GEMM. block_m 1: by multiply and add, for one token; else by the matrix units, block_m
    tokens a program."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    swap: bool = False
    """the weight is the left operand of the product"""


BUCKETS = (1, 16, 32, 64, 128)
"""A linear over at most this many tokens gets the bucket's kernel; beyond the last, the vendor's library."""

CANDIDATES: dict[tuple[str, int, int], tuple[GemmConfig, ...]] = {
    # (family, bytes an element, bucket); the first serves sizes that nobody has measured
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
    ("hip", 2, 1): (GemmConfig(1, 4, 1024, 4),),
    ("hip", 2, 16): (GemmConfig(16, 32, 256, 4, 2),),
    ("hip", 2, 32): (GemmConfig(32, 32, 256, 4, 2),),
    ("hip", 2, 64): (GemmConfig(64, 64, 128, 4, 2),),
    ("hip", 2, 128): (GemmConfig(128, 64, 64, 4, 2),),
}
