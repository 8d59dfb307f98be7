"""Counts the bytes of weights that one GPU holds of a layer: as headrace keeps them there, or as a checkpoint does.

Everything is counted on a rank that holds most. Knows shapes and formats; what else takes memory is in memory_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from headrace.model_spec import ModelSpec
from headrace.parameters import Parameter
from headrace.planner.chips import Chip
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import LayerGroup, ModelShape, rank_shares
from headrace.quantization.formats import PLAIN, WeightFormat
from headrace.quantization.resident import HeldLinear, resident_bytes

RANK_STEP = 16
"""as in kernels/adapters.py"""


def adapter_bytes(
    spec: ModelSpec, parallel: Parallel, slots: int, rank: int, with_experts: bool, itemsize: float
) -> int:
    """Count the bytes of slots for adapters of ranks up to `rank`, and of one more that is on its way, on one GPU: of
    each weight that they may change, as many as the GPU holds inputs and outputs of it, for each of the ranks that
    memory is laid out for. Slices of experts count as equal."""
    tp, (whole, slices) = parallel.tp, (parallel.expert_gpus, 1) if parallel.ep else (1, parallel.expert_gpus)
    ends = spec.has_embedding + (spec.has_head and spec.has_end)
    lengths = ends * (spec.hidden_size + math.ceil(spec.vocab_size / tp))
    for layer, count in spec.groups:
        for one in layer.adapted:
            shared = 0 if one.split == "whole" else one.shape[one.axis]
            lengths += count * (sum(one.shape) - shared + math.ceil(shared / tp))
        block = layer.feed_forward
        if with_experts and block.num_experts:
            of_one = 3 * (block.hidden_size + math.ceil(block.expert_intermediate_size / slices))
            lengths += count * math.ceil(block.num_experts / whole) * of_one
    return math.ceil((slots + 1) * -(-rank // RANK_STEP) * RANK_STEP * lengths * itemsize)


def layer_bytes(
    shape: ModelShape, group: LayerGroup, parallel: Parallel, weight_format: str, chip: Chip | None
) -> dict[str, float]:
    """Count the bytes that one GPU holds of a layer of `group`, by part, with its linears in `weight_format`.

    The parts are attention, dense (dense MLP and shared experts), router, experts and norms. `chip`: what headrace runs
    on; None: weights are kept as in the checkpoint, which is what is known of vLLM.
    """
    plain, tp, feed_forward = shape.plain_bytes, parallel.tp, group.feed_forward

    def size(part: str, parameters: Iterable[Parameter], shares: dict[str, float], experts: int = 0) -> float:
        held = shape.part_format(part, weight_format)
        if chip is None:
            return max(1, experts) * sum(_stored(one, held, plain) * shares[one.split] for one in parameters)
        return _resident(held_on(held, chip), tuple(parameters), shares, plain, experts)

    experts, slices = feed_forward.num_experts, parallel.expert_gpus
    if parallel.ep:
        experts, slices = math.ceil(experts / slices), 1
    unit = shape.part_format("experts", weight_format).group_size
    share = fullest_share(feed_forward.expert_intermediate_size, unit, slices)
    # the bias of down is on the first rank, which has least where ranks are unequal
    of_expert = {"width": share, "whole": 1.0 if share == 1 / slices else 0.0}
    dense = [one for one in feed_forward.parameters if one.kind != "router"]
    return {
        "attention": size("attention", group.mixer.parameters, rank_shares(group.mixer, tp)),
        "dense": size("dense", dense, {"width": 1 / tp, "whole": 1.0}),
        "router": sum(one.plain_bytes(plain) for one in feed_forward.parameters if one.kind == "router"),
        "experts": size("experts", feed_forward.expert_parameters, of_expert, experts) if experts else 0.0,
        "norms": sum(one.plain_bytes(plain) for one in group.layer.norm_parameters),
    }


def head_bytes(shape: ModelShape, rows: int, weight_format: str, chip: Chip | None) -> float:
    """Count the bytes of `rows` rows of the head; `chip` as in layer_bytes."""
    held, inputs = shape.head_format(weight_format), shape.spec.hidden_size
    if chip is None:
        return held.num_bytes(rows, inputs)
    return resident_bytes(held_on(held, chip), HeldLinear((rows,), inputs), shape.plain_bytes)


def held_on(format: WeightFormat, chip: Chip) -> WeightFormat:
    """Return the format as headrace holds it on `chip`: a CPU widens weights, and so does a GPU without units for
    fp8."""
    if chip.vendor == "cpu" and format.scale_bytes:
        return replace(format, tiled="", widened=True)
    return replace(format, widened=True) if format.units == "fp8" and "fp8" not in chip.flops else format


def fullest_share(width: int, unit: int, ranks: int) -> float:
    """Return the share of `width` that the rank has which has most, where `unit` neighbours stay together (0: any)."""
    if not unit or width % (unit * ranks) == 0:
        return 1 / ranks
    return min(1.0, math.ceil(width / unit / ranks) * unit / width)


def _stored(parameter: Parameter, held: WeightFormat, plain: int) -> float:
    return held.num_bytes(*parameter.shape) if parameter.kind == "linear" else parameter.plain_bytes(plain)


def _resident(
    held: WeightFormat, parameters: tuple[Parameter, ...], shares: dict[str, float], plain: int, experts: int
) -> float:
    """Count the bytes of a part's tensors, the checkpoint's linears fused as headrace has them."""
    linears: dict[str, list[Parameter]] = {}
    for one in parameters:
        if one.kind == "linear":
            linears.setdefault(one.fused or one.name, []).append(one)
    others = sum(one.plain_bytes(plain) * shares[one.split] for one in parameters if one.kind != "linear")
    sizes = (
        resident_bytes(PLAIN if parts[0].widened else held, _held_linear(name, parts, shares, experts), plain)
        for name, parts in linears.items()
    )
    return max(1, experts) * others + sum(sizes)


def _held_linear(name: str, parts: list[Parameter], shares: dict[str, float], experts: int) -> HeldLinear:
    def local(part: Parameter, axis: int) -> int:
        size = part.shape[axis]
        return math.ceil(round(size * shares[part.split], 3)) if part.axis == axis else size

    divided = any(shares[part.split] < 1 for part in parts)
    return HeldLinear(
        tuple(local(part, 0) for part in parts),
        local(parts[0], 1),
        ("inputs" if parts[0].axis else "outputs") if divided else "",
        gated=name == "gate_up_proj",
        experts=experts,
    )
