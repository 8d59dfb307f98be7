"""Defines the sparse feed-forward layer: a router picks each token's experts, whose weighted outputs are summed.

Every rank holds a slice of every expert's intermediate size or, with expert parallelism, whole experts, of which the
first rank has the first. It has all tokens either way, those of other engines if they share the experts (exchange.py),
and the ranks' outputs are summed. kernels/moe.py brings tokens to their experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace import feed_forwards
from headrace.distributed.mesh import Group, Mesh
from headrace.errors import ConfigError
from headrace.kernels.moe import Experts, SwigluClamp
from headrace.kernels.moe_adapters import ExpertAdapters
from headrace.kernels.moe_route import Scoring
from headrace.kernels.norm import HALF_NORMED_DTYPE, HalfNormed, whole
from headrace.kernels.tiled import TiledWeight
from headrace.layers.context import LayerContext
from headrace.layers.layer import Layer, empty_parameter, whole_slot
from headrace.layers.linear import column_spec, divide, over_ranks
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.pending import Pending
from headrace.layers.shared_experts import joined, laid_behind
from headrace.layers.stacked import InOne, interleaved_slots, stacked_slots
from headrace.quantization.scheme import FusedOps, HeldExperts, LinearSpec, Part, Scheme, Slot, Weights
from headrace.quantization.unquantized import unquantized


def linears_take_halves(weight: Tensor) -> bool:
    """Tell whether linears of the device and type of `weight` may take their input HalfNormed."""
    return weight.is_cuda and weight.dtype == HALF_NORMED_DTYPE


def expert_specs(
    spec: feed_forwards.Experts, group: Group, dtype: torch.dtype, unit: int = 0, in_one: bool = False
) -> tuple[LinearSpec, LinearSpec]:
    """Describe one expert's two linears as a rank holds them: gate above up, and down. `in_one`: so they are in the
    checkpoint too, as rows of one weight.

    Inputs of down that share a scale, `unit` of them, stay on one rank: where ranks cannot have equally many such
    groups, some have one more. Raises ConfigError where a rank would have none, or where `unit` is 0 and ranks cannot
    be equal.
    """
    wide, hidden, names = spec.expert_intermediate_size, spec.hidden_size, spec.names
    if unit and wide % (unit * group.size):
        groups = -(-wide // unit)
        if groups < group.size:
            what = f"the groups of {unit} inputs in an expert's intermediate size ({wide})"
            raise ConfigError(f"tensor_parallel_size {group.size} is more than {what}")
        first, last = (min(wide, groups * rank // group.size * unit) for rank in (group.rank, group.rank + 1))
        own = slice(first, last)
    else:
        local = divide(wide, group, "an expert's intermediate size")
        own = slice(group.rank * local, (group.rank + 1) * local)
    n, every = own.stop - own.start, slice(0, hidden)
    halves = tuple(
        Part(name, (2 * wide, hidden), slice(i * wide + own.start, i * wide + own.stop), every, i * n)
        if in_one
        else Part(name, (wide, hidden), own, every, i * n)
        for i, name in enumerate((names.gate, names.up))
    )
    down = (Part(names.down, (hidden, wide), every, own, 0),)
    return (
        LinearSpec(hidden, 2 * n, halves, dtype, spec.bias),
        LinearSpec(
            n, hidden, down, dtype, spec.bias, group.rank == 0, over_ranks=over_ranks(group), whole_groups=bool(unit)
        ),
    )


def router_spec(spec: feed_forwards.Experts, dtype: torch.dtype) -> LinearSpec:
    """Describe the router and, below its rows, the shared expert's gate if it has one; every rank holds both. Where the
    checkpoint has them quantized, they are widened at load."""
    hidden, rows = spec.hidden_size, {spec.names.router: spec.num_experts}
    if spec.gates_shared:
        rows["shared_expert_gate"] = 1
    parts = [(name, count, count, 0) for name, count in rows.items()]
    return column_spec(hidden, parts, dtype, spec.bias)


def own_experts(number: int, group: Group) -> range:
    """Return which of so many experts a rank holds whole. Raises ConfigError where a rank would have none."""
    if number < group.size:
        raise ConfigError(
            f"enable_expert_parallel spreads {number} experts, so tensor_parallel_size x data_parallel_size must be at "
            f"most {number}, got {group.size}"
        )
    return range(number * group.rank // group.size, number * (group.rank + 1) // group.size)


InTurn = Literal["", "in all experts", "in each expert"]
"""where a checkpoint holds the rows of gate and up in turn: nowhere, or in the tensors of all experts or of each"""


class SparseMoE(Layer):
    """Computes experts and router, and a shared expert if there is one, as one rank holds them."""

    def __init__(self, spec: feed_forwards.Experts, context: LayerContext) -> None:
        super().__init__()
        engine, dtype = context.mesh.tp, context.dtype
        group = context.mesh.experts if context.whole_experts else engine
        hidden_size = spec.hidden_size
        self.spec = spec
        self.own = own_experts(spec.num_experts, group if context.whole_experts else Group())
        """which experts this rank has something of"""
        self.specs_for = partial(expert_specs, spec, Group() if context.whole_experts else group, dtype)
        self.in_turn: InTurn = "in all experts" if spec.names.stacked else ""
        self.transposed = False
        """Whether the checkpoint has all experts in one tensor, [experts, in, out]"""
        self.attach(unquantized())
        self.w13: Weights = {}
        self.w2: Weights = {}
        has_shared = spec.intermediate_size > 0 and spec.own_norm is None
        self.router_spec = router_spec(spec, dtype)
        self.router_scheme = unquantized()
        self.router_weights: Weights = {}
        self.selection_bias: Tensor | None = None
        if spec.selection_bias:
            self.selection_bias = empty_parameter(spec.num_experts, dtype=torch.float32)
        self.norm: RMSNorm | None = None
        if spec.own_norm is not None:
            of_norm = torch.float32 if spec.own_norm.float32 else dtype
            self.norm = RMSNorm(hidden_size, spec.own_norm.eps, context.kernels, of_norm)
            self.router_scale = empty_parameter(hidden_size, dtype=torch.float32)
            self.factors = empty_parameter(spec.num_experts, dtype=torch.float32)
        if has_shared:
            # this rank's part of the sum: the layer adds up routed and shared experts, then reduces once
            unreduced = replace(context, mesh=Mesh(Group(group.rank, group.size, all_gather=group.all_gather)))
            self.add_module(spec.names.shared, GatedMLP(spec.shared, unreduced))
        self.has_shared = has_shared
        self.fused_moe = context.kernels.fused_moe
        self.batch_invariant = context.batch_invariant
        self.engine, self.exchange = engine, context.exchange
        self.ranks, self.alone = engine.size, group.size == 1
        self.fused = FusedOps()
        """what it computes besides: the norm of its input, half the next one; models/fusion.py adds them"""
        self.pending = False
        """Its output has one reader, a norm, which calls `added_to`."""
        self.seats: tuple[Any, ...] = ()
        """of gate and up, and of down, where adapters may change experts (layers/adapters.py)"""
        self.kept_ids: Tensor | None = None
        ranks = [Group(rank, group.size) for rank in range(group.size)] if context.whole_experts else [Group()]
        self.places = [own_experts(spec.num_experts, rank) for rank in ranks]
        """which experts each rank has something of"""
        self.chosen: Tensor | None = None
        """How often each expert was chosen by this engine's tokens # [num_experts] int64; None: it is not counted."""

    def attach(self, scheme: Scheme) -> None:
        """Let the experts have `scheme`, which also decides where they may be cut."""
        self.scheme = scheme
        self.gate_up_spec, self.down_spec = self.specs_for(scheme.format.group_size)

    def create_weights(self, device: torch.device) -> None:
        super().create_weights(device)
        layout, experts = self.scheme.layout, (len(self.own),)
        self.router_weights = self.router_scheme.layout.create_weights(self.router_spec, device)
        if self.spec.halves_shared:
            self.router_weights["weight"][-1].zero_()
        held, linears = None, (self.gate_up_spec, self.down_spec)
        if self.shared is not None:
            held = laid_behind(self.shared, self.spec, linears, self.scheme, *experts, device)
        self.w13, self.w2 = held or [layout.create_weights(linear, device, experts) for linear in linears]

    @property
    def shared(self) -> GatedMLP | None:
        """The shared experts that are computed with the layer."""
        return getattr(self, self.spec.names.shared) if self.has_shared else None

    def quantized_names(self, path: str) -> dict[str | None, list[str]]:
        """Return the names under which a checkpoint may list the format of each part: expert 0's, which stands for all,
        and that of all experts together."""
        experts = f"{path}.experts"
        gate_up = {
            part.name: self.spec.names.stacked if self.in_turn else part.name for part in self.gate_up_spec.parts
        }
        held = gate_up | {part.name: part.name for part in self.down_spec.parts}
        return {part: [f"{experts}.0.{name}", experts] for part, name in held.items()}

    def router_names(self, path: str) -> dict[str | None, list[str]]:
        """Return the same of the router and of the shared expert's gate."""
        return {part.name: [f"{path}.{part.name}"] for part in self.router_spec.parts}

    def names_in_files(self, path: str) -> dict[str, InOne]:
        """Return the names of linears of all experts, and of the router, as transformers holds them -> those of
        checkpoints (models/checkpoint.py: `unstacked`)."""
        spec, names = self.spec, self.spec.names
        if names.stacked:
            return {}
        gate, up, down = (f"{path}.experts.{{}}.{name}" for name in (names.gate, names.up, names.down))
        elsewhere = _of_transformers(path)
        router = {} if elsewhere == path else {f"{elsewhere}.gate": InOne((f"{path}.{names.router}",))}
        held = (InOne(linears, spec.num_experts, self.transposed) for linears in ((gate, up), (down,)))
        return router | {name: one for one, these in zip(held, self._in_one(path), strict=True) for name in these}

    def _in_one(self, path: str) -> tuple[list[str], list[str]]:
        """Return the names that gates and ups of all experts have where they are one linear, and those of downs."""
        places = dict.fromkeys((path, _of_transformers(path)))
        gate_up, down = ([f"{place}.experts.{name}" for place in places] for name in ("gate_up_proj", "down_proj"))
        return gate_up, down

    def read_as(self, path: str, linears: Mapping[str, tuple[int, ...]]) -> None:
        """Take experts from where a checkpoint with these `linears` (name -> shape of the weight) has them. To be
        called before `names_in_files` and `attach`."""
        spec, names = self.spec, self.spec.names
        if not names.stacked:
            gate_up, down = self._in_one(path)
            found = [linears[name] for name in gate_up if name in linears]
            self.specs_for = partial(self.specs_for, in_one=bool(found))
            number, hidden, wide = spec.num_experts, spec.hidden_size, spec.expert_intermediate_size
            found += [linears[name] for name in down if name in linears]
            # of these one at least is not square
            for outputs, inputs in ((2 * wide, hidden), (hidden, wide)):
                self.transposed |= outputs != inputs and (number, inputs, outputs) in found
        elif f"{path}.experts.0.{names.stacked}" in linears:
            self.in_turn = "in each expert"
        elif f"{path}.experts.0.{names.gate}" in linears:
            self.in_turn = ""

    def slots(self, path: str) -> dict[str, Slot]:
        spec, names = self.spec, self.spec.names
        router = self.router_scheme.layout.slots(self.router_spec, self.router_weights)
        slots = {f"{path}.{part.name}.{tensor}": slot for part, tensor, slot in router}
        if spec.halves_shared:
            gate = f"{path}.{self.router_spec.parts[-1].name}.weight"
            slots[gate] = replace(slots[gate], optional=True)
        if self.norm is not None:
            held = {"scale": self.router_scale, "per_expert_scale": self.factors}
            slots |= {f"{path}.{names.router}.{name}": whole_slot(tensor) for name, tensor in held.items()}
        if self.selection_bias is not None:
            whole, take = whole_slot(self.selection_bias), partial(_take_row, self.selection_bias)
            slots[f"{path}.{names.selection}"] = replace(whole, store=take, shapes=((1, spec.num_experts),))
        if self.in_turn:
            linears = ((self.gate_up_spec, self.w13, names.stacked), (self.down_spec, self.w2, names.down))
            slots_in_turn = stacked_slots if self.in_turn == "in all experts" else interleaved_slots
            for linear, weights, name in linears:
                slots.update(
                    slots_in_turn(
                        self.scheme.layout, linear, weights, spec.num_experts, self.own, f"{path}.experts", name
                    )
                )
            return slots
        nowhere = any(tensor.is_meta for tensor in self.w13.values())  # nobody writes there: one stands for all
        first = list(self._expert_slots(0)) if nowhere else []
        for expert in range(spec.num_experts):
            here = expert in self.own
            for name, slot in first or self._expert_slots(expert - self.own.start if here else 0):
                slots[f"{path}.experts.{expert}.{name}"] = slot if here else slot.nowhere()
        return slots

    def _expert_slots(self, expert: int) -> Iterator[tuple[str, Slot]]:
        """Yield (name of one expert's tensor behind its number, where it goes)."""
        for linear, weights in ((self.gate_up_spec, self.w13), (self.down_spec, self.w2)):
            own = {name: tensor[expert] for name, tensor in weights.items()}
            for part, tensor, slot in self.scheme.layout.slots(linear, own):
                yield f"{part.name}.{tensor}", slot

    def fuse_norm(self, norm: RMSNorm) -> None:
        """Take over `norm`: x comes in without it. To be called before `finalize`."""
        self.fused = replace(self.fused, norm_weight=norm.weight.data, norm_eps=norm.eps)

    def fuse_next_norm(self, norm: RMSNorm) -> None:
        """Leave `norm` of the sum with the residual to the linear that reads it. To be called before `finalize`."""
        self.fused = replace(self.fused, next_norm=norm.weight.data)

    def tensors(self) -> list[Tensor]:
        """Return what holds router and experts: the tensors that are loaded or, once finalized, those of kernels."""
        loaded = [*self.router_weights.values(), *self.w13.values(), *self.w2.values()]
        if loaded:
            return loaded
        held = self.experts
        both = [one.tensors().values() if isinstance(one, TiledWeight) else [one] for one in (held.w13, held.w2)]
        others = (held.router, held.router_bias, held.w13_scale, held.w2_scale, held.w13_bias, held.w2_bias)
        return [*(tensor for one in both for tensor in one), *(one for one in others if one is not None)]

    def finalize(self) -> None:
        super().finalize()
        if self.norm is not None:
            self.fuse_norm(self.norm)
            self.router_scale.mul_(self.spec.hidden_size**-0.5)
        spec, fused = self.spec, self.fused
        router = self.router_scheme.layout.dequantize(self.router_spec, self.router_weights)
        self.router, self.router_weights = router["weight"], {}
        halves = self.alone and not self.batch_invariant and linears_take_halves(self.router)
        next_norm, product = fused.next_norm if halves else None, self.scheme.product
        w13, w2 = product.experts(self.gate_up_spec, self.w13), product.experts(self.down_spec, self.w2)
        w13, w2 = _both_tiled(w13, w2, dtype=self.gate_up_spec.dtype)
        if spec.scales_input and w13.rounding is not None:  # a given scale is for the input times its weight
            w13 = w13._replace(rounding=replace(w13.rounding, given=None))
        w13_bias, w2_bias = self.w13.get("bias"), self.w2.get("bias")
        self.w13 = self.w2 = {}
        scoring = Scoring(spec.sigmoid, self.selection_bias, spec.scaling, spec.groups, spec.used_groups)
        own, shared = self.norm is not None, self.shared
        scoring = scoring._replace(factors=self.factors if own else None, near=spec.near)
        self.experts = Experts(
            fused.norm_weight, fused.norm_eps, self.router, w13.weight, w2.weight, spec.experts_per_token,
            spec.renormalize, self.batch_invariant, scoring, next_norm,
            w13.scales, w2.scales, router.get("bias"), w13_bias, w2_bias,
            None if spec.clamp is None else SwigluClamp(*spec.clamp), w13.rounding, w2.rounding, spec.scales_input,
            None if len(self.own) == spec.num_experts else (self.own.start, spec.num_experts), self.exchange.is_token,
            spec.activation, self.router_scale if own else None, None if shared is None else joined(shared, w13, w2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor | Pending:
        """Return the layer's output for x [num_tokens, hidden_size], of the same shape."""
        return Pending(self, x) if self.pending else self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        return self.engine.all_reduce(self._share(x))

    def _share(self, x: Tensor) -> Tensor:
        """Return what, summed over the ranks of this engine, is the output."""
        everybody = whole(self._compute(self.exchange.gather(x), None))
        return self.exchange.scatter(everybody, len(x))

    def added_to(self, x: Tensor, residual: Tensor) -> Any:
        """Return the sum with `residual`, written over it; it may be x."""
        if self.alone:
            return self._compute(x, residual)
        return self.engine.added(self._share(x), residual, leaves=self.fused.next_norm is not None)

    def _compute(self, x: Tensor, residual: Tensor | None) -> Tensor | HalfNormed:
        """Return this rank's share of the output, for the tokens of all engines."""
        shared, experts, adapters = self.shared, self.experts, None
        if shared is not None and (shared.gate_up_proj.fused.apart or shared.down_proj.fused.apart):
            experts = replace(experts, joined=None)
        if any(seat.wanted for seat in self.seats):
            up, down = self.seats
            adapters = ExpertAdapters(up.slots.of_tokens, up.weights, down.weights)
        out, ids = self.fused_moe(x, experts, shared, residual, adapters=adapters)
        if self.kept_ids is not None:
            self.kept_ids.fill_(-1)[: ids.shape[0]] = ids
        if self.chosen is not None:
            own = self.exchange.own_rows(ids).flatten().long()
            self.chosen.scatter_add_(0, own, torch.ones_like(own))
        return out


def _take_row(row: Tensor, values: Tensor) -> None:
    """Write a checkpoint's biases, perhaps a matrix of one row."""
    row.copy_(values.flatten())


def _of_transformers(path: str) -> str:
    """Return the name that transformers has for a layer of experts, given the checkpoint's."""
    return f"{path.rpartition('.')[0]}.mlp"


def _both_tiled(w13: HeldExperts, w2: HeldExperts, dtype: torch.dtype) -> tuple[HeldExperts, HeldExperts]:
    """Return both as they are if both or none are tiled, else the tiled one widened: a layer has one kind of kernel."""
    wide: list[HeldExperts] = []
    for held, other in ((w13, w2), (w2, w13)):
        alone = isinstance(held.weight, TiledWeight) and not isinstance(other.weight, TiledWeight)
        wide.append(HeldExperts(held.weight.dequantize(dtype)) if alone else held)
    return wide[0], wide[1]


def keep_expert_ids(model: nn.Module, max_tokens: int) -> None:
    """Make every sparse layer of `model` remember which experts its latest step, of at most `max_tokens` tokens, used.
    This holds for graphs too if they are captured after this call. `max_tokens` 0 ends it."""
    for layer in model.modules():
        if isinstance(layer, SparseMoE):
            shape, device = (max_tokens, layer.spec.experts_per_token), layer.router.device
            layer.kept_ids = torch.full(shape, -1, dtype=torch.int32, device=device) if max_tokens else None


def distinct_experts(model: nn.Module) -> list[int]:
    """Return how many experts each sparse layer read in the latest step; waits for the device. `keep_expert_ids` must
    have been called before."""
    kept = [layer.kept_ids for layer in model.modules() if isinstance(layer, SparseMoE)]
    return [int(ids[ids >= 0].unique().numel()) for ids in kept if ids is not None]
