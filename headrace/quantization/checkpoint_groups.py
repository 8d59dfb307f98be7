"""Reads the formats of tools that give groups of linears a description of weights and activations each:
compressed-tensors, ModelOpt and Quark. Imports no torch.
"""

from __future__ import annotations

import re

from headrace.errors import UnsupportedModelError
from headrace.model_config import Fields
from headrace.quantization.checkpoint_fields import (
    checked_pattern,
    fp4,
    fp8,
    int8,
    integer_among,
    integers,
    objects,
    one_of,
    patterns,
    positive_pair,
    size_of_groups,
)
from headrace.quantization.formats import UNQUANTIZED, LinearFormat
from headrace.quantization.linear_rules import CheckpointFormat, left_alone

_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
"""compressed-tensors' formats that are served; the others (sparse ones, 6 bits) are refused by name"""
_CLASS = re.compile(r"[A-Z]\w*$")
"""A target that names a class of modules: there, names of modules are in lower case."""


def compressed_tensors(fields: Fields) -> CheckpointFormat:
    """Read `config_groups`, each with the names, patterns or classes of its linears, and `ignore`."""
    if fields.object("sparsity_config").text("format", "dense") != "dense":
        raise fields.object("sparsity_config").refusal("format", "dense: sparse weights are not served")
    if fields.object("transform_config").object("config_groups"):
        raise fields.refusal("transform_config", "absent: rotations between layers are not served")
    default, exact, regular = UNQUANTIZED, [*left_alone(patterns(fields, "ignore"))], [*left_alone(())]
    for group in objects(fields, "config_groups").values():
        linear = UNQUANTIZED  # of attention or the KV cache
        if group.object("weights"):
            name = one_of(group, "format", _COMPRESSED, fields.text("format", "mixed-precision"))
            linear = _described(group, name)
        for target in group.texts("targets") or ["Linear"]:
            if not _CLASS.match(target):
                rules = regular if target.startswith("re:") else exact
                rules.append((checked_pattern(group, "targets", target), linear))
            elif target == "Linear" and linear != UNQUANTIZED:
                default = linear
            elif linear != UNQUANTIZED:
                raise group.refusal("targets", "Linear, names of linears, or regular expressions after `re:`")
    regular.sort(key=lambda rule: rule[0])
    return CheckpointFormat("compressed-tensors", default, (*exact, *regular))


def _described(group: Fields, compression: str) -> LinearFormat:
    """Return the format that a group describes by `weights` and `input_activations`."""
    weights, inputs = group.object("weights"), group.object("input_activations")
    kind, bits = one_of(weights, "type", ("int", "float"), "int"), weights.integer("num_bits", 8)
    size, symmetric = size_of_groups(weights, "group_size", 0), weights.flag("symmetric", True)
    usual = "group" if size else "channel" if weights.values.get("group_size") == -1 else "tensor"
    strategy = weights.text("strategy", usual).lower().replace("tensor_group", "group")
    weights = weights.changed({"strategy": strategy})
    asked = inputs.integer("num_bits", 8) if inputs else 0
    if kind == "float" and bits == 4:
        sizes = {16: "nvfp4", 32: "mxfp4"}
        if size not in sizes:
            raise weights.refusal("group_size", "16 (nvfp4) or 32 (mxfp4) for floats of 4 bits")
        return fp4(sizes[size], "compressed-tensors", asked)
    if kind == "float":
        integer_among(weights, "num_bits", (4, 8))
        return _floats(weights, inputs, strategy)
    integer_among(weights, "num_bits", (4, 8), 8)
    packed = compression == "pack-quantized" or (compression == "mixed-precision" and not inputs)
    if not packed and bits == 8 and symmetric and strategy in ("tensor", "channel"):
        return int8(strategy, _rounding(inputs), inputs.flag("symmetric", True))
    one_of(weights, "strategy", ("channel", "group"))
    if not packed:
        return integers("int_quantized", bits, size, not symmetric, asked, symmetric=symmetric)
    act_order = str(weights.values.get("actorder")).lower() in ("true", "group", "dynamic")
    return integers("pack_quantized", bits, size, not symmetric, asked, symmetric=symmetric, act_order=act_order)


def _floats(weights: Fields, inputs: Fields, strategy: str) -> LinearFormat:
    """Return the fp8 format of these weights and activations."""
    one_of(weights, "strategy", ("tensor", "channel", "block", "group"))
    if strategy == "group":  # MXFP8, whose scales are powers of two
        return fp8("block", "block" if inputs else "none", block=(1, weights.integer("group_size", 32)))
    if strategy != "block":
        return fp8(strategy, _rounding(inputs))
    structure = weights.values.get("block_structure")
    if isinstance(structure, str):  # as in 128x128
        weights = weights.changed({"block_structure": [int(x) if x.isdigit() else x for x in structure.split("x")]})
    return fp8("block", "block" if inputs else "none", block=positive_pair(weights, "block_structure"))


def _rounding(inputs: Fields) -> str:
    """Return how activations are rounded: `token`, `tensor` (the checkpoint brings their scale), or `none`."""
    if not inputs:
        return "none"
    integer_among(inputs, "num_bits", (8,), 8)
    dynamic = inputs.flag("dynamic")
    strategy = one_of(inputs, "strategy", ("token", "tensor", "channel"), "token" if dynamic else "tensor")
    if strategy != "tensor" and not dynamic:
        raise inputs.refusal("dynamic", "true where tokens have scales of their own")
    return "token" if dynamic else "tensor"


# ---- ModelOpt

_ALGORITHMS = {
    "FP8": fp8("tensor", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8("channel", "token"),
    "FP8_PB_WO": fp8("block", "none", block=(128, 128)),
    "MXFP8": fp8("block", "block", block=(1, 32)),
    "W8A16": integers("modelopt_int8", 8, 0, zeros=False),
    "W8A8_SQ_PER_CHANNEL": integers("modelopt_int8", 8, 0, zeros=False, asked_bits=8),
    "NVFP4": fp4("nvfp4", "modelopt", 4),
    "W4A16_NVFP4": fp4("nvfp4", "modelopt"),
    "NVFP4_AWQ": fp4("nvfp4", "modelopt-awq", 4),
    "W4A8_NVFP4_FP8": fp4("nvfp4", "modelopt", 8, group_size=32),
    "MXFP4": fp4("mxfp4", "quark", 4),  # whose tensors have the same names
    "W4A8_MXFP4_FP8": fp4("mxfp4", "quark", 8),
}
"""`quant_algo` -> how it is stored; besides, there are those of _INTEGERS"""
_INTEGERS = {"W4A16_AWQ": 0, "W4A8_AWQ": 8}
"""`quant_algo` of 4-bit integers -> the bits of activations that it asks for"""


def modelopt(fields: Fields) -> CheckpointFormat:
    """Read `quant_algo`, one for all linears or, where it is MIXED_PRECISION, one each in `quantized_layers`. Older
    exports keep them in the object `quantization`."""
    nested = fields.object("quantization")
    fields = nested or fields
    plain = left_alone(patterns(fields, "ignore", "exclude_modules"))
    if fields.values.get("quant_algo") is None and not fields.object("quantized_layers"):
        return CheckpointFormat("modelopt")  # it is about the KV cache alone
    layers = objects(fields, "quantized_layers")
    if fields.text("quant_algo", "MIXED_PRECISION").upper() != "MIXED_PRECISION":
        return CheckpointFormat("modelopt", _algorithm(fields), plain)
    named = [(name, _algorithm(one)) for name, one in layers.items()]
    return CheckpointFormat("modelopt", UNQUANTIZED, (*plain, *named))


def _algorithm(fields: Fields) -> LinearFormat:
    name = fields.text("quant_algo").upper()
    if name in _INTEGERS:
        if fields.flag("has_zero_point"):
            raise fields.refusal("has_zero_point", f"false for {name}")
        return integers("modelopt_awq", 4, size_of_groups(fields, "group_size", 128), False, _INTEGERS[name])
    if name not in _ALGORITHMS:
        raise fields.refusal("quant_algo", f"one of {', '.join((*_ALGORITHMS, *_INTEGERS))}, MIXED_PRECISION")
    found = _ALGORITHMS[name]
    size = found.format.group_size
    if size and (fields.integer("group_size", size) or size) != size:
        raise fields.refusal("group_size", str(size))
    return found


# ---- Quark


def quark(fields: Fields) -> CheckpointFormat:
    """Read `global_quant_config`, exceptions by name and by type, and `exclude`."""
    if fields.object("export").text("pack_method", "reorder") not in ("reorder", "order"):
        raise fields.object("export").refusal("pack_method", "reorder or order")
    if fields.object("export").text("weight_format", "real_quantized") != "real_quantized":
        raise fields.object("export").refusal("weight_format", "real_quantized")
    named = tuple((name, _quark(one)) for name, one in objects(fields, "layer_quant_config").items())
    types = objects(fields, "layer_type_quant_config")
    of_linears = next((one for name, one in types.items() if name.rpartition(".")[2] == "Linear"), None)
    default = _quark(of_linears or fields.object("global_quant_config"))
    return CheckpointFormat("quark", default, (*left_alone(patterns(fields, "exclude")), *named))


def _quark(fields: Fields) -> LinearFormat:
    """Return the format of linears whose `weight` and `input_tensors` are these."""
    weight, inputs = _only(fields, "weight"), _only(fields, "input_tensors")
    if not weight:
        return UNQUANTIZED  # their outputs alone, which are the KV cache's, or nothing
    dtype, scheme = one_of(weight, "dtype", ("fp8_e4m3", "int8", "fp4", "mxfp4")), weight.text("qscheme", "per_tensor")
    if dtype in ("fp4", "mxfp4"):
        integer_among(weight, "group_size", (32,), 32)
        asked = 8 if inputs.text("dtype", "").startswith("fp8") else 4
        return fp4("mxfp4", "quark", asked if inputs else 0)
    if dtype == "fp8_e4m3" and scheme in ("per_group", "per_block"):
        return _quark_blocks(weight, inputs, scheme)
    scale = one_of(weight, "qscheme", ("per_tensor", "per_channel"), scheme).removeprefix("per_")
    activations = "none"
    if inputs:
        one_of(inputs, "dtype", (dtype,))
        activations = "token" if inputs.flag("is_dynamic") else "tensor"
        if activations == "tensor":
            one_of(inputs, "qscheme", ("per_tensor",), "per_tensor")
    if dtype == "fp8_e4m3":
        return fp8(scale, activations)
    if not weight.flag("symmetric", True):
        raise weight.refusal("symmetric", "true for int8")
    return int8(scale, activations, inputs.flag("symmetric", True))


def _quark_blocks(weight: Fields, inputs: Fields, scheme: str) -> LinearFormat:
    """Return the fp8 format of weights with a scale a group (MXFP8) or a block, beside activations with one a group."""
    block = (1, weight.integer("group_size")) if scheme == "per_group" else positive_pair(weight, "block_size")
    if inputs:
        one_of(inputs, "dtype", ("fp8_e4m3",))
        one_of(inputs, "qscheme", ("per_group",))
        if not inputs.flag("is_dynamic"):
            raise inputs.refusal("is_dynamic", "true where groups have scales of their own")
    return fp8("block", "block" if inputs else "none", block=block)


def _only(fields: Fields, name: str) -> Fields:
    """Return an object that may be in a list of its own; several are weights that are rounded twice."""
    value = fields.values.get(name)
    if isinstance(value, list) and len(value) == 1:
        return fields.changed({name: value[0]}).object(name)
    if isinstance(value, list) and len(value) > 1:
        raise UnsupportedModelError(
            f"{fields.where}: `{fields.inside}{name}` rounds in {len(value)} stages; accepted: one"
        )
    return fields.object(name)
