"""The gated feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer
from headrace.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(Layer):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, context: LayerContext) -> None:
        super().__init__()
        group, dtype = context.mesh.tp, context.dtype
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, group, dtype, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, group, dtype, bias)
        self.silu_and_mul = context.kernels.silu_and_mul

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same."""
        return self.down_proj(self.silu_and_mul(self.gate_up_proj(x)))
