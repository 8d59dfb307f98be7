"""Defines the gated feed-forward layer: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from headrace import model_spec
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from headrace.layers.pending import Pending


class GatedMLP(Layer):
    """Computes the feed-forward layer on one rank."""

    def __init__(self, spec: model_spec.DenseMLP, context: LayerContext) -> None:
        super().__init__()
        group, dtype, kernels = context.mesh.tp, context.dtype, context.kernels
        hidden, wide = spec.hidden_size, spec.intermediate_size
        parts = {"gate_proj": wide, "up_proj": wide}
        self.activation = spec.activation
        activate = partial(kernels.gate_and_mul, activation=spec.activation)
        self.gate_up_proj = MergedColumnParallelLinear(hidden, parts, group, dtype, spec.bias, activate)
        self.gate_up_proj.fused = replace(self.gate_up_proj.fused, gate=spec.activation)
        self.down_proj = RowParallelLinear(wide, hidden, group, dtype, spec.bias)
        self.gate_and_mul_quantized = kernels.gate_and_mul_quantized

    def finalize(self) -> None:
        """Let the activation give its output in the type that the second linear wants; called before theirs."""
        super().finalize()
        wanted = self.down_proj.scheme.product.rounding(self.down_proj.spec, self.down_proj.weights)
        if wanted is not None:
            quantized = partial(self.gate_and_mul_quantized, to=wanted, activation=self.activation)
            self.gate_up_proj.fused = replace(self.gate_up_proj.fused, activation=quantized)

    def forward(self, x: Any) -> Tensor | Pending:
        """Return the layer's output for x [num_tokens, hidden_size], of the same shape."""
        return self.down_proj(self.gate_up_proj(x))
