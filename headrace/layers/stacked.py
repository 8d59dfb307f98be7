"""Fills a layout's experts from a checkpoint that holds the rows of gate and up in turn, as gpt-oss does.

One tensor may hold all experts of a layer, as gpt-oss is published: unquantized weights, and ModelOpt's NVFP4 and its
scales, as [experts, in, out]; other packed weights, scales and biases as [experts, out, ...]; a number for a whole
weight as one for all experts. Or each expert has a tensor of its own, [out, ...] (Quark). Any layout whose tensors have
a row an output, or one for all, can be filled so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from headrace.quantization.scheme import Layout, LinearSpec, Slot, Weights

TRANSPOSED = ("weight", "weight_scale")
"""tensors of a layout, of two dimensions, that are stored with inputs before outputs"""
Target = tuple[int, int, Slot]
"""(expert, which of the linear's parts, where its rows go)"""


@dataclass(frozen=True)
class InOne:
    """Says which linears a checkpoint holds in one."""

    linears: tuple[str, ...]
    """names, with {} for an expert's number; each has its rows somewhere in the expert's tensor"""
    experts: int = 0
    """how many are in front of the tensor's rows; 0: it is one linear under another name"""
    transposed: bool = False
    """an expert's tensors have inputs before outputs"""
    groups: int = 0
    """the rows of `linears` are in turn, in so many groups of all; 0: they are one linear's after another's"""


def stacked_slots(
    layout: Layout, spec: LinearSpec, weights: Weights, experts: int, own: range, block: str, name: str
) -> Iterator[tuple[str, Slot]]:
    """Yield (name of the checkpoint's tensor, where it goes) for the linear `name` of all `experts`, of which `weights`
    hold `own`. The parts of `spec` are of one size."""
    targets: dict[str, list[Target]] = {}
    for expert in range(len(own)):
        for tensor, found in _by_tensor(layout, spec, weights, expert).items():
            targets.setdefault(tensor, []).extend(found)
    for tensor, found in targets.items():
        path = f"{block}.{name}" if tensor == "weight" else f"{block}.{name}_{tensor}"
        yield path, _stacked(found, len(spec.parts), experts, own, tensor)


def interleaved_slots(
    layout: Layout, spec: LinearSpec, weights: Weights, experts: int, own: range, block: str, name: str
) -> Iterator[tuple[str, Slot]]:
    """Yield the same where each expert has tensors of its own."""
    for expert in range(experts):
        for tensor, found in _by_tensor(layout, spec, weights, max(0, expert - own.start) % len(own)).items():
            slot = _interleaved(found, len(spec.parts))
            yield f"{block}.{expert}.{name}.{tensor}", slot if expert in own else slot.nowhere()


def _by_tensor(layout: Layout, spec: LinearSpec, weights: Weights, expert: int) -> dict[str, list[Target]]:
    """Return where one expert's tensors go, by their names in the layout."""
    targets: dict[str, list[Target]] = {}
    own = {key: tensor[expert] for key, tensor in weights.items()}
    for part, tensor, slot in layout.slots(spec, own):
        targets.setdefault(tensor, []).append((expert, spec.parts.index(part), slot))
    return targets


def _stacked(targets: list[Target], parts: int, experts: int, own: range, tensor: str) -> Slot:
    """Return the slot of a tensor of all experts; the rows of `own` go to `targets`."""
    one = targets[0][2]
    every = slice(own.start, own.stop)
    if one.shape == (1,):
        store = partial(_spread_numbers, targets)
        return replace(
            one, shape=(experts,), source=(every,), shapes=((), (1,), (experts, 1)), store=store, dtype=_type(one)
        )
    shape, source = _rows_of_all(one, parts)
    transposed = tensor in TRANSPOSED and len(shape) == 2
    if transposed:
        shape, source = shape[::-1], source[::-1]
    store = partial(_spread, targets, parts, transposed)
    return replace(one, shape=(experts, *shape), source=(every, *source), shapes=(), store=store, dtype=_type(one))


def _interleaved(targets: list[Target], parts: int) -> Slot:
    """Return the slot of a tensor of one expert whose rows go to `targets`."""
    one = targets[0][2]
    if one.shape == (1,):
        return replace(one, store=partial(_put_all, targets), dtype=_type(one))
    shape, source = _rows_of_all(one, parts)
    return replace(one, shape=shape, source=source, shapes=(), store=partial(_deal, targets, parts), dtype=_type(one))


def _rows_of_all(one: Slot, parts: int) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Return the shape of a tensor that has the rows of all parts, and the slice that this rank reads, given the first
    part's."""
    rows = one.source[0]
    return (parts * one.shape[0], *one.shape[1:]), (slice(parts * rows.start, parts * rows.stop), *one.source[1:])


def _type(one: Slot) -> torch.dtype | None:
    """Return the type of what the slot is given."""
    return one.dtype if one.destination is None else one.dtype or one.destination.dtype


def _spread(targets: list[Target], parts: int, transposed: bool, values: Tensor) -> None:
    """Give every target its rows of the stacked `values`."""
    rows = values.transpose(1, 2) if transposed else values
    for expert, place, slot in targets:
        slot.put(rows[expert, place::parts])


def _deal(targets: list[Target], parts: int, values: Tensor) -> None:
    """Give every target its rows of one expert's `values`."""
    for _, place, slot in targets:
        slot.put(values[place::parts])


def _spread_numbers(targets: list[Target], values: Tensor) -> None:
    """Give every target its expert's number."""
    numbers = values.flatten()
    for expert, _, slot in targets:
        slot.put(numbers[expert if len(numbers) > 1 else 0].view(1))


def _put_all(targets: list[Target], values: Tensor) -> None:
    """Give every target the same number."""
    for _, _, slot in targets:
        slot.put(values.view(1))
