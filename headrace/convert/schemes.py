"""Lists the schemes of `headrace quantize`."""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.convert.rounding import FP8, INT4, INT8, MXFP4
from headrace.convert.styles import STYLES
from headrace.convert.weight_scheme import WeightScheme
from headrace.errors import ConfigError

_TOKEN = {"strategy": "token", "dynamic": True}
_BLOCK = 128
DEFAULT_GROUP = 128
"""inputs that share a scale in w4a16, unless the user says otherwise"""

_STYLE = STYLES["compressed-tensors"]
_FP8 = WeightScheme("fp8", FP8, "float", 8, "tensor", "float-quantized", _STYLE, inputs=(*_TOKEN.items(),))
_INT4 = WeightScheme("w4a16", INT4, "int", 4, "group", "pack-quantized", _STYLE, (1, DEFAULT_GROUP))
_OF_BLOCKS = {"strategy": "group", "group_size": _BLOCK, "dynamic": True}
SCHEMES = {
    one.name: one
    for one in (
        _FP8,
        replace(_FP8, name="fp8_channel", strategy="channel", block=(1, 0)),
        replace(_FP8, name="fp8_block", strategy="block", block=(_BLOCK, _BLOCK), inputs=(*_OF_BLOCKS.items(),)),
        WeightScheme("int8", INT8, "int", 8, "channel", "int-quantized", _STYLE, (1, 0), (*_TOKEN.items(),)),
        _INT4,
        replace(_INT4, name="w4a16_gptq", algorithm="gptq"),
        replace(_INT4, name="w4a16_awq", algorithm="awq"),
        WeightScheme(
            "mxfp4", MXFP4, "float", 4, "group", "mxfp4-pack-quantized", _STYLE, (1, 32), scale_dtype=str(torch.uint8)
        ),
    )
}
"""the schemes by name"""


def find_scheme(
    name: str,
    group_size: int | None = None,
    written_as: str = "compressed-tensors",
    kv_scales: bool = False,
    act_order: bool = True,
) -> WeightScheme:
    """Return the scheme of that name. `group_size`: of integers of 4 bits; -1: all inputs of an output share a scale.
    `written_as`: a key of STYLES. Raises ConfigError where the scheme has no groups to choose, or the style cannot hold
    it."""
    scheme = replace(SCHEMES[name], style=STYLES[written_as], kv_scales=kv_scales, act_order=act_order)
    if scheme.style.holds and name not in scheme.style.holds:
        fitting = [key for key, one in STYLES.items() if not one.holds or name in one.holds]
        raise ConfigError(f"--format {written_as} does not hold {name}; accepted: {', '.join(fitting)}")
    if kv_scales and scheme.style.kv_scales is None:
        fitting = [key for key, one in STYLES.items() if one.kv_scales]
        raise ConfigError(f"--format {written_as} has no scales of a KV cache; accepted: {', '.join(fitting)}")
    if group_size is None:
        return scheme
    if scheme.format != "pack-quantized":
        raise ConfigError(f"--group-size {group_size} is for w4a16; {name} has no groups to choose")
    if group_size == -1:
        return replace(scheme, strategy="channel", block=(1, 0))
    if group_size < 16 or group_size % 8:
        raise ConfigError(f"--group-size must be -1 (an output) or a multiple of 8 from 16 on, got {group_size}")
    return replace(scheme, block=(1, group_size))
