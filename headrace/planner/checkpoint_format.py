"""In which weight format a checkpoint holds its linears, read from config.json's quantization_config.

Knows the spellings of the tools that write them (compressed-tensors, Quark, ModelOpt, AWQ, GPTQ, fp8, mxfp4), not what
is done with such weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from headrace.errors import ConfigError
from headrace.model_config import Fields

PARTS = ("attention", "dense", "experts")
"""What a weight format may apply to"""
MADE_AT_LOAD = ("fp8", "ptpc_fp8")
"""Formats that a plain checkpoint is rounded to while it loads; the others need a checkpoint that holds them."""
FORMATS = ("bf16", "fp8", "mxfp4", "int4", "int8")
_LINEARS = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_b_proj"),
    "dense": ("mlp.gate_proj", "mlp.shared_experts.gate_proj", "feed_forward.shared_expert.gate_proj"),
    "experts": ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1"),
}
"""Names that stand for a part: a part is plain if one of them is on the list of what was left alone."""
_BY_TYPE = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "mxfp4"}


@dataclass(frozen=True)
class CheckpointFormat:
    name: str = "bf16"
    """bf16: the model's dtype as it is"""
    parts: tuple[str, ...] = PARTS
    """what is held in it"""
    bytes_per_weight: float = 0.0
    """where config.json tells how many weights share a scale; 0: as usual (`bytes_per_weight`)"""


ROW = 4096
"""Weights of an 8-bit format that share a scale of 4 bytes: a row of a middling linear"""


def bytes_per_weight(weight_format: str) -> float:
    """Scales included: one a row of 8-bit formats, a byte for 32 of mxfp4, 16 bits and a zero for 128 of int4.

    Raises ConfigError for a format that is not among FORMATS, ptpc_fp8 (fp8 with a scale a row), fp16 and fp32.
    """
    plain = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
    eight_bits = dict.fromkeys(("fp8", "ptpc_fp8", "int8"), 1.0 + 4 / ROW)
    known = {**plain, **eight_bits, "mxfp4": 0.5 + 1 / 32, "int4": _int4(128)}
    if weight_format not in known:
        raise ConfigError(f"weight format must be one of {', '.join(known)}; got {weight_format!r}")
    return known[weight_format]


def _int4(group_size: int, zeros: bool = True) -> float:
    return 0.5 + (2.5 if zeros else 2.0) / group_size


def read_format(quantization: dict[str, Any] | None, num_layers: int) -> CheckpointFormat:
    """Raises ConfigError for a format that is not among FORMATS, UnsupportedModelError for a value that is none of its
    field."""
    if not quantization:
        return CheckpointFormat()
    fields = Fields(quantization, "config.json", "quantization_config.")
    method = fields.text("quant_method", "").lower()
    name, exactly = _name(method, fields)
    if name not in FORMATS:
        raise ConfigError(
            f"config.json: the format of quantization_config.quant_method {method!r} is {name!r}, which is none of "
            f"{', '.join(FORMATS)}"
        )
    lists = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude", "exclude_modules")
    left_alone = [entry for key in lists for entry in _patterns(fields, key)]
    prefix = f"model.layers.{num_layers // 2}"
    plain = {
        part
        for part, linears in _LINEARS.items()
        if any(_names(entry, f"{prefix}.{linear}") for entry in left_alone for linear in linears)
    }
    return CheckpointFormat(name, tuple(part for part in PARTS if part not in plain), exactly)


def holds_kv_scales(quantization: dict[str, Any] | None) -> bool:
    """The checkpoint was calibrated for an fp8 KV cache (compressed-tensors, ModelOpt, Quark)."""
    quantization = quantization or {}
    scheme, export = quantization.get("kv_cache_scheme"), quantization.get("export")
    if isinstance(scheme, dict):
        return bool(scheme.get("type") == "float" and scheme.get("num_bits") == 8)
    return str(quantization.get("kv_cache_quant_algo")).upper() == "FP8" or bool(
        isinstance(export, dict) and export.get("kv_cache_group")
    )


def _name(method: str, quantization: Fields) -> tuple[str, float]:
    """-> (format, bytes of a weight where that is said, else 0)"""
    if method == "compressed-tensors":
        groups = quantization.object("config_groups")
        if not groups:
            return "bf16", 0  # it speaks of the KV cache alone
        weights = groups.object(next(iter(groups.values))).object("weights")
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
        found, group_size = _BY_TYPE.get((kind, bits), f"{kind} of {bits} bits"), _group_size(weights, "group_size", 0)
        if found == "int4" and group_size > 0:
            return found, _int4(group_size, zeros=not weights.flag("symmetric", True))
        return ("nvfp4" if found == "mxfp4" and group_size == 16 else found), 0
    if method == "quark":
        dtype = _first(quantization.object("global_quant_config"), "weight").text("dtype", "fp8")
        known = {"fp8": "fp8", "fp4": "mxfp4", "int8": "int8", "int4": "int4", "uint4": "int4", "mxfp4": "mxfp4"}
        return known.get(dtype.split("_")[0], dtype), 0
    if method in ("awq", "gptq"):
        bits = quantization.integer("bits", quantization.integer("w_bit", 4))
        group_size = _group_size(quantization, "group_size", _group_size(quantization, "q_group_size", 128))
        exactly = _int4(group_size) if group_size > 0 and bits == 4 else 0
        return {4: "int4", 8: "int8"}.get(bits, f"{bits} bits"), exactly
    if method.startswith("modelopt"):
        return quantization.text("quant_algo", method).lower(), 0
    return {"fbgemm_fp8": "fp8", "": "bf16"}.get(method, method), 0


def _group_size(fields: Fields, name: str, default: int) -> int:
    """-1 and 0: a row or a channel is one group."""
    return fields.integer(name, default, minimum=-1)


def _first(fields: Fields, name: str) -> Fields:
    """An object, or the first of a list of them."""
    value = fields.values.get(name)
    return (fields.changed({name: value[0]}) if isinstance(value, list) and value else fields).object(name)


def _patterns(fields: Fields, name: str) -> list[str]:
    """Names of linears; those that are regular expressions can be compiled."""
    entries = fields.texts(name)
    for pattern in (entry[3:] for entry in entries if entry.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.refusal(name, f"names, or regular expressions after `re:` ({pattern:.60}: {error})") from None
    return entries


def _names(entry: str, linear: str) -> bool:
    """Whether an entry of such a list means `linear`: `re:` a pattern, else consecutive parts of its name, `*` any."""
    if entry.startswith("re:"):
        return re.match(entry[3:], linear) is not None
    wanted, parts = entry.split("."), linear.split(".")
    return any(
        all(fnmatchcase(part, pattern) for part, pattern in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
