"""Gathers what the linears of one layer are given while calibration text goes through it.

Of inputs x [tokens, in] the sum of their products, x.T @ x, is all that GPTQ and AWQ ask. A dense linear's is kept; an
expert's is made when it is asked for, from the inputs of the whole layer and the router's choice, since the sums of all
experts together would take more memory than the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.convert.gptq import Factor, factor_of
from headrace.kernels.adapters import Adapted
from headrace.kernels.moe import Experts, gated_reference
from headrace.kernels.moe_route import route_reference
from headrace.kernels.norm import rms_norm_reference
from headrace.layers.embedding import ParallelLMHead
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE


@dataclass(eq=False)
class Inputs:
    """Holds the sum of what one linear is given."""

    act_order: bool = True
    squares: Tensor | None = None
    """[in, in] fp32: the sum of x.T @ x; None: there were no tokens"""
    wanted: bool = False
    """What the linear is given now counts."""
    fuses: bool = False
    """No kernel takes note of it."""

    def add(self, x: Tensor, out: Tensor | None = None) -> None:
        """Take x [tokens, in]. Nothing is added to `out`, as adapters would do."""
        if not len(x):
            return
        wide = x.float()
        if self.squares is None:
            self.squares = wide.T @ wide
        else:
            self.squares.addmm_(wide.T, wide)

    def given(self, x: Any, shrinks: bool) -> Adapted:
        raise NotImplementedError("no kernel takes note of what a linear is given")

    @cached_property
    def factor(self) -> Factor | None:
        """The factor that GPTQ rounds with; None where there is none, or there were no tokens."""
        return None if self.squares is None else factor_of(self.squares, self.act_order)


@dataclass(eq=False)
class _Routed:
    """Remembers the inputs of a layer of experts, and which experts they went to."""

    down: str
    """the name of an expert's second linear"""
    experts: Experts | None = None
    """the layer as its kernels take it"""
    inputs: list[Tensor] = field(default_factory=list)
    """each [tokens, hidden], normed"""
    ids: list[Tensor] = field(default_factory=list)
    """each [tokens, top_k]"""
    shares: list[Tensor] = field(default_factory=list)
    """each [tokens, top_k] fp32, where experts are given their inputs times these"""

    @cached_property
    def all_inputs(self) -> Tensor:
        return torch.cat(self.inputs)

    @cached_property
    def all_ids(self) -> Tensor:
        return torch.cat(self.ids)

    def of_expert(self, expert: int) -> Tensor:
        """Return the inputs of an expert."""
        token, choice = (self.all_ids == expert).nonzero(as_tuple=True)
        x = self.all_inputs[token]
        return x * torch.cat(self.shares)[token, choice, None].to(x.dtype) if self.shares else x

    def activated(self, expert: int) -> Tensor:
        """Return what an expert's second linear is given."""
        held, x = self.experts, self.of_expert(expert)
        assert held is not None
        assert isinstance(held.w13, Tensor)  # unquantized
        bias = None if held.w13_bias is None else held.w13_bias[expert]
        gate, up = F.linear(x, held.w13[expert], bias).chunk(2, dim=-1)
        return gated_reference(gate, up, held)


class Watch:
    """Watches the linears of a model, or of one layer of it, by their names in a checkpoint."""

    def __init__(self, act_order: bool = True) -> None:
        self.on = False
        """Whether what is computed is calibration text."""
        self.act_order = act_order
        self.dense: dict[str, Inputs] = {}
        self.routed: dict[str, _Routed] = {}
        """path of a layer of experts -> what it was given"""
        self.latest: tuple[tuple[str, int, bool], Inputs] | None = None
        """of the expert that was asked for last"""

    def attach(self, model: nn.Module) -> None:
        """Begin to watch a model that has no weights yet."""
        for path, layer in model.named_modules():
            if isinstance(layer, Linear) and not isinstance(layer, ParallelLMHead):
                inputs = Inputs(self.act_order)
                layer.fused = replace(layer.fused, addend=inputs)
                self.dense |= dict.fromkeys((path, *(part.path(path) for part in layer.spec.parts)), inputs)
            elif isinstance(layer, SparseMoE):
                routed = self.routed[path] = _Routed(layer.spec.names.down)
                layer.fused_moe = partial(self._route, routed, layer.fused_moe)

    def switch(self, on: bool) -> None:
        """Begin or end to count what is computed."""
        self.on = on
        for inputs in self.dense.values():
            inputs.wanted = on

    def of(self, linear: str) -> Inputs:
        """Return the inputs of a linear, or those of all experts of a layer, given the layer's name."""
        path, of_expert, rest = linear.partition(".experts.")
        routed = self.routed.get(path)
        if routed is None:
            return self.dense.get(linear) or Inputs()
        if routed.experts is None:  # no text has come yet
            return Inputs()
        if not of_expert:
            return self._summed((path, -1, False), lambda: routed.all_inputs)
        number, _, name = rest.partition(".")
        expert, second = int(number), name == routed.down
        make = routed.activated if second else routed.of_expert
        return self._summed((path, expert, second), lambda: make(expert))

    def unreached(self) -> list[str]:
        """Return the names of experts that no token went to."""
        return [
            f"{path}.experts.{expert}"
            for path, routed in self.routed.items()
            if routed.experts is not None
            for expert, count in enumerate(routed.all_ids.flatten().bincount(minlength=routed.experts.num_experts))
            if not count
        ]

    def _summed(self, key: tuple[str, int, bool], make: Callable[[], Tensor]) -> Inputs:
        if self.latest is None or self.latest[0] != key:
            inputs = Inputs(self.act_order)
            inputs.add(make())
            self.latest = key, inputs
        return self.latest[1]

    def _route(
        self, routed: _Routed, compute: Callable[..., Any], x: Tensor, experts: Experts, *more: Any, **named: Any
    ) -> Any:
        """Compute the layer; `more` may be x too, which is then written over."""
        if not self.on:
            return compute(x, experts, *more, **named)
        weight = experts.norm_weight
        normed = x.clone() if weight is None else rms_norm_reference(x, weight, experts.eps)
        out, ids = compute(x, experts, *more, **named)
        routed.experts = experts
        routed.inputs.append(normed)
        routed.ids.append(ids)
        if experts.scales_input:
            logits = F.linear(normed, experts.router, experts.router_bias)[:, : experts.num_routed]
            routed.shares.append(
                route_reference(logits, experts.top_k, experts.renormalize, scoring=experts.scoring).weights
            )
        return out, ids
