"""What a token is multiplied with in a loaded model. Knows kinds of layers, not families."""

from __future__ import annotations

from torch import nn

from headrace.graph_sizes import FP8_WEIGHT
from headrace.layers.embedding import ParallelLMHead
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.quantization.fp8 import Fp8


def multiplied_weights(model: nn.Module) -> float:
    """Of all layers, on this rank: linears but the head, those in fp8 as FP8_WEIGHT, and of experts those that a token
    goes to."""
    total = 0.0
    for layer in model.modules():
        if isinstance(layer, SparseMoE):
            total += 3 * layer.spec.experts_per_token * layer.local * layer.spec.hidden_size
        elif isinstance(layer, Linear) and not isinstance(layer, ParallelLMHead):
            weights = layer.spec.in_features * layer.spec.out_features
            total += weights * (FP8_WEIGHT if isinstance(layer.scheme, Fp8) else 1.0)
    return total
