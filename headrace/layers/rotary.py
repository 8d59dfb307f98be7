"""Computes the table of rotary position embeddings (arXiv 2104.09864). Kernels rotate by it (kernels/rotary.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.layer_parts import Rope, Turns
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer


def rope_table(rope: Rope, rotary_dim: int, positions: int, device: torch.device) -> Tensor:
    """Return # [positions, rotary_dim] float32: the cosines for half of what is rotated, then the sines."""
    inverse, factor = FREQUENCIES[rope.kind](rope.theta, rotary_dim, dict(rope.scaling))
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * inverse.to(device)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


class Angles(NamedTuple):
    """Holds what layers that are turned alike hand to attention in a step."""

    cos_sin: Tensor | None
    positions: Tensor | None
    """with `cos_sin` what the kernel table's `step_angles` made of the rope table; None both: nothing is rotated"""
    temperature: Tensor | None = None
    """# [num_tokens] float32: factors of queries"""


NO_ANGLES = Angles(None, None)
"""Positions turn nothing."""


class Rotary(Layer):
    """Makes a step's Angles for the layers that have the same Turns."""

    def __init__(self, turns: Turns, positions: int, context: LayerContext) -> None:
        """Compute the tables for `positions` positions, or for those that the context names if they are fewer."""
        super().__init__()
        positions = min(positions, context.positions or positions)
        self.turns = turns
        self.cos_sin: Tensor | None = None
        if turns.rope is not None:
            self.cos_sin = rope_table(turns.rope, turns.rotary_dim, positions, context.device)
        self.temperatures: Tensor | None = None
        if (heat := turns.temperature) is not None:
            places = torch.arange(positions, dtype=torch.float32, device=context.device)
            grown = torch.floor((places + heat.first) / heat.length)
            self.temperatures = 1 + heat.beta * torch.log(1 + grown)
        self.step_angles = context.kernels.step_angles

    def keep(self, positions: int) -> None:
        """Let go of the memory of what the tables hold beyond `positions` positions."""
        for name in ("cos_sin", "temperatures"):
            table = getattr(self, name)
            if table is not None and table.shape[0] > positions:
                setattr(self, name, table[:positions].clone())

    def forward(self, positions: Tensor) -> Angles:
        """Return the angles of a step's tokens; positions # [num_tokens] int64."""
        temperature = None if self.temperatures is None else self.temperatures[positions]
        if self.cos_sin is None:
            return Angles(None, None, temperature)
        cos_sin, rows = self.step_angles(self.cos_sin, positions)
        return Angles(cos_sin, rows, temperature)


def table_of_step(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table with a row for each token of a step, and the tokens' rows: for tokens with several positions each.
    `positions` # [numbers, num_tokens]: time, height and width (M-RoPE, arXiv 2409.12191). `axes` # [head_dim / 2]:
    which of them turns each frequency. The fused decode cannot serve such tokens: it looks positions up by itself."""
    columns = axes.repeat(2)
    angles = cos_sin[positions[columns].T, torch.arange(len(columns), device=cos_sin.device)]
    return angles, torch.arange(positions.shape[1], device=cos_sin.device)


def _powers(theta: float, dim: int) -> Tensor:
    """Return theta ** (2 i / dim) # [dim / 2]"""
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, dim), 1.0


def _linear(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, dim) / scaling["factor"], 1.0


def _llama3(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between."""
    inverse = 1.0 / _powers(theta, dim)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / max(high - low, 1e-9)  # equal ones leave nothing between
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled), 1.0


def _yarn(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Keep frequencies with many turns within the original context, divide those with few by `factor`, with a ramp
    between; cosines and sines grow by an attention factor (YaRN, arXiv 2309.00071)."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = _powers(theta, dim)
    inverse = 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp)
    return inverse, _yarn_attention_factor(factor, scaling)


def _longrope(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Divide each frequency by a factor of its own; cosines and sines grow by one that follows from how far the context
    was stretched (LongRoPE, arXiv 2402.13753)."""
    factors = torch.tensor(scaling["long_factor"], dtype=torch.float32)
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * _powers(theta, dim)), scaling.get("attention_factor", grown)


def _proportional(theta: float, dim: int, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Keep the first frequencies, in the share of the head that is rotated, and let the others turn nothing."""
    turned = int(scaling["partial_rotary_factor"] * dim // 2)
    inverse = 1.0 / _powers(theta, dim) / scaling.get("factor", 1.0)
    inverse[turned:] = 0
    return inverse, 1.0


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


FREQUENCIES: dict[str, Callable[[float, int, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # differs only beyond max_position_embeddings, where no sequence goes
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""rope_type -> (theta, rotary_dim, fields) -> (inverse frequencies [rotary_dim / 2], factor for cosines and sines).
models/ropes.py, which loads no torch, lists the types and the fields they need too."""
