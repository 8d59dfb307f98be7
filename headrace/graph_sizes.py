"""CUDA graphs as numbers: which sizes of steps are worth one, and what each takes of the device's memory.

Planner and ranks count with the same; nothing here captures.
"""

from __future__ import annotations

MOST_TOKENS = 512
"""Steps with prompts in them are captured up to here: a larger one computes for longer than it takes to launch."""
FULL_GRAPH_BYTES = 1 << 20
"""What the driver keeps of one graph of a whole step, beside the pool (H200: 35 took 41 MiB, pool included)"""
PIECE_BYTES = 1 << 16
"""... and of one piece of a step"""
WORKSPACE_BYTES = 64 << 20
"""... and what the matrix libraries take once more on the stream of the captures"""


def capture_sizes(largest: int) -> list[int]:
    """Sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 up to 512, every 64 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, largest + 64, 64)]
    return sorted({min(size, largest) for size in sizes})
