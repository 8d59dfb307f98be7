"""Counts the bytes that a GPU holds of a linear's weight, by the facts of its format.

What a checkpoint stores is one thing, what kernels read another: weights in tiles (kernels/tiled.py) are filled up to
whole ones, and what no kernel multiplies is widened at load. A CPU widens everything. Imports no torch, so that the
planner can ask; packed.py, fp8.py and kernels/tiled.py are what is counted here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.quantization.formats import WeightFormat

ROWS, BLOCK, MOST_BLOCKS = 64, 128, 4
"""as kernels/tiled.py has them"""
LEAST_GROUP = 16
"""as packed_layouts.py has it"""
ARRIVED_BYTES = 32
"""of the counters of a tile's programs"""
MULTIPLE = 16
"""as gpu_linear.py has it"""
INDEX_BYTES = 8
"""of an input's place in an order of inputs"""


@dataclass(frozen=True)
class HeldLinear:
    """Describes a linear, or one linear of all experts of a layer, as one rank holds it."""

    outputs: tuple[int, ...]
    """of each linear of the checkpoint that it is made of"""
    inputs: int
    divided: Literal["", "outputs", "inputs"] = ""
    """what ranks divide; then a rank is counted whose share is not the first"""
    gated: bool = False
    """Outputs are gate and up, which are multiplied pairwise."""
    experts: int = 0
    """how many; 0: it is no linear of experts"""

    @property
    def weights(self) -> int:
        """Return the number of its weights."""
        return max(1, self.experts) * sum(self.outputs) * self.inputs


def resident_bytes(format: WeightFormat, linear: HeldLinear, plain_bytes: int) -> int:
    """Return the bytes on a GPU, scales included. `plain_bytes`: of a weight that is widened."""
    if is_tiled(format, experts=linear.experts > 0):
        return _tiled(format, linear) if _fits_tiles(format, linear, plain_bytes) else plain_bytes * linear.weights
    begins_within_block = format.in_blocks and linear.divided == "inputs" and linear.inputs % format.group_size
    if format.widened or begins_within_block or (format.made_at_load and not linear.experts and _is_odd(linear)):
        return plain_bytes * linear.weights
    return linear.weights * format.bits // 8 + max(1, linear.experts) * _stored_scales(format, linear)


def _is_odd(linear: HeldLinear) -> bool:
    """Tell whether a linear of an unquantized checkpoint is not rounded, since the vendor's library cannot take it."""
    return bool(sum(linear.outputs) % MULTIPLE or linear.inputs % MULTIPLE)


def is_tiled(format: WeightFormat, experts: bool) -> bool:
    """Tell whether a GPU holds weights of the format in tiles, of `experts` or of others."""
    return format.tiled == "all" or (format.tiled == "experts" and experts)


def _fits_tiles(format: WeightFormat, linear: HeldLinear, plain_bytes: int) -> bool:
    """Tell whether a weight stays in tiles: activations have 16 bits, groups are whole parts of a block or whole
    blocks, and an order of inputs is that of the whole linear."""
    size = format.group_size
    if plain_bytes != 2 or size % LEAST_GROUP or (format.any_order and (linear.experts or linear.divided == "inputs")):
        return False
    return size == 0 or size >= linear.inputs or BLOCK % size == 0 or size % BLOCK == 0


def _tiled(format: WeightFormat, linear: HeldLinear) -> int:
    """Count what `kernels.tiled.tile` makes of it, with the zeros behind it that kernels read over."""
    outputs, blocks, size = sum(linear.outputs), -(-linear.inputs // BLOCK), format.group_size
    tiles = -(-outputs // 2 // (ROWS // 2)) if linear.gated else -(-outputs // ROWS)
    of_output = not format.is_fp4 and (size == 0 or size >= linear.inputs)  # whose one scale is its factor, in fp32
    runs = 1 if of_output else BLOCK // min(size, BLOCK)
    scale = 0 if of_output else min(2, format.scale_bytes)  # an fp32 scale is split: float16 here, the rest a factor
    word_bytes = 4 * -(-runs * (scale + (format.zero_bits > 0)) // 4)
    factors = 4 * outputs if of_output or format.scale_bytes != 2 else 0
    code_block, word_block = ROWS * BLOCK * format.bits // 8, ROWS * word_bytes
    one = tiles * (blocks * code_block + (1 if of_output else blocks) * word_block + ARRIVED_BYTES) + factors
    order = INDEX_BYTES * linear.inputs if format.any_order else 0
    return max(1, linear.experts) * one + MOST_BLOCKS * (code_block + word_block) + order


def _stored_scales(format: WeightFormat, linear: HeldLinear) -> int:
    """Count the scales of one weight that is held as stored. Where blocks begin within a part, more of them are
    held."""
    outputs = sum(linear.outputs)
    if not format.in_blocks:
        return format.scale_bytes * outputs
    places = [sum(linear.outputs[:index]) for index in range(len(linear.outputs))]
    places += linear.outputs if linear.divided == "outputs" else ()
    rows = -(-outputs // math.gcd(format.outputs_per_scale, *places))
    return format.scale_bytes * rows * -(-linear.inputs // format.group_size)
