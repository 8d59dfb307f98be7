"""What a token is multiplied with in a loaded model. Knows kinds of layers, not families."""

from __future__ import annotations

from torch import nn

from headrace.layers.embedding import ParallelLMHead
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.quantization.fp8 import Fp8


def multiplied_weights(model: nn.Module) -> int:
    """of all layers, on this rank: linears but the head, and of experts those that a token goes to"""
    linears = [layer.spec for layer in _linears(model)]
    sparse = [layer for layer in model.modules() if isinstance(layer, SparseMoE)]
    experts = sum(3 * layer.spec.top_k * layer.local * layer.hidden_size for layer in sparse)
    return experts + sum(spec.in_features * spec.out_features for spec in linears)


def has_fp8_linears(model: nn.Module) -> bool:
    return any(isinstance(layer.scheme, Fp8) for layer in _linears(model))


def _linears(model: nn.Module) -> list[Linear]:
    return [m for m in model.modules() if isinstance(m, Linear) and not isinstance(m, ParallelLMHead)]
