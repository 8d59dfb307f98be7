"""Lists how tools that quantize weights alone, to integers or to floats of 4 bits, name their tensors, and how their
codes lie."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.coded import Values

Axis = Literal["out", "in", "groups"]
INTERLEAVED = [0, 4, 1, 5, 2, 6, 3, 7]
"""where in a word of AutoAWQ's its first code is, its second, ..."""


@dataclass(frozen=True)
class Spelling:
    """Names a format's tensors and says how they lie."""

    codes: str
    scales: str
    zeros: str = ""
    """packed along the outputs, in all formats"""
    groups: str = ""
    """the group of each input (act-order); empty: the format has no such tensor"""
    shape: str = ""
    """a tensor that repeats the weight's shape, which is checked; empty: there is none"""
    unused: tuple[str, ...] = ()
    """scales of activations, and of weights that are rounded once more, which stay as they are here"""
    transposed: bool = False
    """[in, out] and [groups, out], not [out, in] and [out, groups]"""
    packed: Axis = "in"
    """the side along which codes are packed"""
    interleaved: bool = False
    """Eight codes are in a word as INTERLEAVED says, zeros too."""
    spare_bias: bool = False
    """Linears without a bias may be stored with one of zeros."""
    word: torch.dtype = torch.int32
    """what codes are packed into"""
    types: tuple[str, ...] = ("I32",)
    """its names in safetensors"""
    stored_bits: int = 0
    """what a code takes of its word; 0: its own bits"""
    signed: bool = False
    """Codes and zeros are in two's complement; else they count from the least."""
    flat_scales: bool = False
    """Scales of one group are [out]."""
    smoothed: bool = False
    """Inputs may be multiplied by AWQ's numbers (smoothing.py)."""
    values: Values = "integer"
    narrow_scales: torch.dtype | None = None
    """of scales that are kept as they are: uint8, which is e8m0, or float8_e4m3fn; None: they are floats of any type"""
    factor: str = ""
    """the scale of all weights; empty: there is none"""
    divides: bool = False
    """Scales are divided by the factor."""
    rounds: bool = False
    """The weight is rounded to bfloat16."""
    by_group: bool = False
    """Codes are [out, groups, words], not [out, words]."""


def _spelling(row: dict[str, Any]) -> Spelling:
    """The spelling of a row, which names torch's types by their names."""
    settings: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in row.items()}
    return Spelling(**settings | {name: getattr(torch, row[name]) for name in ("word", "narrow_scales") if name in row})


_ROWS = json.loads(Path(__file__).with_name("spellings.json").read_text(encoding="utf-8"))
SPELLINGS: dict[str, Spelling] = {layout: _spelling(row) for layout, row in _ROWS["integers"].items()}
"""layout of a LinearFormat -> how its tensors are named, and lie. int_quantized has a byte for every code;
`weight_scale_2` of modelopt_awq is that of fp8, to which W4A8 rounds what 4 bits say; the smoothing of modelopt_int8
(SmoothQuant's) is as AWQ's."""
FLOATS_4: dict[tuple[str, str], Spelling] = {
    (row.pop("format"), row.pop("writer")): _spelling(row) for row in _ROWS["floats"]
}
"""(format, who wrote the checkpoint; blocks: gpt-oss) -> the same of floats e2m1, two neighbouring inputs a byte, the
first in its lower half. Of mxfp4 (OCP Microscaling Formats 1.0) 32 inputs share a power of two, a byte e8m0; of nvfp4
16 (32, where ModelOpt has activations of 8 bits in mind) a float e4m3, and all weights a factor in fp32."""
GROUPS_4 = {"mxfp4": 32, "nvfp4": 16}
"""inputs that share a scale, unless config.json says otherwise"""


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes [..., n] uint8 that are dense in words [..., m] of any integers."""
    run = math.lcm(bits, 8)  # bits of the fewest codes that fill whole bytes
    units = words.view(torch.uint8).unflatten(-1, (-1, run // 8))
    codes = torch.empty(*units.shape[:-1], run // bits, dtype=torch.uint8, device=words.device)
    for index in range(run // bits):
        byte, shift = divmod(index * bits, 8)
        code = units[..., byte] >> shift
        if shift + bits > 8:
            code = code | units[..., byte + 1] << 8 - shift
        codes[..., index] = code & (1 << bits) - 1
    return codes.flatten(-2)


def pack_words(codes: Tensor, bits: int, word: torch.dtype) -> Tensor:
    """Return words [..., m] of type `word` in which codes [..., n] uint8 are dense: what `unpack_words` takes apart.
    The last word is filled up with zeros. `bits` divides 8."""
    per_byte, per_word = 8 // bits, word.itemsize * 8 // bits
    parts = F.pad(codes, (0, -codes.shape[-1] % per_word)).unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for index in range(1, per_byte):
        packed |= parts[..., index] << index * bits
    return packed.view(word)
