"""CUDA graphs as numbers: which sizes of steps are worth one, and what each takes of the device's memory.

Planner and ranks count with the same; nothing here captures.
"""

from __future__ import annotations

MOST_TOKENS = 512
"""Steps with prompts in them are captured up to here, or further in pieces where a layer is small"""
MOST_IN_PIECES = 2048
LAUNCHED = 1.2e11
"""Tokens times weights of a layer: with more of them it computes for longer than it takes to launch. (H200: of an 8B in
bf16 both take 14 ms at 600 tokens; of Qwen3-30B-A3B 36 at 2048; in fp8 a step takes 24 ms to launch, and to compute at
1800 tokens)"""
LAYER_BYTES = 9 << 12
"""What the driver keeps of a layer in a graph of a whole step, beside the pool (H200, 67 graphs after the first: 28 KiB
each of an 8B, 36 of Qwen3-30B-A3B)"""
PIECE_BYTES = 1 << 17
"""... and of one piece of a step (29 sizes after the first of an 8B: 128 KiB a piece, 53 of
Qwen3-30B-A3B: 130)"""
WORKSPACE_BYTES = 64 << 20
"""... and what the matrix libraries take once more on the stream of the captures"""


def most_in_pieces(layer_weights: float) -> int:
    """Tokens of the largest step with prompts in it that is captured in pieces. `layer_weights`: what a token is
    multiplied with in a layer, on one rank, each as its format counts (`WeightFormat.launched_as`)."""
    tokens = LAUNCHED / max(1.0, layer_weights)
    return max(MOST_TOKENS, int(min(MOST_IN_PIECES, tokens)) // 64 * 64)


def capture_sizes(largest: int) -> list[int]:
    """Sizes worth a graph: 1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 up to 512, every 64 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, largest + 64, 64)]
    return sorted({min(size, largest) for size in sizes})
