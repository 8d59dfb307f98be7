"""Reads from config.json's quantization_config in which weight format a checkpoint holds each of its linears.

Knows the spellings of the tools that write it (compressed-tensors, Quark, ModelOpt, AWQ, GPTQ, fp8, mxfp4), not which
of the formats are served. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from headrace.errors import ConfigError
from headrace.model_config import Fields
from headrace.quantization.formats import FORMATS, UNQUANTIZED, LinearFormat, linear_format

PARTS = ("attention", "dense", "experts")
"""the kinds of linears that a checkpoint may hold in different formats"""
READ = ("bf16", "fp8", "mxfp4", "int4", "int8")
"""formats that a checkpoint may be in"""
NOT_EXPERTS = r"re:(?!.*\.experts(\.|$))"
"""Linears that transformers never holds in mxfp4, whether modules_to_not_convert names them or not"""
_LINEARS = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_b_proj"),
    "dense": ("mlp.gate_proj", "mlp.shared_experts.gate_proj", "feed_forward.shared_expert.gate_proj"),
    "experts": ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1"),
}
"""Examples of each of PARTS: it is in the checkpoint's default format if all of them are."""
_BY_TYPE = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "mxfp4"}


@dataclass(frozen=True)
class CheckpointFormat:
    """Says in which format a checkpoint holds each linear: `default`, unless a rule names the linear."""

    method: str = ""
    """`quant_method`: the tool that wrote the tensors; empty: weights are unquantized, and may be rounded at load"""
    default: LinearFormat = UNQUANTIZED
    rules: tuple[tuple[str, LinearFormat], ...] = ()
    """(name or pattern of linears, their format); the first that matches counts"""

    def format_for(self, *names: str) -> LinearFormat:
        """Return the format of one linear, given its full name in the checkpoint, then further names for it. Further
        names are those of our fused linear that it is a part of, which some tools list. A regular expression is matched
        with the first name alone."""
        for pattern, found in self.rules:
            candidates = names[:1] if pattern.startswith("re:") else names
            if any(_matches(pattern, name) for name in candidates):
                return found
        return self.default

    def parts(self, num_layers: int) -> tuple[str, ...]:
        """Return those of PARTS that a layer in the middle of the model has in the default format."""
        prefix = f"model.layers.{num_layers // 2}"
        return tuple(
            part
            for part in PARTS
            if all(self.format_for(f"{prefix}.{linear}") == self.default for linear in _LINEARS[part])
        )


def read_format(quantization: dict[str, Any] | None) -> CheckpointFormat:
    """Return the formats that a quantization_config states; None: an unquantized checkpoint. Raises ConfigError for a
    format that is not among READ, UnsupportedModelError for a value its field cannot have."""
    if not quantization:
        return CheckpointFormat()
    fields = Fields(quantization, "config.json", "quantization_config.")
    method = fields.text("quant_method", "").lower()
    name, exactly = _name(method, fields)
    if name not in READ:
        raise ConfigError(
            f"config.json: the format of quantization_config.quant_method {method!r} is {name!r}, which is none of "
            f"{', '.join(READ)}"
        )
    lists = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude", "exclude_modules")
    left_alone = tuple((entry, UNQUANTIZED) for key in lists for entry in _patterns(fields, key))
    if method == "mxfp4":  # of gpt-oss
        left_alone += ((NOT_EXPERTS, UNQUANTIZED),)
        return CheckpointFormat(method, linear_format(FORMATS[name], name, names="blocks"), left_alone)
    layout = {"bf16": "plain", "fp8": "fp8_stored", "int4": f"{method} int4"}.get(name, name)
    return CheckpointFormat(method, LinearFormat(replace(FORMATS[name], **exactly), layout), left_alone)


def holds_kv_scales(quantization: dict[str, Any] | None) -> bool:
    """Tell whether the checkpoint brings scales for an fp8 KV cache (compressed-tensors, ModelOpt, Quark)."""
    quantization = quantization or {}
    scheme, export = quantization.get("kv_cache_scheme"), quantization.get("export")
    if isinstance(scheme, dict):
        return bool(scheme.get("type") == "float" and scheme.get("num_bits") == 8)
    return str(quantization.get("kv_cache_quant_algo")).upper() == "FP8" or bool(
        isinstance(export, dict) and export.get("kv_cache_group")
    )


def _name(method: str, quantization: Fields) -> tuple[str, dict[str, Any]]:
    """Return (the format's name, the fields of WeightFormat in which it differs from FORMATS)."""
    if method == "compressed-tensors":
        groups = quantization.object("config_groups")
        if not groups:
            return "bf16", {}  # it is about the KV cache alone
        weights = groups.object(next(iter(groups.values))).object("weights")
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
        found, group_size = _BY_TYPE.get((kind, bits), f"{kind} of {bits} bits"), _group_size(weights, "group_size", 0)
        if found == "int4" and group_size > 0:
            return found, _grouped(group_size, zeros=not weights.flag("symmetric", True))
        return ("nvfp4" if found == "mxfp4" and group_size == 16 else found), {}
    if method == "quark":
        dtype = _first(quantization.object("global_quant_config"), "weight").text("dtype", "fp8")
        known = {"fp8": "fp8", "fp4": "mxfp4", "int8": "int8", "int4": "int4", "uint4": "int4", "mxfp4": "mxfp4"}
        return known.get(dtype.split("_")[0], dtype), {}
    if method in ("awq", "gptq"):
        bits = quantization.integer("bits", quantization.integer("w_bit", 4))
        group_size = _group_size(quantization, "group_size", _group_size(quantization, "q_group_size", 128))
        exactly = _grouped(group_size, zeros=True) if group_size > 0 and bits == 4 else {}
        return {4: "int4", 8: "int8"}.get(bits, f"{bits} bits"), exactly
    if method.startswith("modelopt"):
        return quantization.text("quant_algo", method).lower(), {}
    return {"fbgemm_fp8": "fp8", "": "bf16"}.get(method, method), {}


def _grouped(group_size: int, zeros: bool) -> dict[str, Any]:
    """Return the fields of a 4-bit format with a 16-bit scale, and perhaps a 4-bit zero, for so many weights."""
    return {"group_size": group_size, "scale_bytes": 2.5 if zeros else 2.0}


def _group_size(fields: Fields, name: str, default: int) -> int:
    """Return the weights that share a scale; -1 and 0: those of an output."""
    return fields.integer(name, default, minimum=-1)


def _first(fields: Fields, name: str) -> Fields:
    """Return the field's object, or the first one of its list."""
    value = fields.values.get(name)
    return (fields.changed({name: value[0]}) if isinstance(value, list) and value else fields).object(name)


def _patterns(fields: Fields, name: str) -> list[str]:
    """Return the field's names of linears, having checked that its regular expressions compile."""
    entries = fields.texts(name)
    for pattern in (entry[3:] for entry in entries if entry.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.refusal(name, f"names, or regular expressions after `re:` ({pattern:.60}: {error})") from None
    return entries


def _matches(entry: str, linear: str) -> bool:
    """Tell whether an entry matches `linear`: `re:` and a pattern, or consecutive parts of its name, `*` for any."""
    if entry.startswith("re:"):
        return re.match(entry[3:], linear) is not None
    wanted, parts = entry.split("."), linear.split(".")
    return any(
        all(fnmatchcase(part, pattern) for part, pattern in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
