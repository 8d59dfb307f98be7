"""Holds low-rank adapters (LoRA, arXiv 2106.09685) beside a rank's linears, and adds what they make of a step's tokens.

A linear has one seat, which holds the adapters of all slots for its own shares of rows and columns. Which slot a token
uses is told for each step, from outside; in a step without adapters no linear does anything else than without seats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.kernels.adapters import RANK_STEP, Adapted, AdapterWeights, StepSlots, counters_of, spread
from headrace.kernels.fp8 import Quantized
from headrace.kernels.norm import HalfNormed
from headrace.kernels.table import KernelTable
from headrace.layers.embedding import VocabParallelEmbedding
from headrace.layers.linear import Linear
from headrace.layers.moe import SparseMoE
from headrace.lora import LowRank
from headrace.quantization.scheme import LinearSpec, Part

ReadTensor = Callable[[str, slice, slice], Tensor]
"""(tensor of an adapter's file, rows, columns) -> that slice of it, on the host"""


@dataclass(frozen=True)
class Named:
    """Describes a part of a linear."""

    names: list[str]
    """its own and, if there are others, that of all together"""
    part: Part
    """where it is in the weight"""
    before: int = 0
    """how many rows come before it in the tensors of all"""
    step: int = 1
    """every so many of their rows are its own"""
    expert: int = 0
    """whose it is, where those of all experts are together"""

    def matrices(self, change: LowRank, first: int, tensor: ReadTensor) -> tuple[Tensor, Tensor]:
        """Return the first matrix # [rank, inputs] and the second # [outputs, rank], whose rows begin with `first`."""
        rows, columns, rank = self.part.rows, self.part.columns, change.rank
        if not change.experts:
            every, rows = slice(0, rank), slice(first + rows.start, first + rows.stop)
            return tensor(change.a, every, columns), tensor(change.b, rows, every)
        step = self.step if self.step > 1 else None
        rows = slice(first + rows.start * self.step, first + rows.stop * self.step, step)
        own, in_turn = slice(self.expert * rank, (self.expert + 1) * rank), slice(self.expert, None, change.experts)
        if change.turned:
            return tensor(change.b, columns, in_turn).T, tensor(change.a, own, rows).T
        return tensor(change.a, own, columns), tensor(change.b, rows, in_turn)


class Seat:
    """Holds the adapters of one linear, or of the embedding, or of a linear of each of a rank's experts."""

    def __init__(self, owner: Adapters, number: int, weights: AdapterWeights, parts: list[Named]) -> None:
        """`number`: its place among the owner's seats. `parts`: the linear's."""
        self.owner, self.number, self.weights, self.parts = owner, number, weights, parts

    fuses = True

    @property
    def wanted(self) -> bool:
        """Tell whether tokens of this step have adapters, some of which change this linear."""
        owner = self.owner
        return owner.slots is not None and (owner.used is None or self.number in owner.used)

    @property
    def slots(self) -> StepSlots:
        """The slots of this step's tokens, some of which have adapters."""
        owner = self.owner
        assert owner.slots is not None
        owner.step_slots = owner.step_slots or StepSlots.of(owner.slots, len(self.weights.a))
        return owner.step_slots

    def add(self, x: Any, out: Tensor) -> None:
        """Add to out # [num_tokens, outputs] what the adapters make of x # [num_tokens, inputs], which may be
        Quantized."""
        slots, kernels = self.slots, self.owner.kernels
        x = x.dequantize(self.weights.a.dtype) if isinstance(x, Quantized) else x
        kernels.expand_adapters(out, kernels.shrink_adapters(x, slots, self.weights), slots, self.weights)

    def given(self, x: Any, shrinks: bool) -> Adapted:
        """Return what the kernel is to add that multiplies x # [num_tokens, inputs], which may be HalfNormed.
        `shrinks`: it multiplies by first matrices too."""
        if shrinks:
            return Adapted(self.slots, self.weights)
        x = x.scaled if isinstance(x, HalfNormed) else x
        return Adapted(self.slots, self.weights, self.owner.kernels.shrink_adapters(x, self.slots, self.weights))

    def add_rows(self, ids: Tensor, out: Tensor) -> None:
        """Add the same where x is the row of a unit matrix, `ids` saying which: for an embedding."""
        slots, weights = self.slots, self.weights
        s = spread(weights.a[slots.of_tokens.clamp(min=0).long(), :, ids], slots, weights)
        self.owner.kernels.expand_adapters(out, s, slots, weights)

    def read(self, changes: dict[str, LowRank], tensor: ReadTensor, a: Tensor, b: Tensor) -> int:
        """Write an adapter's matrices into this seat's A and B; return its rank, 0: it does not change the linear."""
        room, most = self.weights.rank, 0
        found = [changes[name] for one in self.parts for name in one.names[:1] if name in changes]
        if len(found) < len(self.parts) or any(one.rank < room for one in found):
            a.zero_(), b.zero_()  # what is not written below
        for place, one in enumerate(self.parts):
            for name, first in zip(one.names, (0, one.before), strict=False):
                if (change := changes.get(name)) is None:
                    continue
                of_a, of_b = one.matrices(change, first, tensor)
                a[place * room : place * room + change.rank, : of_a.shape[1]] = of_a
                scaled = of_b if change.scale == 1.0 else of_b.float() * change.scale
                b[one.part.offset : one.part.offset + of_b.shape[0], : change.rank] = scaled
                most = max(most, change.rank)
        if a.dtype == torch.float16 and not all(bool(one.isfinite().all()) for one in (a, b) if most):
            names = self.parts[0].names
            raise CheckpointError(f"the adapter of {names[-1]} has numbers that are too large for float16")
        return most


@dataclass
class Adapters:
    """Holds the adapters of a rank's model in so many slots."""

    num_slots: int
    max_rank: int
    names: Set[str]
    """of the linears that adapters may change; others have no seat"""
    kernels: KernelTable
    dtype: torch.dtype
    device: torch.device
    slots: Tensor | None = None
    """[num_tokens] int32: the slot of each token that is computed now, negative for one without an adapter; None: no
    token has one"""
    step_slots: StepSlots | None = None
    """the same as kernels take it, made for the first seat that asks"""
    seats: list[Seat] = field(default_factory=list)
    used: set[int] | None = None
    """numbers of the seats that an adapter has changed: others stay as if there were none. None: no adapter has been
    put yet, and steps that measure count on all"""

    def seat(self, path: str, layer: Any) -> None:
        """Give a linear, or the embedding, a seat; other layers have none. To be called before `finalize`."""
        rank = -(-self.max_rank // RANK_STEP) * RANK_STEP
        if isinstance(layer, VocabParallelEmbedding) and path in self.names:
            vocab, hidden = layer.shape
            part = Part(None, (hidden, vocab), slice(0, hidden), layer.rows, 0)
            layer.seat = self._seat([Named([path], part)], layer.weight.shape[0], hidden, rank)
        elif isinstance(layer, Linear) and not self.names.isdisjoint(part.path(path) for part in layer.parts):
            parts, first = [], 0
            for part in layer.parts:
                parts.append(Named([part.path(path), *([path] if part.name else [])], part, first))
                first += part.shape[0]
            seat = self._seat(parts, layer.spec.in_features, layer.spec.out_features, rank)
            layer.fused = replace(layer.fused, addend=seat)
        elif isinstance(layer, SparseMoE) and f"{path}.experts.down_proj" in self.names:
            layer.seats = tuple(
                self._seat(
                    self._of_experts(f"{path}.experts", layer, spec, together),
                    spec.in_features,
                    len(layer.own) * spec.out_features,
                    rank,
                )
                for spec, together in ((layer.gate_up_spec, "gate_up_proj"), (layer.down_spec, "down_proj"))
            )

    def _of_experts(self, path: str, layer: SparseMoE, spec: LinearSpec, together: str) -> list[Named]:
        """Return the parts of each expert's linear, one expert's behind another's."""
        wide, parts = layer.spec.expert_intermediate_size, list[Named]()
        step = len(spec.parts) if layer.spec.names.stacked else 1  # gates and ups are in turn
        for here, expert in enumerate(layer.own):
            for place, part in enumerate(spec.parts):
                ahead = place * wide if part.shape[0] == 2 * wide else 0  # the checkpoint has gates and ups in one
                rows = slice(part.rows.start - ahead, part.rows.stop - ahead)
                part = replace(part, rows=rows, offset=here * spec.out_features + part.offset)
                names = [f"{path}.{expert}.{part.name}", f"{path}.{together}"]
                parts.append(Named(names, part, place if step > 1 else place * wide, step, expert))
        return parts

    def _seat(self, parts: list[Named], inputs: int, outputs: int, rank: int) -> Seat:
        sizes = tuple(one.part.rows.stop - one.part.rows.start for one in parts)
        starts = torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=self.device)
        a = torch.empty(self.num_slots, len(parts) * rank, inputs, dtype=self.dtype, device="meta")
        b = torch.empty(self.num_slots, outputs, rank, dtype=self.dtype, device="meta")
        ranks = torch.empty(self.num_slots, dtype=torch.int32, device="meta")
        arrived = torch.zeros(counters_of(*a.shape[:2]), dtype=torch.int32, device=self.device)
        self.seats.append(Seat(self, len(self.seats), AdapterWeights(a, b, ranks, starts, sizes, arrived), parts))
        return self.seats[-1]

    def allocate(self, kept: int = 0) -> None:
        """Take the memory of all slots, and that of `kept` adapters on the host, once every seat is there. What an
        adapter has in all seats is one piece, which one copy moves; one more slot is for one on its way to the
        device."""
        like: dict[str, Any] = {"dtype": self.dtype, "pin_memory": self.device.type == "cuda"}
        self.memory = torch.zeros(self.num_slots + 1, sum(self.sizes), dtype=self.dtype, device=self.device)
        self.ranks = torch.zeros(len(self.seats), self.num_slots, dtype=torch.int32, device=self.device)
        self.host = torch.empty(kept, sum(self.sizes), **like)
        self.host_ranks = torch.empty(kept, len(self.seats), **like | {"dtype": torch.int32})
        pieces = iter(self.memory[:-1].split(self.sizes, 1))
        for seat, ranks in zip(self.seats, self.ranks, strict=True):
            a, b = (next(pieces).unflatten(1, one.shape[1:]) for one in seat.weights[:2])
            seat.weights = seat.weights._replace(a=a, b=b, ranks=ranks)

    @property
    def sizes(self) -> list[int]:
        """The numbers in one slot of A and of B of each seat."""
        return [one[0].numel() for seat in self.seats for one in seat.weights[:2]]

    @property
    def num_bytes(self) -> int:
        """The memory that all slots take, and that of one adapter on its way."""
        return (self.num_slots + 1) * sum(self.sizes) * self.dtype.itemsize

    @property
    def num_used(self) -> int:
        """The number of seats that steps with adapters compute with: it only grows, and says what they launch."""
        return len(self.seats) if self.used is None else len(self.used)

    @contextmanager
    def applied(self, slots: Tensor | None) -> Iterator[None]:
        """Let what is computed within the context add the adapters of `slots`."""
        self.slots = slots
        try:
            yield
        finally:
            self.slots = self.step_slots = None

    def read(self, changes: dict[str, LowRank], tensor: ReadTensor, values: Tensor, ranks: Tensor) -> frozenset[int]:
        """Write this rank's shares of an adapter into `values` and `ranks`, which are one place on the host; return
        the numbers of the seats that it changes. May be called from another thread."""
        pieces, found = iter(values.split(self.sizes)), []
        for seat in self.seats:
            a, b = (next(pieces).view(one.shape[1:]) for one in seat.weights[:2])
            found.append(seat.read(changes, tensor, a, b))
        ranks.copy_(torch.tensor(found, dtype=torch.int32))
        return frozenset(number for number, rank in enumerate(found) if rank)

    def put(self, slot: int, values: Tensor, ranks: Tensor, seats: Set[int]) -> None:
        """Copy an adapter into a slot, behind all that the device has been given to do."""
        self.used = (self.used or set()) | seats
        self.memory[slot].copy_(values, non_blocking=True)
        self.ranks[:, slot].copy_(ranks.to(self.device, non_blocking=True))
