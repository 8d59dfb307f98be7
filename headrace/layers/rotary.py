"""Computes the table of rotary position embeddings (arXiv 2104.09864). Kernels rotate by it (kernels/rotary.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.model_config import ModelConfig


def rope_table(config: ModelConfig, device: torch.device) -> Tensor:
    """Return [max_position_embeddings, head_dim] float32: the cosines for half a head, then the sines."""
    scaling = config.rope_scaling or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    inverse, factor = FREQUENCIES[rope_type](config, scaling)
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32, device=device)
    angles = positions[:, None] * inverse.to(device)
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def table_of_step(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table with a row for each token of a step, and the tokens' rows: for tokens with several positions each.
    `positions` # [numbers, num_tokens]: time, height and width (M-RoPE, arXiv 2409.12191). `axes` # [head_dim / 2]:
    which of them turns each frequency. The fused decode cannot serve such tokens: it looks positions up by itself."""
    columns = axes.repeat(2)
    angles = cos_sin[positions[columns].T, torch.arange(len(columns), device=cos_sin.device)]
    return angles, torch.arange(positions.shape[1], device=cos_sin.device)


def _powers(config: ModelConfig) -> Tensor:
    """Return theta ** (2 i / head_dim) # [head_dim / 2]"""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return config.rope_theta**exponents


def _default(config: ModelConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(config), 1.0


def _linear(config: ModelConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    return 1.0 / _powers(config) / scaling["factor"], 1.0


def _llama3(config: ModelConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between."""
    inverse = 1.0 / _powers(config)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, blended)
    return torch.where(wavelength < original / high, inverse, scaled), 1.0


def _yarn(config: ModelConfig, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Keep frequencies with many turns within the original context, divide those with few by `factor`, with a ramp
    between; cosines and sines grow by an attention factor (YaRN, arXiv 2309.00071)."""
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = scaling.get("factor") or config.max_position_embeddings / original
    dim = config.head_dim

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = _powers(config)
    inverse = 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp)
    return inverse, _yarn_attention_factor(factor, scaling)


def _yarn_attention_factor(factor: float, scaling: dict[str, Any]) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


FREQUENCIES: dict[str, Callable[[ModelConfig, dict[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # differs only beyond max_position_embeddings, where no sequence goes
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> (inverse frequencies [head_dim / 2], factor for cosines and sines). models/registry.py, which loads no
torch, lists the types and the fields they need too."""
