"""Defines a scheme of `headrace quantize`: how linears are rounded, and how a tool writes that down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.convert.rounding import Grid, Rounded, round_to_nearest


@dataclass(frozen=True)
class Style:
    """Knows how a tool writes a checkpoint."""

    name: str
    """as `--format` has it"""
    tensors: Callable[[WeightScheme, Rounded], dict[str, Tensor]]
    """gives the tensors of a linear, by their names in it"""
    stated: Callable[[WeightScheme, list[str], list[str]], dict[str, Any]]
    """gives config.json's quantization_config, of linears that keep their type and those that do not"""
    holds: tuple[str, ...] = ()
    """the schemes that it has a form for; empty: all"""
    kv_scales: tuple[str, str] | None = None
    """the names of the scales of an fp8 KV cache, below attention; None: it has none"""
    unit: int = 1
    """what the number of outputs is a multiple of"""


@dataclass(frozen=True)
class WeightScheme:
    """Says how a linear's weight is rounded, and what is written of it."""

    name: str
    grid: Grid
    kind: str
    """`int` or `float`"""
    bits: int
    strategy: str
    """which weights share a scale: `tensor`, `channel`, `block` or `group`"""
    format: str
    """compressed-tensors' name of how tensors lie"""
    style: Style
    """how tensors and config.json are written"""
    block: tuple[int, int] = (0, 0)
    """outputs and inputs that share a scale; 0: all"""
    inputs: tuple[tuple[str, Any], ...] = ()
    """how activations are rounded; empty: they keep 16 bits"""
    scale_dtype: str = ""
    """of scales, where it is not the model's"""
    algorithm: Literal["", "gptq", "awq"] = ""
    """what calibration text is for; empty: each weight is rounded to the nearest number"""
    act_order: bool = True
    """GPTQ rounds columns with the largest inputs first"""
    kv_scales: bool = False
    """scales of an fp8 KV cache are calibrated, and written too"""

    @property
    def calibrated(self) -> bool:
        """True if what is written depends on calibration text."""
        return bool(self.algorithm) or self.kv_scales

    @property
    def by_output(self) -> bool:
        """True if all tensors of a linear have a row for each output, or are a number for all."""
        return self.strategy != "block" and self.format != "pack-quantized"

    def blocks(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the outputs and inputs of a weight [out, in] that share a scale."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def group_size(self, rounded: Rounded) -> int:
        """Return the inputs of a rounded weight that share a scale."""
        return self.blocks(tuple(rounded.codes.shape))[1]

    def round(self, weight: Tensor) -> Rounded:
        """Round a weight [out, in] to the nearest numbers."""
        return round_to_nearest(weight, *self.blocks(tuple(weight.shape)), self.grid)

    def unfilled(self, shape: tuple[int, ...], dtype: torch.dtype) -> Rounded:
        """Return what a weight of that shape and type is rounded to, with no numbers in it."""
        blocks = [-(-size // each) for size, each in zip(shape, self.blocks(shape), strict=True)]
        scales = self.grid.scales(torch.ones(blocks), dtype)
        none = torch.zeros((), dtype=torch.float64)
        return Rounded(torch.empty(shape, dtype=self.grid.code_dtype), scales, none, none)

    def written(self, rounded: Rounded) -> dict[str, Tensor]:
        """Return the tensors that are written, by their names in a linear."""
        return self.style.tensors(self, rounded)

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Say why a weight of that shape keeps its type; "" if it can be rounded."""
        columns, unit = self.block[1], self.style.unit
        if columns and shape[1] % columns:
            return f"{shape[1]} inputs are no multiple of {columns}"
        return f"{shape[0]} outputs are no multiple of {unit}" if shape[0] % unit else ""

    def identity(self) -> dict[str, Any]:
        """Return all that decides what is written of a weight."""
        order = {"act_order": self.act_order} if self.algorithm == "gptq" else {}
        written = {"written_as": self.style.name, "kv_scales": self.kv_scales}
        return {**self.described(), "algorithm": self.algorithm, **order, **written}

    def described(self) -> dict[str, Any]:
        """Return compressed-tensors' description of all linears, a group of config.json's quantization_config."""
        rounded = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        size = {"group": self.block[1], "channel": -1 if self.format == "pack-quantized" else None}.get(self.strategy)
        weights: dict[str, Any] = {**rounded, "strategy": self.strategy, "group_size": size, "dynamic": False}
        if self.strategy == "block":
            weights["block_structure"] = [*self.block]
        if self.scale_dtype:
            weights |= {"scale_dtype": self.scale_dtype, "zp_dtype": self.scale_dtype}
        inputs = {**rounded, "group_size": None, **dict(self.inputs)} if self.inputs else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {**group, "format": self.format}
