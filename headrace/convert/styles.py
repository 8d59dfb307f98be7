"""Lists the tools in whose style a checkpoint is written: which tensors stand for a linear, and what config.json says.

Names and packing are those by which quantization/ reads them (spellings.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from headrace.convert.rounding import Rounded
from headrace.convert.weight_scheme import Style, WeightScheme
from headrace.quantization.spellings import FLOATS_4, INTERLEAVED, SPELLINGS, Spelling, pack_words

MIDDLE = 8
"""the zero point of 4-bit codes, which count from the least"""


def integers_4(spelling: Spelling, rounded: Rounded, group_size: int, zero: int = MIDDLE) -> dict[str, Tensor]:
    """Return the tensors of a weight of 4-bit integers, as the tool with that spelling writes them; `zero`: what it
    stores of the zero point, which all groups have."""
    codes = (rounded.codes + MIDDLE).view(torch.uint8)
    zeros = torch.full(rounded.scales.shape, zero, dtype=torch.uint8, device=codes.device)
    tensors = {
        spelling.codes: _packed(spelling, codes, along_inputs=spelling.packed == "in"),
        spelling.scales: rounded.scales.T.contiguous() if spelling.transposed else rounded.scales,
    }
    if spelling.transposed:
        tensors[spelling.zeros] = _packed(spelling, zeros, along_inputs=False)
    if spelling.shape:
        tensors[spelling.shape] = torch.tensor(codes.shape)
    if spelling.transposed and spelling.groups:
        tensors[spelling.groups] = (torch.arange(codes.shape[1]) // group_size).int()
    return tensors


def _packed(spelling: Spelling, codes: Tensor, along_inputs: bool) -> Tensor:
    """Return codes [out, n] as words, the way round that the tool has them."""
    if not along_inputs:
        codes = codes.T
        if spelling.interleaved:
            places = torch.tensor(INTERLEAVED, device=codes.device).argsort()
            codes = codes.unflatten(-1, (-1, 8))[..., places].flatten(-2)
    words = pack_words(codes.contiguous(), 4, spelling.word)
    return words.T.contiguous() if along_inputs == spelling.transposed else words


def _compressed(scheme: WeightScheme, rounded: Rounded) -> dict[str, Tensor]:
    if scheme.bits == 8:
        scales = rounded.scales.view(1) if scheme.strategy == "tensor" else rounded.scales
        return {"weight": rounded.codes, "weight_scale": scales}
    if scheme.kind == "int":
        return integers_4(SPELLINGS["pack_quantized"], rounded, scheme.group_size(rounded))
    return _floats_4(FLOATS_4["mxfp4", "compressed-tensors"], rounded)


def _floats_4(spelling: Spelling, rounded: Rounded) -> dict[str, Tensor]:
    return {spelling.codes: pack_words(rounded.codes, 4, spelling.word), spelling.scales: rounded.scales}


def _state_compressed(scheme: WeightScheme, kept: list[str], rounded: list[str]) -> dict[str, Any]:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.described()},
        "ignore": kept,
        "kv_cache_scheme": cache if scheme.kv_scales else None,
        "global_compression_ratio": None,
    }


# ---- Quark


def _quark(scheme: WeightScheme, rounded: Rounded) -> dict[str, Tensor]:
    if scheme.bits == 4:
        return _floats_4(FLOATS_4["mxfp4", "quark"], rounded)
    scales = rounded.scales.float()
    return {"weight": rounded.codes, "weight_scale": scales.view(()) if scheme.strategy == "tensor" else scales[:, 0]}


def _state_quark(scheme: WeightScheme, kept: list[str], rounded: list[str]) -> dict[str, Any]:
    none: dict[str, Any] = {"ch_axis": None, "group_size": None, "is_dynamic": False, "symmetric": True}
    none["round_method"] = "half_even"
    tensor = {**none, "dtype": "fp8_e4m3", "qscheme": "per_tensor", "observer_cls": "PerTensorMinMaxObserver"}
    channel = {**tensor, "qscheme": "per_channel", "observer_cls": "PerChannelMinMaxObserver"}
    weight, inputs = tensor, {**channel, "ch_axis": 1, "is_dynamic": True} if scheme.inputs else None
    if scheme.strategy == "channel":
        weight = {**channel, "ch_axis": 0}
    if scheme.bits == 4:
        weight = {**none, "dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": scheme.block[1]}
        weight |= {"scale_format": "e8m0", "scale_calculation_mode": "even", "observer_cls": "PerBlockMXObserver"}
    linear = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}
    of_cache = ("*k_proj", "*v_proj") if scheme.kv_scales else ()
    cached = {name: {**linear, "output_tensors": tensor} for name in of_cache}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": linear,
        "layer_quant_config": cached,
        "layer_type_quant_config": {},
        "kv_cache_quant_config": cached,
        "exclude": kept,
        "algo_config": None,
        "softmax_quant_spec": None,
        "export": {
            "kv_cache_group": [*cached], "min_kv_scale": 0.0, "pack_method": "reorder",
            "weight_format": "real_quantized", "weight_merge_groups": None,
        },
    }  # fmt: skip


# ---- AutoAWQ and AutoGPTQ


def _awq(scheme: WeightScheme, rounded: Rounded) -> dict[str, Tensor]:
    return integers_4(SPELLINGS["awq"], rounded, scheme.group_size(rounded))


def _state_awq(scheme: WeightScheme, kept: list[str], rounded: list[str]) -> dict[str, Any]:
    # a name also leaves alone all that it occurs in, as that of a router does in those of gates
    names = [name for name in kept if not any(name in linear for linear in rounded)]
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": scheme.block[1] or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": names,
    }


def _gptq(scheme: WeightScheme, rounded: Rounded) -> dict[str, Tensor]:
    return integers_4(SPELLINGS["gptq"], rounded, scheme.group_size(rounded), MIDDLE - 1)


def _state_gptq(scheme: WeightScheme, kept: list[str], rounded: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": scheme.block[1] or -1,
        "desc_act": False,
        "sym": True,
        "true_sequential": True,
        "checkpoint_format": "gptq",
        "lm_head": False,
        "dynamic": {f"-:{re.escape(name)}$": {} for name in kept if name != "lm_head"},
    }


_W4A16 = ("w4a16", "w4a16_gptq", "w4a16_awq")
STYLES = {
    style.name: style
    for style in (
        Style("compressed-tensors", _compressed, _state_compressed, kv_scales=("k_scale", "v_scale")),
        Style(
            "quark", _quark, _state_quark, ("fp8", "fp8_channel", "mxfp4"),
            ("k_proj.output_scale", "v_proj.output_scale"),
        ),
        Style("awq", _awq, _state_awq, _W4A16, unit=8),
        Style("gptq", _gptq, _state_gptq, _W4A16, unit=8),
    )
}  # fmt: skip
"""`--format` -> how it is written"""
