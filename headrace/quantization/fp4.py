"""Serves weights in 4-bit floats (e2m1) whose neighbouring inputs share a scale.

MXFP4 (OCP Microscaling Formats 1.0): 32 inputs share a power of two, a byte e8m0. gpt-oss, Quark and compressed-tensors
store the same bytes under different names: two neighbouring inputs a byte, the first in its lower half.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.errors import ConfigError
from headrace.kernels.packed import PackedWeight, pack_codes
from headrace.quantization.formats import WeightFormat
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import LinearSpec, Part, Scheme, Slot, Weights
from headrace.quantization.unquantized import bias_slot, empty_bias, rows_of

MX_GROUP = 32
"""inputs that share a scale of MXFP4"""
MX_NAMES = {
    "quark": ("weight", "weight_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "blocks": ("blocks", "scales"),
}
"""who wrote the checkpoint -> its names for codes and scales. blocks: gpt-oss, whose codes are [out, groups, 16] where
the others' are [out, in / 2]"""
AT_ONCE = 1 << 26
"""bytes of codes that are repacked at a time, since each takes a few more meanwhile"""


class Mxfp4Layout:
    """Keeps `codes` [out, in / 2] and `scales` [out, in / 32], both uint8 as in the checkpoint."""

    def __init__(self, names: str) -> None:
        self.names = MX_NAMES[names]
        self.in_groups = names == "blocks"

    def create_weights(self, spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Weights:
        for part in spec.parts:
            _check_groups(part, spec.in_features)
        shape = (*experts, spec.out_features)
        codes = torch.empty(*shape, spec.in_features // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(*shape, spec.in_features // MX_GROUP, dtype=torch.uint8, device=device)
        used = max(rows_of(part).stop for part in spec.parts)
        for tensor in (codes, scales):
            tensor[..., used:, :].zero_()
        return {"codes": codes, "scales": scales, **empty_bias(spec, device, experts)}

    def slots(self, spec: LinearSpec, weights: Weights) -> Iterator[tuple[Part, str, Slot]]:
        for part in spec.parts:
            outputs, groups = part.shape[0], part.shape[1] // MX_GROUP
            own = slice(part.columns.start // MX_GROUP, part.columns.stop // MX_GROUP)
            codes, scales = (weights[name][rows_of(part)] for name in ("codes", "scales"))
            if self.in_groups:
                half = MX_GROUP // 2
                shape, source = (outputs, groups, half), (part.rows, own, slice(0, half))
                taken = Slot(shape, source, codes.unflatten(-1, (-1, half)), stored=("U8",))
            else:
                columns = slice(part.columns.start // 2, part.columns.stop // 2)
                taken = Slot((outputs, part.shape[1] // 2), (part.rows, columns), codes, stored=("U8",))
            yield part, self.names[0], taken
            powers = Slot((outputs, groups), (part.rows, own), scales, stored=("U8", "F8_E8M0"), e8m0=True)
            yield part, self.names[1], powers
            yield from bias_slot(spec, part, weights)

    def packed(self, spec: LinearSpec, weights: Weights) -> PackedWeight:
        """Return the weight as kernels read it; see quantization/packed.py."""
        codes = repack_pairs(weights["codes"])
        return PackedWeight(codes, weights["scales"], None, None, 4, "e2m1", MX_GROUP, spec.in_features)

    def dequantize(self, spec: LinearSpec, weights: Weights) -> Weights:
        bias = {"bias": weights["bias"]} if "bias" in weights else {}
        return {"weight": self.packed(spec, weights).dequantize(spec.dtype), **bias}


def repack_pairs(pairs: Tensor) -> Tensor:
    """Return codes of 4 bits as PackedWeight holds them, given # [..., in / 2] uint8 with neighbours in a byte."""
    rows = pairs.flatten(0, -2)
    packed = torch.empty_like(rows)
    step = max(1, AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        packed[start : start + step] = pack_codes(torch.stack((some & 15, some >> 4), -1).flatten(-2), 4, "e2m1")
    return packed.view(pairs.shape)


def _check_groups(part: Part, held: int) -> None:
    """Raise ConfigError where scales are not shared by whole groups, in the checkpoint or on this rank."""
    for what, inputs in (("", part.shape[1]), (" on this rank", held)):
        if inputs % MX_GROUP or part.columns.start % MX_GROUP:
            name = "a linear" if part.name is None else part.name
            raise ConfigError(f"mxfp4: {name} has {inputs} inputs{what}; accepted: a multiple of {MX_GROUP}")


def mxfp4(format: WeightFormat, names: str) -> Scheme:
    """Return a new scheme for MXFP4 weights under the names of MX_NAMES."""
    layout = Mxfp4Layout(names)
    return Scheme(format, layout, PackedProduct(layout))
