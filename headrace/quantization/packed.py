"""Serves weights of 4 and 8 bits whose inputs share scales (kernels/packed.py) over activations of 16 or 32 bits.

A CPU has no arithmetic for them: there each weight is widened once, at load, to the activations' type.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.packed import PackedWeight
from headrace.kernels.table import KernelTable
from headrace.quantization.scheme import Compute, FusedOps, GemmTable, Layout, LinearSpec, Weights
from headrace.quantization.unquantized import PlainProduct


class PackedLayout(Layout, Protocol):
    """Knows a checkpoint's tensors that together are a PackedWeight."""

    def packed(self, spec: LinearSpec, weights: Weights) -> PackedWeight:
        """Return the loaded `weights`, of a linear or of experts, as kernels read them. The bias is not part of it."""


class PackedProduct:
    """Multiplies by weights that stay packed in a GPU's memory; what a layout loads is repacked linear by linear."""

    def __init__(self, layout: PackedLayout) -> None:
        self.layout = layout
        self.plain = PlainProduct()
        """multiplies what is widened at load, on a CPU"""
        self.held: dict[int, PackedWeight] = {}
        """address of the codes -> the weight"""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        self.widens = device.type == "cpu"
        if self.widens:
            self.plain.prepare(specs, device)

    def refusal(self, spec: LinearSpec) -> str:
        return ""

    def input_dtype(self, spec: LinearSpec) -> torch.dtype | None:
        return None

    def table(self, spec: LinearSpec) -> GemmTable | None:
        return None

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        if self.widens:
            return self.plain.finalize(spec, self.layout.dequantize(spec, weights), fused)
        packed, bias = self._repack(spec, weights), weights.get("bias")
        return fused.wrap(lambda x: F.linear(x, packed.dequantize(spec.dtype), bias))

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        bias = {"bias": weights["bias"]} if "bias" in weights else {}
        return {"weight": self.held[weights["codes"].data_ptr()].dequantize(spec.dtype), **bias}

    def experts(self, spec: LinearSpec, weights: Weights) -> tuple[Any, Tensor | None]:
        """Return the experts' PackedWeight; on a CPU, their weight widened."""
        if self.widens:
            return self.layout.dequantize(spec, weights)["weight"], None
        return self._repack(spec, weights), None

    def _repack(self, spec: LinearSpec, weights: Weights) -> PackedWeight:
        """Return `weights` packed, whose tensors take the place of the checkpoint's in `weights`."""
        packed, bias = self.layout.packed(spec, weights), weights.get("bias")
        weights.clear()
        weights.update(packed.tensors())
        if bias is not None:
            weights["bias"] = bias
        self.held[packed.codes.data_ptr()] = packed
        return packed
