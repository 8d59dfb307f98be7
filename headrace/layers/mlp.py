"""Defines the gated feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from headrace.layers.pending import Pending


class GatedMLP(Layer):
    """Computes the feed-forward layer on one rank."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, context: LayerContext) -> None:
        super().__init__()
        group, dtype, kernels = context.mesh.tp, context.dtype, context.kernels
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, group, dtype, bias, kernels.silu_and_mul)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, dtype, bias)
        self.silu_and_mul_quantized = kernels.silu_and_mul_quantized

    def finalize(self) -> None:
        """Let the activation give its output in the type that the second linear wants; called before theirs."""
        super().finalize()
        wanted = self.down_proj.scheme.product.rounding(self.down_proj.spec, self.down_proj.weights)
        if wanted is not None:
            quantized = partial(self.silu_and_mul_quantized, to=wanted)
            self.gate_up_proj.fused = replace(self.gate_up_proj.fused, activation=quantized)

    def forward(self, x: Any) -> Tensor | Pending:
        """Return the layer's output for x [num_tokens, hidden_size], of the same shape."""
        return self.down_proj(self.gate_up_proj(x))
