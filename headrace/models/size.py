"""What a token is multiplied with in a loaded model. Knows kinds of layers, not families."""

from __future__ import annotations

from torch import nn

from headrace.layers.embedding import ParallelLMHead
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE


def multiplied_weights(model: nn.Module) -> float:
    """Of all layers, on this rank: linears but the head, and of experts those that a token goes to, each as its format
    counts (`WeightFormat.launched_as`)."""
    total = 0.0
    for layer in model.modules():
        if isinstance(layer, SparseMoE):
            weights = 3 * layer.spec.experts_per_token * layer.down_spec.in_features * layer.spec.hidden_size
            total += weights * layer.scheme.format.launched_as
        elif isinstance(layer, Linear) and not isinstance(layer, ParallelLMHead):
            weights = layer.spec.in_features * layer.spec.out_features
            total += weights * layer.scheme.format.launched_as
    return total
