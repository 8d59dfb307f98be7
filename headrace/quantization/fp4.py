"""Serves weights in 4-bit floats (e2m1) whose neighbouring inputs share a scale.

MXFP4 (OCP Microscaling Formats 1.0): 32 inputs share a power of two, a byte e8m0. NVFP4: 16 inputs share a float e4m3
(32, where ModelOpt has activations of 8 bits in mind), and all weights one in fp32. The tools store the same bytes
under different names: two neighbouring inputs a byte, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.packed import BLOCK, PackedWeight, pack_codes
from headrace.quantization.formats import WeightFormat
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import E8M0, LinearSpec, Part, Scheme, Slot, Weights
from headrace.quantization.smoothing import NAME as SMOOTHING
from headrace.quantization.smoothing import empty_smoothing, smoothed, smoothing_slot, why_not_common
from headrace.quantization.unquantized import bias_slot, empty_bias, rows_of


@dataclass(frozen=True)
class Spelling:
    """Names the tensors of a tool, and says what it does with them."""

    codes: str
    scales: str
    factor: str = ""
    """the scale of all weights; empty: there is none"""
    divides: bool = False
    """Scales are divided by the factor."""
    rounds: bool = False
    """The weight is rounded to bfloat16."""
    unused: str = ""
    """a scale for activations of 4 or 8 bits, which stay in 16 here"""
    in_groups: bool = False
    """Codes are [out, groups, 16] where the others' are [out, in / 2]."""
    smoothed: bool = False
    """Inputs may be multiplied by AWQ's numbers (smoothing.py)."""


MX_GROUP, NV_GROUP = 32, 16
"""inputs that share a scale"""
MX_SPELLINGS = {
    "quark": Spelling("weight", "weight_scale", unused="input_scale"),
    "compressed-tensors": Spelling("weight_packed", "weight_scale"),
    "blocks": Spelling("blocks", "scales", in_groups=True),
}
"""who wrote the checkpoint; blocks: gpt-oss"""
NV_SPELLINGS = {
    "compressed-tensors": Spelling(
        "weight_packed", "weight_scale", "weight_global_scale", divides=True, rounds=True, unused="input_global_scale"
    ),
    "auto-round": Spelling(
        "weight_packed", "weight_scale", "weight_global_scale", divides=True, unused="input_global_scale"
    ),
    "modelopt": Spelling("weight", "weight_scale", "weight_scale_2", unused="input_scale"),
    "modelopt-awq": Spelling("weight", "weight_scale", "weight_scale_2", unused="input_scale", smoothed=True),
}
DUMMY_FACTOR = 2.0**-12
"""factor of dummy weights, whose scales are 1"""
AT_ONCE = 1 << 26
"""bytes of codes that are repacked at a time, since each takes a few more meanwhile"""


class Fp4Layout:
    """Keeps `codes` [out, in / 2] uint8 and `scales` [out, groups] as in the checkpoint (e8m0 as uint8) and, of NVFP4,
    `factors` [out] fp32, the checkpoint's of each output's part; of AWQ `smoothing` [parts, in] fp32."""

    def __init__(self, spelling: Spelling, group: int) -> None:
        self.spelling, self.group = spelling, group
        self.e8m0 = not spelling.factor

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        for part in spec.parts:
            _check_groups(part, self.group)
        shape, scale_type = (*experts, spec.out_features), torch.uint8 if self.e8m0 else torch.float8_e4m3fn
        codes = torch.empty(*shape, spec.in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*shape, spec.in_features // self.group, dtype=scale_type, device=device)
        used = max(rows_of(part).stop for part in spec.parts)
        for tensor in (codes, scales.view(torch.uint8)):
            tensor[..., used:, :].zero_()
        more = {} if self.e8m0 else {"factors": torch.ones(shape, device=device)}
        if self.spelling.smoothed:
            more["smoothing"] = empty_smoothing(spec, device, experts)
        return {"codes": codes, "scales": scales, **more, **empty_bias(spec, device, experts)}

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        names = self.spelling
        for number, part in enumerate(spec.parts):
            outputs, groups = part.shape[0], part.shape[1] // self.group
            own = slice(part.columns.start // self.group, part.columns.stop // self.group)
            codes, scales = (weights[name][rows_of(part)] for name in ("codes", "scales"))
            if names.in_groups:
                half = self.group // 2
                shape, source = (outputs, groups, half), (part.rows, own, slice(0, half))
                taken = Slot(shape, source, codes.unflatten(-1, (-1, half)), stored=("U8",))
            else:
                columns = slice(part.columns.start // 2, part.columns.stop // 2)
                taken = Slot((outputs, part.shape[1] // 2), (part.rows, columns), codes, stored=("U8",))
            yield part, names.codes, taken
            types = E8M0 if self.e8m0 else ("F8_E4M3",)
            dummy = None if self.e8m0 else 1.0
            scaled = Slot(
                (outputs, groups), (part.rows, own), scales, stored=types, e8m0=self.e8m0, dummy=dummy, is_scale=True
            )
            yield part, names.scales, scaled
            if names.factor:
                factors, dummy = weights["factors"][rows_of(part)], DUMMY_FACTOR ** (-1 if names.divides else 1)
                one = Slot((1,), (slice(0, 1),), factors, shapes=((), (1, 1)), dummy=dummy, is_scale=True)
                yield part, names.factor, one
            if names.smoothed:
                yield part, SMOOTHING, smoothing_slot(part, number, weights)
            if names.unused:
                yield part, names.unused, Slot((1,), (slice(0, 1),), None, optional=True)
            yield from bias_slot(spec, part, weights)

    def packed(self, spec: LinearSpec, weights: Weights) -> PackedWeight | str:
        """Return the weight as kernels read it, without `smoothing`; see quantization/packed.py."""
        return why_not_common(weights) or self._packed(spec, weights)

    def _packed(self, spec: LinearSpec, weights: Weights) -> PackedWeight:
        factors = weights.get("factors")
        if factors is not None and self.spelling.divides:
            factors = factors.reciprocal()
        codes = repack_pairs(weights["codes"])
        return PackedWeight(codes, weights["scales"], None, factors, 4, "e2m1", self.group, spec.in_features)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        bias = {"bias": weights["bias"]} if "bias" in weights else {}
        packed = self._packed(spec, weights)
        if "smoothing" in weights:
            return {"weight": smoothed(spec, weights, packed.dequantize(torch.float32)), **bias}
        if not self.spelling.rounds:
            return {"weight": packed.dequantize(spec.dtype), **bias}
        # to the bit as its tool: a product with a reciprocal would be rounded twice
        scales = weights["scales"].float() / weights["factors"][..., None]
        wide = replace(packed, scales=scales, factors=None).dequantize(torch.bfloat16)
        return {"weight": wide.to(spec.dtype), **bias}


def repack_pairs(pairs: Tensor) -> Tensor:
    """Return codes of 4 bits as PackedWeight holds them, given # [..., in / 2] uint8 with neighbours in a byte."""
    rows = pairs.flatten(0, -2)
    packed = rows.new_empty(len(rows), -(-rows.shape[1] // (BLOCK // 2)) * (BLOCK // 2))
    step = max(1, AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        packed[start : start + step] = pack_codes(torch.stack((some & 15, some >> 4), -1).flatten(-2), 4, "e2m1")
    return packed.view(*pairs.shape[:-1], -1)


def _check_groups(part: Part, group: int) -> None:
    """Raise ConfigError where scales are not shared by whole groups, in the checkpoint or on this rank."""
    name, inputs = "the linear" if part.name is None else part.name, part.shape[1]
    start, stop = part.columns.start, part.columns.stop
    if inputs % group:
        raise ConfigError(f"{name} has {inputs} inputs in groups of {group}; accepted: a multiple of {group}")
    if start % group or stop % group:
        raise ConfigError(
            f"{name} has inputs [{start}, {stop}) on this rank in groups of {group}; accepted: a multiple of {group} "
            "on each rank"
        )


def mxfp4(format: WeightFormat, names: str) -> Scheme:
    """Return a new scheme for MXFP4 weights under the names of MX_SPELLINGS."""
    return _scheme(format, Fp4Layout(MX_SPELLINGS[names], MX_GROUP))


def nvfp4(format: WeightFormat, names: str, group_size: int = NV_GROUP) -> Scheme:
    """Return a new scheme for NVFP4 weights under the names of NV_SPELLINGS, which meet activations of 16 bits."""
    return _scheme(format, Fp4Layout(NV_SPELLINGS[names], group_size))


def _scheme(format: WeightFormat, layout: Fp4Layout) -> Scheme:
    return Scheme(format, layout, PackedProduct(layout))
