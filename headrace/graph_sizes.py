"""CUDA graphs as numbers: which sizes of steps are worth one, and what each takes of the device's memory.

Planner and ranks count with the same; nothing here captures.
"""

from __future__ import annotations

MOST_TOKENS = 512
"""Steps with prompts in them are captured up to here: a larger one computes for longer than it takes to launch."""
MOST_TOKENS_FP8 = 2048
"""... and up to here, in pieces, where linears are fp8: twice the launches for half the work (H200, 8B: the host takes
24 ms to launch a step, which the GPU has done in 12.4 at 1024 tokens)"""
FULL_GRAPH_BYTES = 1 << 20
"""What the driver keeps of one graph of a whole step, beside the pool (H200: 35 took 41 MiB, pool included)"""
PIECE_BYTES = 1 << 16
"""... and of one piece of a step"""
WORKSPACE_BYTES = 64 << 20
"""... and what the matrix libraries take once more on the stream of the captures"""


def most_mixed_tokens(kind: str, fp8: bool) -> int:
    """of a captured step with prompts in it; `kind`: full or piecewise"""
    return MOST_TOKENS_FP8 if fp8 and kind == "piecewise" else MOST_TOKENS


def capture_sizes(largest: int) -> list[int]:
    """Sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 up to 512, every 64 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, largest + 64, 64)]
    return sorted({min(size, largest) for size in sizes})
