"""Serves fused linears whose parts a checkpoint holds in several formats, as tools do that give each linear its own.

Neighbouring parts in one format are a linear of that format; their outputs are laid side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from headrace.kernels.table import KernelTable
from headrace.quantization.formats import WeightFormat
from headrace.quantization.scheme import (
    Compute,
    FusedOps,
    HeldExperts,
    LinearSpec,
    Part,
    Product,
    Scheme,
    Slot,
    Weights,
)

Schemes = Mapping[str | None, Scheme]
"""name of a part -> its scheme"""


@dataclass(frozen=True)
class Run:
    """Describes neighbouring parts of one format as a linear of their own."""

    scheme: Scheme
    spec: LinearSpec
    parts: tuple[Part, ...]
    """the same parts as the fused linear has them"""
    prefix: str
    """of its tensors' names among those of the fused linear"""

    def own(self, weights: Weights) -> Weights:
        """Return its tensors, by the names that its scheme gives them."""
        return {
            name.removeprefix(self.prefix): tensor for name, tensor in weights.items() if name.startswith(self.prefix)
        }

    def named(self, own: Weights) -> Weights:
        """Return its tensors by their names in the fused linear."""
        return {self.prefix + name: tensor for name, tensor in own.items()}


class MixedLayout:
    """Keeps the tensors of each run as its layout does."""

    def __init__(self, schemes: Schemes) -> None:
        """Take the scheme of every part that linears have."""
        self.schemes = schemes

    def runs(self, spec: LinearSpec) -> list[Run]:
        """Return the runs of a linear; the last one has the rows that no part fills."""
        found: list[Run] = []
        runs = [tuple(parts) for _, parts in groupby(spec.parts, lambda part: id(self.schemes[part.name]))]
        starts = [parts[0].offset for parts in runs]
        for parts, start, end in zip(runs, starts, [*starts[1:], spec.out_features], strict=True):
            moved = tuple(replace(part, offset=part.offset - start) for part in parts)
            linear = replace(spec, out_features=end - start, parts=moved)
            prefix = f"{len(found)}/" if len(runs) > 1 else ""
            found.append(Run(self.schemes[parts[0].name], linear, parts, prefix))
        return found

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        weights: Weights = {}
        for run in self.runs(spec):
            weights |= run.named(run.scheme.layout.create_weights(run.spec, device, experts))
        return weights

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for run in self.runs(spec):
            for part, name, slot in run.scheme.layout.slots(run.spec, run.own(weights)):
                yield run.parts[run.spec.parts.index(part)], name, slot

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        return _joined([run.scheme.layout.dequantize(run.spec, run.own(weights)) for run in self.runs(spec)])


class MixedProduct(Product):
    """Multiplies run by run, and norms, activates and adds around all of them together."""

    def __init__(self, layout: MixedLayout) -> None:
        self.layout = layout
        self.widened_experts = 0
        """layers whose gate and up are in different formats, for which the kernels of experts have no form"""

    def prepare(self, specs: list[LinearSpec], device: torch.device, kernels: KernelTable | None = None) -> None:
        runs = [run for spec in specs for run in self.layout.runs(spec)]
        for scheme in dict.fromkeys(self.layout.schemes.values()):
            scheme.product.prepare([run.spec for run in runs if run.scheme is scheme], device, kernels)

    def finalize(self, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        computes: list[Compute] = []
        held: Weights = {}
        for run in self.layout.runs(spec):
            own = run.own(weights)
            computes.append(run.scheme.product.finalize(run.spec, own, FusedOps()))
            held |= run.named(own)
        weights.clear()
        weights.update(held)
        return fused.wrap(lambda x: torch.cat([compute(x, None) for compute in computes], -1))

    def widened(self, spec: LinearSpec, weights: Weights) -> Weights:
        return _joined([run.scheme.product.widened(run.spec, run.own(weights)) for run in self.layout.runs(spec)])

    def experts(self, spec: LinearSpec, weights: Weights) -> HeldExperts:
        run, *others = self.layout.runs(spec)
        if not others:
            return run.scheme.product.experts(spec, weights)
        self.widened_experts += 1
        wide = self.layout.dequantize(spec, weights)
        weights.clear()
        weights.update(wide)
        return HeldExperts(wide["weight"])

    def notes(self) -> list[str]:
        own = f"{self.widened_experts} layers of experts are widened at load: gate and up are in different formats"
        notes = [note for scheme in dict.fromkeys(self.layout.schemes.values()) for note in scheme.product.notes()]
        return [*notes, own] if self.widened_experts else notes


def _joined(parts: list[Weights]) -> Weights:
    """Return unquantized linears over the same input as one."""
    joined = {"weight": torch.cat([part["weight"] for part in parts], -2)}
    return joined | {"bias": torch.cat([part["bias"] for part in parts], -1)} if "bias" in parts[0] else joined


def mixed(schemes: Schemes) -> Scheme:
    """Return a new scheme for linears whose parts have these schemes, which serve no others."""
    formats = list(dict.fromkeys(scheme.format for scheme in schemes.values()))
    sizes = [one.group_size for one in formats if one.group_size]
    format = WeightFormat(
        " and ".join(dict.fromkeys(one.name for one in formats)),
        max(one.bits for one in formats),
        math.lcm(*sizes) if sizes else 0,
        launched_as=max(one.launched_as for one in formats),
    )
    layout = MixedLayout(schemes)
    return Scheme(format, layout, MixedProduct(layout))
