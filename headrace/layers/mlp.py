"""Defines feed-forward layers: down(activation(gate(x)) * up(x)), and without a gate, down(activation(up(x)))."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace import feed_forwards
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer, empty_parameter
from headrace.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from headrace.layers.pending import Pending
from headrace.quantization.scheme import Slot


class GatedMLP(Layer):
    """Computes the layer with a gate on one rank."""

    gated = True

    def __init__(self, spec: feed_forwards.DenseMLP, context: LayerContext) -> None:
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
        self.width = self.down_proj.spec.in_features
        """of what is activated, on this rank"""

    @property
    def second(self) -> RowParallelLinear:
        """The linear that reads what is activated."""
        return self.down_proj

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


class XIELU(Layer):
    """Holds the learned numbers of xIELU (arXiv 2411.13010)."""

    def __init__(self) -> None:
        super().__init__()
        self.curves = empty_parameter(4, dtype=torch.float32)
        """those of the checkpoint until `finalize`, then what kernels take (kernels/activation.py: `gate_and_mul`)"""

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        self.curves.copy_(torch.tensor([0.0, 0.0, 0.5, -1e-6]))

    def slots(self, path: str) -> dict[str, Slot]:
        return {
            f"{path}.{name}": Slot((1,), (slice(0, 1),), self.curves[place : place + 1], optional=place > 1)
            for place, name in enumerate(feed_forwards.XIELU)
        }

    def finalize(self) -> None:
        super().finalize()
        self.curves[:2] = F.softplus(self.curves[:2])
        self.curves[1] += self.curves[2]


class PlainMLP(Layer):
    """Computes the layer without a gate on one rank."""

    opaque = ("_activated",)
    gated = False

    def __init__(self, spec: feed_forwards.DenseMLP, context: LayerContext) -> None:
        super().__init__()
        group, dtype, kernels = context.mesh.tp, context.dtype, context.kernels
        hidden, wide = spec.hidden_size, spec.intermediate_size
        self.names, self.activation = spec.names, spec.activation
        self.add_module(self.names[0], ColumnParallelLinear(hidden, wide, group, dtype, spec.bias))
        self.add_module(self.names[1], RowParallelLinear(wide, hidden, group, dtype, spec.bias))
        self.width = self.second.spec.in_features
        """of what is activated, on this rank"""
        self.act_fn = XIELU() if spec.activation == "xielu" else None
        self.activate: Callable[..., Any] = partial(kernels.gate_and_mul, activation=self.activation, gated=False)
        self.quantized = partial(kernels.gate_and_mul_quantized, activation=self.activation, gated=False)

    @property
    def second(self) -> RowParallelLinear:
        """The linear that reads what is activated."""
        second: RowParallelLinear = getattr(self, self.names[1])
        return second

    def finalize(self) -> None:
        """Let the activation give its output in the type that the second linear wants; called before theirs."""
        super().finalize()
        wanted = self.second.scheme.product.rounding(self.second.spec, self.second.weights)
        if wanted is not None:
            self.activate = partial(self.quantized, to=wanted)
        if self.act_fn is not None:
            self.activate = partial(self.activate, curves=self.act_fn.curves)

    def forward(self, x: Any) -> Tensor | Pending:
        """Return the layer's output for x [num_tokens, hidden_size], of the same shape."""
        return self.second(self._activated(getattr(self, self.names[0])(x)))

    def _activated(self, x: Tensor) -> Any:
        return self.activate(x)
