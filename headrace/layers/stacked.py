"""Fills a layout's experts one by one from a checkpoint that holds all experts of a layer in one tensor.

That is how gpt-oss is stored: unquantized weights as [experts, in, out]; packed ones, scales and biases as
[experts, out, ...]; the rows of gate and up in turn. Any layout whose tensors have a row an output can be filled so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from headrace.quantization.scheme import Layout, LinearSpec, Slot, Weights

TRANSPOSED = "weight"
"""the one tensor of a layout that is stored with inputs before outputs, and under the linear's bare name"""
Target = tuple[int, int, Slot]
"""(expert, which of the linear's parts, where its rows go)"""


def stacked_slots(
    layout: Layout, spec: LinearSpec, weights: Weights, experts: int, name: str
) -> Iterator[tuple[str, Slot]]:
    """Yield (name of the checkpoint's tensor, where it goes) for the linear `name` of all `experts`. The parts of
    `spec` are of one size."""
    targets: dict[str, list[Target]] = {}
    for expert in range(experts):
        own = {key: tensor[expert] for key, tensor in weights.items()}
        for part, tensor, slot in layout.slots(spec, own):
            targets.setdefault(tensor, []).append((expert, spec.parts.index(part), slot))
    for tensor, found in targets.items():
        yield (name if tensor == TRANSPOSED else f"{name}_{tensor}"), _stacked(found, len(spec.parts), experts, tensor)


def _stacked(targets: list[Target], parts: int, experts: int, tensor: str) -> Slot:
    """Return the slot of a tensor whose rows go to `targets`."""
    one = targets[0][2]
    rows = one.source[0]
    shape, source = (
        (parts * one.shape[0], *one.shape[1:]),
        (slice(parts * rows.start, parts * rows.stop), *one.source[1:]),
    )
    if tensor == TRANSPOSED:
        shape, source = shape[::-1], source[::-1]
    dtype = one.dtype if one.destination is None else one.dtype or one.destination.dtype
    store = partial(_spread, targets, parts, tensor == TRANSPOSED)
    return replace(one, shape=(experts, *shape), source=(slice(0, experts), *source), store=store, dtype=dtype)


def _spread(targets: list[Target], parts: int, transposed: bool, values: Tensor) -> None:
    """Give every target its rows of the stacked `values`."""
    rows = values.transpose(1, 2) if transposed else values
    for expert, place, slot in targets:
        slot.put(rows[expert, place::parts])
