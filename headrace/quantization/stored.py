"""Reads weights that a checkpoint holds in 8 bits with their scales, fp8 (e4m3) and int8, of whichever tool, and rounds
unquantized ones to fp8 as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from headrace.errors import CheckpointError, ConfigError
from headrace.kernels._triton import fp8_dtype
from headrace.kernels.fp8 import LEAST_GROUP, Rounding, quantize_per_token_reference
from headrace.quantization.scheme import E8M0, FLOATS, LinearSpec, Part, Slot, Weights, noted_type, store_scales
from headrace.quantization.unquantized import bias_slot, empty_bias, rows_of

Numbers = Literal["fp8", "fp8 blocks", "int8"]
"""what a weight's numbers are; `fp8 blocks` have a scale a block, the others a scale an output"""
AT_ONCE = 1 << 22
"""weights that are converted at a time, since each takes a few float32 copies meanwhile"""
DUMMY_SCALE = {"fp8": 2e-3, "fp8 blocks": 2e-3, "int8": 1e-5}
"""of dummy weights, whose codes are random"""
DUMMY_INPUT_SCALE = {"fp8": 0.02, "fp8 blocks": 0.02, "int8": 0.04}
INTEGERS = ("I8", "U8", "I32", "I64", *FLOATS)
"""types of zero points"""


@dataclass(frozen=True, eq=False)
class StoredLayout:
    """Keeps `weight` [out, in] in 8 bits as the checkpoint has it, and `weight_scale` [out] fp32 or [row blocks, column
    blocks].

    Its tensors of a linear: `weight` [out, in]; its scale, a tensor, an output or a block, in any shape of so many
    numbers; with static activations `input_scale` [1] and perhaps `input_zero_point` [1]; perhaps `input_scale_ub` [1].
    A scale a tensor becomes a scale for each of its outputs, so that the parts of a fused linear keep their own. Of the
    input scales of parts and of experts the largest counts, as in vLLM: parts see the same activations.
    """

    dtype: torch.dtype
    """float8_e4m3fn or int8"""
    scale: str
    """tensor, channel (an output) or block"""
    scale_name: str
    """weight_scale, or weight_scale_inv, which multiplies nonetheless"""
    activations: str
    """token (a scale a token), block (one for `block[1]` columns of a token), tensor (static) or none (not rounded)"""
    block: tuple[int, int] = (128, 128)
    """outputs and inputs that share a scale"""
    symmetric: bool = True
    """False: activations have zero points"""
    bound: float = math.inf
    """A token's largest activation counts as at most this, where the checkpoint has no `input_scale_ub`."""
    made_at_load: bool = False
    """The checkpoint's weight is unquantized, and rounded as it is read."""

    def __post_init__(self) -> None:
        if self.scale == "block" and (min(self.block) < 1 or self.block[1] & (self.block[1] - 1)):
            raise ConfigError(
                f"blocks of fp8 weights must be of 1 output or more and of inputs that are a power of 2 in number; "
                f"got {list(self.block)}"
            )

    @property
    def numbers(self) -> Numbers:
        """Say what the weight's numbers are."""
        if self.dtype == torch.int8:
            return "int8"
        return "fp8 blocks" if self.scale == "block" else "fp8"

    @property
    def rounds(self) -> bool:
        """Tell whether activations are rounded."""
        return self.activations != "none"

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        narrow = self.dtype if self.dtype == torch.int8 else fp8_dtype(device)
        shape = (*experts, spec.out_features, spec.in_features)
        scales: tuple[int, ...] = (spec.out_features,)
        if self.scale == "block":
            rows, columns = self.held_block(spec)
            scales = -(-spec.out_features // rows), -(-(spec.in_features + self.shift(spec)) // columns)
        weights = {
            "weight": torch.zeros(shape, dtype=narrow, device=device),
            "weight_scale": torch.zeros(*experts, *scales, device=device),
            **empty_bias(spec, device, experts),
        }
        if not self.rounds:
            weights["scale_types"] = torch.zeros(*experts, len(spec.parts), dtype=torch.uint8, device=device)
        if self.activations == "tensor":
            weights["input_scale"] = torch.ones(*experts, len(spec.parts), device=device)
            if not self.symmetric:
                weights["input_zero_point"] = torch.zeros(*experts, len(spec.parts), device=device)
        if self._may_be_bounded:
            weights["input_scale_ub"] = torch.full((*experts, len(spec.parts)), self.bound, device=device)
        return weights

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for number, part in enumerate(spec.parts):
            yield part, "weight", self._weight_slot(spec, part, weights)
            yield from bias_slot(spec, part, weights)
            if self.made_at_load:
                continue
            yield part, self.scale_name, self._scale_slot(spec, number, weights)
            for name in ("input_scale", "input_zero_point", "input_scale_ub"):
                if name in weights:
                    of_transformers = name == "input_scale" and self.scale_name == "weight_scale_inv"
                    spelled = "activation_scale" if of_transformers else name
                    yield part, spelled, self._number_slot(name, weights[name][number : number + 1])
            if self.dtype == torch.int8:  # some tools write zero points that are all 0
                zero_points = ("weight_zero_point", "input_zero_point")[: 2 if self.symmetric else 1]
                for name in zero_points:
                    beside, store = weights["weight_scale"][rows_of(part)], partial(_must_be_zero, name)
                    yield part, name, _slot_of_outputs(part, beside, store, optional=True, stored=INTEGERS)

    def rounding(self, spec: LinearSpec, weights: Weights) -> Rounding:
        """Return how activations are rounded for a linear whose tensors are loaded."""
        narrow, over_ranks = weights["weight"].dtype, largest_of_ranks(spec, weights)
        if self.activations == "block":
            if over_ranks is None or not self.groups_are_cut(spec):
                return Rounding(narrow, self.block[1], self.shift(spec))
            return Rounding(narrow, self.block[1], self.shift(spec), over_ranks=self._of_cut_groups(spec, over_ranks))
        if self.activations == "tensor":
            scale = weights["input_scale"] * of_e4m3fn(narrow)
            zero = weights.get("input_zero_point")
            largest = scale.amax()
            if not bool(largest > 0):
                raise CheckpointError(f"input_scale is {float(largest):g}; accepted: a positive number")
            given = torch.stack((largest, torch.zeros_like(largest))) if zero is None else _common(scale, zero)
            return Rounding(narrow, given=given, zeros=zero is not None)
        bound = weights["input_scale_ub"].amin().view(1) if self._may_be_bounded else None
        if bound is not None and not bool(bound > 0):
            raise CheckpointError(f"input_scale_ub is {float(bound)}; accepted: a positive number")
        bound = None if bound is None or bool(bound.isinf()) else bound
        return Rounding(narrow, bound=bound, zeros=not self.symmetric, over_ranks=over_ranks)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        block = self.held_block(spec) if self.scale == "block" else None
        plain = widen(spec, weights, block, self.shift(spec))
        if not self.rounds:  # weights alone are widened, in the type of their scales, as the formats' tools do
            for number, part in enumerate(spec.parts):
                rows = plain["weight"][..., rows_of(part), :]
                rows.copy_(rows.to(noted_type(weights["scale_types"][..., number])))
        return plain

    def held_block(self, spec: LinearSpec) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale here; (0, 0) unless numbers are `fp8 blocks`. Blocks of
        parts, and of a rank's slice of them, may begin anywhere in our weight: as many outputs as divide all of their
        places share one."""
        if self.scale != "block":
            return 0, 0
        places = [place for part in spec.parts for place in (part.rows.start, part.offset)]
        return math.gcd(self.block[0], *places), self.block[1]

    def whole_groups(self, spec: LinearSpec) -> bool:
        """Tell whether kernels can take its groups of inputs: they begin where the rank's inputs do, and are large."""
        if "block" not in (self.scale, self.activations):
            return True
        in_blocks = self.scale == self.activations == "block"
        return in_blocks and self.block[1] >= LEAST_GROUP and not self.groups_are_cut(spec)

    def groups_are_cut(self, spec: LinearSpec) -> bool:
        """Tell whether ranks divide inputs that share a scale; all ranks say the same."""
        return spec.over_ranks is not None and not spec.whole_groups and spec.in_features % self.block[1] != 0

    def _of_cut_groups(self, spec: LinearSpec, over_ranks: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what makes of a rank's largest numbers # [num_tokens, groups that it meets] those of whole groups."""
        mine = _blocks(spec.parts[0].columns, self.block[1])
        groups = -(-spec.parts[0].shape[1] // self.block[1])

        def of_all(largest: Tensor) -> Tensor:
            whole = largest.new_zeros(len(largest), groups)
            whole[:, mine] = largest
            return over_ranks(whole)[:, mine]

        return of_all

    def shift(self, spec: LinearSpec) -> int:
        """Return how many inputs of the first block belong to another rank."""
        return int(spec.parts[0].columns.start) % self.block[1] if "block" in (self.scale, self.activations) else 0

    @property
    def _may_be_bounded(self) -> bool:
        of_fp8 = self.dtype != torch.int8 and not self.made_at_load
        return of_fp8 and self.scale == "channel" and self.activations == "token"

    def _weight_slot(self, spec: LinearSpec, part: Part, weights: Weights) -> Slot:
        weight, source = weights["weight"][rows_of(part)], (part.rows, part.columns)
        if self.made_at_load:
            scales = weights["weight_scale"][rows_of(part)]
            store = partial(_round_to_fp8, weight, scales, self.scale == "channel", spec.dtype)
            return Slot(part.shape, source, weight, False, store, spec.dtype)
        if self.dtype == torch.int8:
            return Slot(part.shape, source, weight, stored=("I8",))
        as_fnuz = partial(_store_as_fnuz, weight) if weight.dtype == torch.float8_e4m3fnuz else None
        return Slot(part.shape, source, weight, False, as_fnuz, torch.float8_e4m3fn, stored=("F8_E4M3",))

    def _scale_slot(self, spec: LinearSpec, number: int, weights: Weights) -> Slot:
        """Return the slot of the scales of the part `number`."""
        part = spec.parts[number]
        scales, rows, columns = weights["weight_scale"], part.rows, part.columns
        kind = None if self.rounds else weights["scale_types"][number]
        factor = of_e4m3fn(weights["weight"].dtype)
        of_floats = self.dtype != torch.int8
        more: dict[str, Any] = {"dummy": DUMMY_SCALE[self.numbers], "is_scale": of_floats, "as_stored": True}
        if self.scale != "block":
            mine = scales[rows_of(part)]
            return _slot_of_outputs(
                part, mine, partial(store_scales, mine, kind, factor=factor, pick=Tensor.flatten), **more
            )
        height, width = self.block
        step = self.held_block(spec)[0]
        first, count = part.offset // step, -(-(rows.stop - rows.start) // step)
        source = _blocks(rows, height), _blocks(columns, width)
        mine, places = scales[first : first + count], range(rows.start, rows.start + step * count, step)
        store = partial(store_scales, mine, kind, factor=factor, pick=partial(_of_rows, places, height, source[1]))
        high, wide = -(-part.shape[0] // height), -(-part.shape[1] // width)
        shapes = ((high, 1, wide, 1), *([()] if high == wide == 1 else []))  # ModelOpt's
        return Slot((high, wide), source, mine, store=store, stored=(*FLOATS, *E8M0), shapes=shapes, **more)

    def _number_slot(self, name: str, place: Tensor) -> Slot:
        stored = INTEGERS if name == "input_zero_point" else FLOATS
        dummy = DUMMY_INPUT_SCALE[self.numbers] if name == "input_scale" else 0.0
        store = partial(store_scales, place, None, pick=Tensor.flatten)
        optional, shapes = name == "input_scale_ub", ((), (1, 1))
        return Slot(
            (1,), (slice(0, 1),), place, optional, store, torch.float32, stored, shapes=shapes, dummy=dummy,
            is_scale=name == "input_scale",
        )  # fmt: skip


def largest_of_ranks(spec: LinearSpec, weights: Weights) -> Callable[[Tensor], Tensor] | None:
    """Return what finds the largest activations of all ranks. A GPU does without: there each of 64 linears of a small
    model would wait for another collective in every step, and a rank's own scales are never coarser."""
    return spec.over_ranks if weights["weight"].device.type == "cpu" else None


def widen(spec: LinearSpec, weights: Weights, block: tuple[int, int] | None = None, shift: int = 0) -> Weights:
    """Return the weights of a linear or of experts in the spec's type, with the bias. The scales are [..., out] or,
    with `block`, [..., row blocks, column blocks]: row r and column c are in block (r // block[0], (c + shift) //
    block[1])."""
    narrow, scales = weights["weight"].flatten(0, -2), weights["weight_scale"]
    (total, width), outputs = narrow.shape, weights["weight"].shape[-2]
    weight = torch.empty(narrow.shape, dtype=spec.dtype, device=narrow.device)
    step = max(1, AT_ONCE // width)
    for start in range(0, total, step):
        rows = slice(start, start + step)
        if block is None:
            scale = scales.flatten()[rows, None]
        else:
            row = torch.arange(start, min(start + step, total), device=narrow.device)
            scale = scales.flatten(0, -2)[row // outputs * scales.shape[-2] + row % outputs // block[0]]
            scale = scale.repeat_interleave(block[1], 1)[:, shift : shift + width]
        weight[rows] = narrow[rows].float() * scale
    bias = {"bias": weights["bias"]} if "bias" in weights else {}
    return {"weight": weight.view(weights["weight"].shape), **bias}


def _slot_of_outputs(part: Part, place: Tensor, store: Callable[[Tensor], None], **more: Any) -> Slot:
    """Return the slot of a number for each output of `part`, or of one for all of them, in fp32."""
    outputs = part.shape[0]
    shapes = ((outputs,), (), (1,), (1, 1))
    return Slot((outputs, 1), (part.rows, slice(0, 1)), place, store=store, dtype=torch.float32, shapes=shapes, **more)


def _blocks(places: slice, size: int) -> slice:
    """Return which blocks of so many places hold `places`."""
    return slice(places.start // size, -(-places.stop // size))


def of_e4m3fn(narrow: torch.dtype) -> float:
    """Return by how much scales grow beside the bits of e4m3fn in type `narrow`, for e4m3fnuz reads half as much."""
    return 2.0 if narrow == torch.float8_e4m3fnuz else 1.0


def _round_to_fp8(weight: Tensor, scales: Tensor, per_output: bool, dtype: torch.dtype, values: Tensor) -> None:
    """Round values [n, k], of a model in `dtype`, into weight [n, k] and scales [n]: one for each output, or the same
    for all."""
    values = values.to(dtype).to(weight.device)
    largest = None if per_output else torch.linalg.vector_norm(values, float("inf"))
    step = max(1, AT_ONCE // values.shape[1])
    for start in range(0, values.shape[0], step):
        rows = slice(start, start + step)
        quantized = quantize_per_token_reference(values[rows], weight.dtype, largest)
        weight[rows] = quantized.values
        scales[rows] = quantized.scales[:, 0]


def _store_as_fnuz(place: Tensor, values: Tensor) -> None:
    """Write the bits of e4m3fn, but for those of -0, which are NaN in e4m3fnuz."""
    bits = values.view(torch.uint8).to(place.device)
    place.view(torch.uint8).copy_(bits.masked_fill(bits == 128, 0))


def _must_be_zero(name: str, values: Tensor) -> None:
    if bool(values.count_nonzero()):
        largest = float(values.abs().amax())
        raise CheckpointError(f"{name} of int8 weights is up to {largest:g}; accepted: 0, or none")


def _of_rows(rows: range, height: int, columns: slice, values: Tensor) -> Tensor:
    """Return the scales of `rows`, given those of the blocks of `height` rows that they are in."""
    if values.dim() != 2:  # of which all columns are read
        values = values.view(len(values) if values.dim() else 1, -1)[:, columns]
    blocks = torch.arange(rows.start, rows.stop, rows.step, device=values.device) // height - rows.start // height
    return values[blocks]


def _common(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the scale and the zero point of a range that holds those of all parts: their own where they are alike."""
    if bool((scales == scales.flatten()[0]).all() & (zeros == zeros.flatten()[0]).all()):
        return torch.stack((scales.flatten()[0], zeros.flatten()[0]))
    low, high = ((-128.0 - zeros) * scales).amin(), ((127.0 - zeros) * scales).amax()
    scale = (high - low) / 255.0
    return torch.stack((scale, (-128.0 - low / scale).round()))
