"""Lists the schemes of `headrace quantize`: what is written of a linear, and how config.json describes it.

Both are as compressed-tensors writes them, which headrace, vLLM, SGLang and transformers read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.convert.rounding import FP8, INT4, INT8, MXFP4, Grid, Rounded, round_to_nearest
from headrace.errors import ConfigError
from headrace.quantization.spellings import pack_words

_TOKEN = {"strategy": "token", "dynamic": True}
_BLOCK = 128
DEFAULT_GROUP = 128
"""inputs that share a scale in w4a16, unless the user says otherwise"""


@dataclass(frozen=True)
class WeightScheme:
    """Says how a linear's weight is rounded, and what is written of it."""

    name: str
    grid: Grid
    kind: str
    """`int` or `float`"""
    bits: int
    strategy: str
    """which weights share a scale: `tensor`, `channel`, `block` or `group`"""
    format: str
    """compressed-tensors' name of how tensors lie"""
    write: Callable[[Rounded], dict[str, Tensor]]
    """gives the tensors of a linear by their names in it"""
    block: tuple[int, int] = (0, 0)
    """outputs and inputs that share a scale; 0: all"""
    inputs: tuple[tuple[str, Any], ...] = ()
    """how activations are rounded; empty: they keep 16 bits"""
    scale_dtype: str = ""
    """of scales, where it is not the model's"""

    def round(self, weight: Tensor) -> Rounded:
        """Round a weight [out, in]."""
        rows, columns = (one or size for one, size in zip(self.block, weight.shape, strict=True))
        return round_to_nearest(weight, rows, columns, self.grid)

    def refusal(self, shape: tuple[int, ...]) -> str:
        """Say why a weight of that shape keeps its type; "" if it can be rounded."""
        columns = self.block[1]
        return f"{shape[1]} inputs are no multiple of {columns}" if columns and shape[1] % columns else ""

    def described(self) -> dict[str, Any]:
        """Return the group of config.json's quantization_config that describes all linears."""
        rounded = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        size = {"group": self.block[1], "channel": -1 if self.format == "pack-quantized" else None}.get(self.strategy)
        weights = {**rounded, "strategy": self.strategy, "group_size": size, "dynamic": False}
        if self.strategy == "block":
            weights["block_structure"] = [*self.block]
        if self.scale_dtype:
            weights |= {"scale_dtype": self.scale_dtype, "zp_dtype": self.scale_dtype}
        inputs = {**rounded, "group_size": None, **dict(self.inputs)} if self.inputs else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {**group, "format": self.format}


def _whole_bytes(rounded: Rounded) -> dict[str, Tensor]:
    return {"weight": rounded.codes, "weight_scale": rounded.scales}


def _one_scale(rounded: Rounded) -> dict[str, Tensor]:
    return {"weight": rounded.codes, "weight_scale": rounded.scales.view(1)}


def _packed_integers(rounded: Rounded) -> dict[str, Tensor]:
    codes = (rounded.codes + 8).view(torch.uint8)  # counted from the least
    return {
        "weight_packed": pack_words(codes, 4, torch.int32),
        "weight_scale": rounded.scales,
        "weight_shape": torch.tensor(rounded.codes.shape),
    }


def _packed_floats(rounded: Rounded) -> dict[str, Tensor]:
    return {"weight_packed": pack_words(rounded.codes, 4, torch.uint8), "weight_scale": rounded.scales}


_FP8 = WeightScheme("fp8", FP8, "float", 8, "tensor", "float-quantized", _one_scale, inputs=(*_TOKEN.items(),))
_OF_BLOCKS = {"strategy": "group", "group_size": _BLOCK, "dynamic": True}
SCHEMES = {
    one.name: one
    for one in (
        _FP8,
        replace(_FP8, name="fp8_channel", strategy="channel", write=_whole_bytes, block=(1, 0)),
        replace(
            _FP8, name="fp8_block", strategy="block", write=_whole_bytes, block=(_BLOCK, _BLOCK),
            inputs=(*_OF_BLOCKS.items(),),
        ),
        WeightScheme(
            "int8", INT8, "int", 8, "channel", "int-quantized", _whole_bytes, (1, 0), inputs=(*_TOKEN.items(),)
        ),
        WeightScheme("w4a16", INT4, "int", 4, "group", "pack-quantized", _packed_integers, (1, DEFAULT_GROUP)),
        WeightScheme(
            "mxfp4", MXFP4, "float", 4, "group", "mxfp4-pack-quantized", _packed_floats, (1, 32),
            scale_dtype="torch.uint8",
        ),
    )
}  # fmt: skip
"""the schemes by name"""


def find_scheme(name: str, group_size: int | None = None) -> WeightScheme:
    """Return the scheme of that name. `group_size`: of w4a16; -1: all inputs of an output share a scale. Raises
    ConfigError where the scheme has no groups to choose."""
    scheme = SCHEMES[name]
    if group_size is None:
        return scheme
    if name != "w4a16":
        raise ConfigError(f"--group-size {group_size} is for w4a16; {name} has no groups to choose")
    if group_size == -1:
        return replace(scheme, strategy="channel", block=(1, 0))
    if group_size < 16 or group_size % 8:
        raise ConfigError(f"--group-size must be -1 (an output) or a multiple of 8 from 16 on, got {group_size}")
    return replace(scheme, block=(1, group_size))
