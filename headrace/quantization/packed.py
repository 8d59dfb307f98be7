"""Serves weights of 4 and 8 bits whose inputs share scales (kernels/coded.py) over activations of 16 bits.

A GPU multiplies few tokens by the packed weight; for many it widens the weight, in every step anew, and calls the
vendor's library. A CPU has no arithmetic for packed weights, nor has a GPU beside activations of 32 bits: there each is
widened once, at load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.coded import CodedWeight
from headrace.kernels.matmul import matmul
from headrace.kernels.table import KernelTable, select_kernels
from headrace.kernels.tiled import TiledWeight, tile, tile_experts, why_not_tiled
from headrace.quantization import gpu_linear
from headrace.quantization.formats import WeightFormat
from headrace.quantization.packed_layouts import CodedLayout, Zeros
from headrace.quantization.scheme import Compute, FusedOps, GemmTable, HeldExperts, LinearSpec, Product, Scheme, Weights
from headrace.quantization.spellings import FLOATS_4, GROUPS_4, SPELLINGS
from headrace.quantization.unquantized import PlainProduct


class PackedProduct(Product):
    """Multiplies by weights that stay packed in a GPU's memory; what a layout loads is repacked linear by linear."""

    def __init__(self, layout: CodedLayout) -> None:
        self.layout = layout
        self.plain = PlainProduct()
        """multiplies what is widened at load, on a CPU"""
        self.held: dict[int, TiledWeight] = {}
        """address of the codes -> the weight"""
        self.widened_for: Counter[str] = Counter()
        """why weights could not stay packed on a GPU -> how many"""
        self.tables: dict[tuple[int, int], GemmTable] = {}
        """(outputs, inputs) -> the kernels for few tokens"""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        self.widens = device.type == "cpu" or any(spec.dtype.itemsize != 2 for spec in specs)
        self.kernels = kernels or select_kernels(device.type)
        if self.widens:
            self.plain.prepare(specs, device)

    def table(self, spec: LinearSpec) -> GemmTable | None:
        return self.tables.get((spec.out_features, spec.in_features))

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        if self.widens:
            return self.plain.finalize(spec, self.layout.dequantize(spec, weights), fused)
        tiled, bias = self._tile(spec, weights, fused.activation is not None, 0), weights.get("bias")
        if tiled is None:
            return self.plain.finalize(spec, weights, fused)
        weight, inputs = replace(tiled, order=None), _inputs(tiled.order, weights.get("smoothing"), spec.dtype)

        def multiply(x: Tensor) -> Tensor:
            x = x if inputs is None else inputs(x)
            if spec.batch_invariant:
                return matmul(x, self.kernels.widen_tiled(weight, x.dtype), bias)
            return self._of_widened(x, weight, bias)

        many = fused.wrap(multiply)
        if spec.batch_invariant:
            return many
        size = spec.out_features, spec.in_features
        if size not in self.tables:
            self.tables[size] = gpu_linear.plan_tiled(weight, spec.dtype, self._of_widened)
        return gpu_linear.by_table(weight, bias, self.tables[size], fused, many, inputs=inputs)

    def _of_widened(self, x: Tensor, weight: TiledWeight, bias: Tensor | None = None) -> Tensor:
        """Return x [num_tokens, in], in the weight's order, times the weight, which is widened for it."""
        return F.linear(x, self.kernels.widen_tiled(weight, x.dtype), bias)

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        tiled = self.held_in(weights)
        if tiled is None:
            return weights
        bias = {"bias": weights["bias"]} if "bias" in weights else {}
        wide = tiled.dequantize(torch.float32) * weights["smoothing"] if "smoothing" in weights else None
        return {"weight": tiled.dequantize(spec.dtype) if wide is None else wide.to(spec.dtype), **bias}

    def held_in(self, weights: Weights) -> TiledWeight | None:
        """Return what `finalize` left in `weights`; None if the weight is plain there."""
        return self.held[weights["codes"].data_ptr()] if "codes" in weights else None

    def experts(self, spec: LinearSpec, weights: Weights) -> HeldExperts:
        """Return the experts' TiledWeight, gated if it has gate and up; on a CPU, their weight widened."""
        if self.widens:
            return HeldExperts(self.layout.dequantize(spec, weights)["weight"])
        tiled = self._tile(spec, weights, len(spec.parts) > 1, len(next(iter(weights.values()))))
        return HeldExperts(weights["weight"] if tiled is None else tiled)

    def notes(self) -> list[str]:
        return [f"{count} linears are widened at load: {why}" for why, count in self.widened_for.items()]

    def _tile(self, spec: LinearSpec, weights: Weights, gated: bool, experts: int) -> TiledWeight | None:
        """Return `weights`, of so many experts or (0) of a linear, tiled, or None if they are widened; in either form
        they take the place of the checkpoint's in `weights`."""

        def coded(index: int) -> CodedWeight:
            own = {name: one if name == "scale_types" else one[index] for name, one in weights.items()}
            return self.layout.coded(spec, own if experts else weights)

        why = self.layout.why_widened(spec, weights)
        first = None if why else coded(0)
        why = why if first is None else why_not_tiled(first)
        if first is None or why:
            self.widened_for[why] += 1
            plain = self.layout.dequantize(spec, weights)
            weights.clear()
            weights.update(plain)
            return None
        if experts:
            tiled = tile_experts(chain([first], map(coded, range(1, experts))), experts, spec.dtype, gated)
        else:
            tiled = tile(first, spec.dtype, gated)
        _take_place(weights, tiled.tensors())
        self.held[tiled.codes.data_ptr()] = tiled
        return tiled


def _take_place(weights: Weights, tensors: Weights) -> None:
    """Replace all tensors in `weights` but the bias and, where inputs are multiplied by it, `smoothing` [1, in]."""
    kept = {"bias": weights["bias"]} if "bias" in weights else {}
    smoothing = weights.get("smoothing")
    if smoothing is not None and not bool((smoothing == 1).all()):
        kept["smoothing"] = smoothing[:1]
    weights.clear()
    weights.update({**tensors, **kept})


def _inputs(order: Tensor | None, smoothing: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return what makes of activations those that the weight is multiplied by; None: they are."""
    if order is not None:
        return lambda x: x.index_select(1, order)
    if smoothing is None:
        return None
    factors = smoothing.to(dtype)
    return lambda x: x * factors


def integers(
    format: WeightFormat,
    tool: str,
    bits: int,
    group_size: int,
    act_order: bool = False,
    symmetric: bool = True,
    zero_point: bool | None = None,
    zeros_plus_one: bool | None = None,
) -> Scheme:
    """Return a new scheme for the integers of a tool of SPELLINGS. `symmetric` weights have no zero points, but for
    AWQ's (arXiv 2306.00978), which perhaps have even without `zero_point`, and GPTQ's (arXiv 2210.17323), which always
    have: less one with `zeros_plus_one`, as all but `gptq_v2` store them."""
    zeros: Zeros = "none" if symmetric else "stored"
    if zero_point is not None:
        zeros = "stored" if zero_point else "perhaps"
    elif zeros_plus_one is not None:
        zeros = "stored minus one" if zeros_plus_one else "stored"
    made = CodedLayout(SPELLINGS[tool], bits, group_size, zeros, act_order)
    return Scheme(format, made, PackedProduct(made))


def floats(format: WeightFormat, kind: str, names: str, group_size: int | None = None) -> Scheme:
    """Return a new scheme for floats of 4 bits under the names of FLOATS_4, which meet activations of 16 bits."""
    made = CodedLayout(FLOATS_4[kind, names], 4, group_size or GROUPS_4[kind])
    return Scheme(format, made, PackedProduct(made))
