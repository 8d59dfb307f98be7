"""Reads from config.json's quantization_config in which formats a checkpoint holds its linears and its KV scales.

Knows the spellings of the tools that write it, not which of the formats are served. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.model_config import Fields
from headrace.quantization.checkpoint_fields import checked_pattern, fp4, fp8, one_of, patterns, positive_pair
from headrace.quantization.checkpoint_groups import compressed_tensors, modelopt, quark
from headrace.quantization.checkpoint_integers import HEAD, auto_round, awq, gptq
from headrace.quantization.formats import UNQUANTIZED
from headrace.quantization.linear_rules import CheckpointFormat, Rules, left_alone

_REGULAR = re.compile(r"[\\^$(|+]")
"""what occurs in regular expressions, and neither in names nor in names with `*`"""

KEEPS_16 = (
    "The checkpoint asks for activations of {} bits beside weights of {}: they keep 16 bits here, which rounds less."
)
OTHER_CACHE = (
    "The checkpoint asks for a KV cache in {}, which is not served: it has the type that --kv-cache-dtype says."
)


def read_format(quantization: dict[str, Any] | None) -> CheckpointFormat:
    """Return the formats that a quantization_config states; None: an unquantized checkpoint. Raises
    UnsupportedModelError naming the field for a tool that is not among METHODS and for values that no layout holds."""
    if not quantization:
        return CheckpointFormat()
    fields = Fields(quantization, "config.json", "quantization_config.")
    of_modelopt = not quantization.keys().isdisjoint(("quant_algo", "quantization"))
    method = fields.text("quant_method", "modelopt" if of_modelopt else "").lower()
    if method not in METHODS:
        raise UnsupportedModelError(
            f"config.json: quantization_config.quant_method {method or 'unnamed'!r} is not served; served: "
            f"{', '.join(METHODS)}"
        )
    found, cache = METHODS[method](fields), kv_cache_type(quantization)
    if found.main == UNQUANTIZED:  # it is about the KV cache alone
        found = CheckpointFormat()
    wider = (KEEPS_16.format(one.asked_bits, one.format.bits) for one in found.formats if 0 < one.asked_bits < 16)
    notes = (*dict.fromkeys(wider), *([] if cache in ("", "fp8") else [OTHER_CACHE.format(cache)]))
    return replace(found, notes=notes)


def holds_kv_scales(quantization: dict[str, Any] | None) -> bool:
    """Tell whether the checkpoint brings scales for an fp8 KV cache (compressed-tensors, AutoFP8, ModelOpt, Quark)."""
    return kv_cache_type(quantization or {}) == "fp8"


def kv_cache_type(quantization: dict[str, Any]) -> str:
    """Return the type of the KV cache that a quantization_config asks for: fp8, another, or "" for none."""
    nested, scheme = quantization.get("quantization"), quantization.get("kv_cache_scheme")
    if isinstance(nested, dict):
        return kv_cache_type(nested)
    if isinstance(scheme, dict):
        kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
        return "fp8" if (kind, bits) == ("float", 8) else f"{kind}{bits}"
    word = str(scheme or quantization.get("kv_cache_quant_algo") or "none").lower()
    if word != "none":
        return "fp8" if word in ("static", "dynamic") else word
    named, layers, export = (quantization.get(key) for key in ("kv_cache_quant_config", "layer_quant_config", "export"))
    types = {*_output_types(named)} if isinstance(named, dict) else set()
    if isinstance(layers, dict):  # where Quark once said it
        types |= {*_output_types({name: one for name, one in layers.items() if name.endswith(("k_proj", "v_proj"))})}
    grouped = isinstance(export, dict) and export.get("kv_cache_group")
    return "fp8" if types == {"fp8_e4m3"} or (grouped and not types) else ", ".join(sorted(types))


def _output_types(layers: dict[str, Any]) -> Iterator[str]:
    """Yield the types of the outputs of layers that Quark describes."""
    for layer in layers.values():
        outputs = layer.get("output_tensors") if isinstance(layer, dict) else None
        for each in outputs if isinstance(outputs, list) else [outputs]:
            if isinstance(each, dict):
                yield str(each.get("dtype"))


def _deepseek_or_auto_fp8(fields: Fields) -> CheckpointFormat:
    """Read DeepSeek's blocks and AutoFP8's scales a tensor. transformers writes both with the names of DeepSeek's."""
    one_of(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    one_of(fields, "expert_dtype", ("fp8",), "fp8")
    scheme = one_of(fields, "activation_scheme", ("dynamic", "static"), "dynamic")
    if fields.values.get("weight_block_size") is not None:
        one_of(fields, "activation_scheme", ("dynamic",), scheme)
        linear = fp8("block", "block", "weight_scale_inv", positive_pair(fields, "weight_block_size"))
    else:
        of_transformers = "weight_block_size" in fields.values
        name = "weight_scale_inv" if of_transformers else "weight_scale"
        linear = fp8("tensor", "tensor" if scheme == "static" else "token", name)
    return CheckpointFormat("fp8", linear, (*_unconverted(fields), *left_alone([HEAD])))


def _mxfp8(fields: Fields) -> CheckpointFormat:
    """Read what transformers says of blocks of 32 inputs, whose scales are powers of two."""
    block = (1, 32) if fields.values.get("weight_block_size") is None else positive_pair(fields, "weight_block_size")
    linear = fp8("block", "block", "weight_scale_inv", block)
    return CheckpointFormat("mxfp8", linear, (*_unconverted(fields), *left_alone([HEAD])))


def _fbgemm(fields: Fields) -> CheckpointFormat:
    """Read FBGEMM's fields. Its bound of activations may also be a tensor of each linear, which then counts."""
    linear = fp8("channel", "token", bound=fields.number("activation_scale_ub", 1200.0, above=0))
    return CheckpointFormat("fbgemm_fp8", linear, (*_unconverted(fields), *left_alone([HEAD])))


def _mxfp4(fields: Fields) -> CheckpointFormat:
    """Read what gpt-oss says: experts alone are converted, but for those that it names."""
    return CheckpointFormat("mxfp4", UNQUANTIZED, (*_unconverted(fields), ("experts", fp4("mxfp4", "blocks"))))


def _unconverted(fields: Fields) -> Rules:
    """Return the rules for linears that transformers or AutoFP8 left alone; they take regular expressions unmarked."""
    names = [name for key in ("modules_to_not_convert", "ignored_layers") for name in patterns(fields, key)]
    marked = [f"re:{name}" if _REGULAR.search(name) and not name.startswith("re:") else name for name in names]
    return left_alone(checked_pattern(fields, "modules_to_not_convert", name) for name in marked)


METHODS: dict[str, Callable[[Fields], CheckpointFormat]] = {
    "compressed-tensors": compressed_tensors,
    "fp8": _deepseek_or_auto_fp8,
    "mxfp8": _mxfp8,
    "fbgemm_fp8": _fbgemm,
    "awq": awq,
    "gptq": gptq,
    "gptq_v2": gptq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "quark": quark,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "modelopt_mxfp8": modelopt,
    "mxfp4": _mxfp4,
}
"""`quant_method` -> what reads the other fields"""
