"""Reads the formats of tools whose weights are integers beside activations of 16 bits: AWQ, GPTQ and AutoRound, which
also writes floats of 4 and 8 bits. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headrace.model_config import Fields
from headrace.quantization.checkpoint_fields import (
    checked_pattern,
    fp4,
    fp8,
    integer_among,
    integers,
    objects,
    one_of,
    positive_pair,
    size_of_groups,
)
from headrace.quantization.formats import UNQUANTIZED, LinearFormat
from headrace.quantization.linear_rules import CheckpointFormat, Rules, containing, left_alone

HEAD = "lm_head"
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
"""what AutoRound tells patterns from names by"""
_TOOLS = {"auto_gptq": "gptq", "gptq": "gptq", "auto_awq": "awq", "awq": "awq", "gptqmodel": "gptq_v2"}
_KERNELS = ("exllamav2", "tritonv2", "gemm")
"""what AutoRound's `packing_format` may hold behind a colon: whose packing it is, and what says nothing of it"""
_FLOATS = ("mx_fp", "nv_fp", "fp")
"""what AutoRound's `data_type` of floats begins with"""


def awq(fields: Fields) -> CheckpointFormat:
    """Read the fields of AutoAWQ or GPTQModel. A name that is left alone may occur anywhere in a linear's."""
    for name in ("version", "checkpoint_format", "format"):
        one_of(fields, name, ("gemm",), "gemm")
    one_of(fields, "pack_method", ("reorder",), "reorder")  # Quark's word for AutoAWQ's order of codes
    if fields.text("backend", "autoawq").lower() == "llm-awq":
        raise fields.refusal("backend", "autoawq: llm-awq packs weights in an order of its own")
    plain = [containing(name) for name in fields.texts("modules_to_not_convert")]
    plain += [] if fields.flag("lm_head") else [HEAD]
    return CheckpointFormat("awq", _awq(fields), (*left_alone(plain), *_dynamic(fields, _awq)))


def _awq(own: Fields) -> LinearFormat:
    """Return the format of the linears with these fields."""
    bits = "bits" if "bits" in own.values else "w_bit"
    group = "group_size" if "group_size" in own.values else "q_group_size"
    zero_point = own.flag("zero_point", True)
    return integers(
        "awq", integer_among(own, bits, (4,), 4), size_of_groups(own, group, 128), zero_point, zero_point=zero_point
    )


def gptq(fields: Fields) -> CheckpointFormat:
    """Read GPTQ's fields, of AutoGPTQ, GPTQModel or optimum. `dynamic` has patterns of linears: those behind `-:` are
    left alone, the others have fields of their own."""
    said = "format" if fields.values.get("checkpoint_format") is None else "checkpoint_format"
    usual = "gptq_v2" if fields.text("quant_method").lower() == "gptq_v2" else "gptq"
    fields = fields.changed({"checkpoint_format": one_of(fields, said, ("gptq", "gptq_v2"), usual)})
    one_of(fields, "pack_dtype", ("int32",), "int32")
    if fields.flag("is_marlin_format"):
        raise fields.refusal("is_marlin_format", "false: weights that are packed for one kernel are not served")
    default, rules = _gptq(fields), _dynamic(fields, _gptq)
    blocks = [name for names in _blocks(fields) for name in names]
    if blocks:
        rules = (*rules, *((name, default) for name in blocks))
        default = UNQUANTIZED
    elif not fields.flag("lm_head"):
        rules = (*rules, (HEAD, UNQUANTIZED))
    return CheckpointFormat("gptq", default, rules)


def _gptq(own: Fields) -> LinearFormat:
    """Return the format of the linears with these fields."""
    bits, group_size = integer_among(own, "bits", (2, 3, 4, 8)), size_of_groups(own, "group_size", 128)
    symmetric, act_order = own.flag("sym", True), own.flag("desc_act")
    return integers(
        "gptq", bits, group_size, not symmetric, act_order=act_order, symmetric=symmetric,
        zeros_plus_one=own.values["checkpoint_format"] == "gptq",
    )  # fmt: skip


def _dynamic(fields: Fields, format_of: Callable[[Fields], LinearFormat]) -> Rules:
    """Return the rules that `dynamic` states; `format_of`: the format of the linears with these fields."""
    rules = []
    for pattern in fields.object("dynamic").values:
        expression = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        checked_pattern(fields, "dynamic", expression)
        linear = UNQUANTIZED
        if not pattern.startswith("-:"):
            linear = format_of(_beside(fields, fields.object("dynamic").object(pattern)))
        rules.append((expression, linear))
    return tuple(rules)


def _beside(fields: Fields, own: Fields) -> Fields:
    """Return the fields of some linears: `own` and, for those that they lack, those of all."""
    given = {name: value for name, value in own.values.items() if value is not None}
    return Fields({**fields.values, **given}, own.where, own.inside)


def _blocks(fields: Fields) -> list[list[str]]:
    """Return optimum's lists of the linears of a layer that are quantized, if the field is there."""
    value = fields.values.get("modules_in_block_to_quantize") or []
    if not isinstance(value, list):
        raise fields.refusal("modules_in_block_to_quantize", "a list of lists of names")
    name = "modules_in_block_to_quantize"
    found = [fields.changed({name: names}).texts(name) for names in value]
    return [[checked_pattern(fields, name, entry) for entry in names] for names in found]


def auto_round(fields: Fields) -> CheckpointFormat:
    """Read AutoRound's fields: integers packed as GPTQ's or AWQ's, or floats as compressed-tensors has them, in the
    blocks that `block_name_to_quantize` names, with exceptions by name or pattern in `extra_config`."""
    packing = "" if _kind(fields) in _FLOATS else _packing(fields)
    if packing:
        fields = Fields({"group_size": 128, "sym": True, **fields.values}, fields.where, fields.inside)
    extra = tuple(_exception(fields, name, one, packing) for name, one in objects(fields, "extra_config").items())
    default = _rounded(fields, packing)
    blocks = fields.values.get("block_name_to_quantize") or fields.values.get("to_quant_block_names") or []
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    names = [block.strip() for block in fields.changed({"blocks": blocks}).texts("blocks")]
    if names:
        of_blocks = tuple((f"re:{re.escape(block)}", default) for block in names)
        return CheckpointFormat("auto-round", UNQUANTIZED, (*extra, *of_blocks))
    return CheckpointFormat("auto-round", default, (*extra, (HEAD, UNQUANTIZED)))


def _kind(own: Fields) -> str:
    """Return `int` or one of _FLOATS."""
    said = own.text("data_type", "int").lower()
    kind = next((kind for kind in _FLOATS if said.startswith(kind)), said)
    if kind not in ("int", *_FLOATS) or "e5m2" in said:
        raise own.refusal("data_type", f"int, or what begins with {', '.join(_FLOATS)}, but for e5m2")
    return kind


def _packing(fields: Fields) -> str:
    """Return gptq, gptq_v2 or awq: how AutoRound packed. It writes its own name, and behind colons a tool's and that of
    the kernels it had in mind: auto_round:auto_gptq, auto_round:auto_awq:gemm. Without a tool's, zero points are those
    of version 2."""
    first, *rest = fields.text("packing_format", "auto_round:auto_gptq").lower().split(":")
    if first not in ("auto_round", "auto_gptq", "auto_awq") or {*rest} - {*_TOOLS, *_KERNELS}:
        names = "auto_gptq, auto_awq, auto_round, or auto_round: and one of "
        raise fields.refusal("packing_format", f"one of {names}{', '.join(_TOOLS)}")
    return next((_TOOLS[word] for word in (first, *rest) if word in _TOOLS), "gptq_v2")


def _exception(fields: Fields, name: str, own: Fields, packing: str) -> tuple[str, LinearFormat]:
    """Return the rule of an entry of `extra_config`."""
    pattern = f"re:.*(?:{name})" if _SPECIAL.search(name) else name
    return checked_pattern(fields, "extra_config", pattern), _rounded(_beside(fields, own), packing)


def _rounded(own: Fields, packing: str) -> LinearFormat:
    """Return the format of the linears with these fields."""
    if own.integer("bits") >= 16:
        return UNQUANTIZED
    if _kind(own) != "int":
        return _float(own)
    if not packing:
        raise own.refusal("data_type", f"one of {', '.join(_FLOATS)} beside others of floats")
    if own.integer("act_bits", 16) < 16:
        raise own.refusal("act_bits", "16 or more beside integers")
    if packing == "awq":  # symmetric weights have zero points too, all of them the middle
        return _awq(own.changed({"zero_point": True}))
    return _gptq(own.changed({"checkpoint_format": packing, "desc_act": False}))


def _float(own: Fields) -> LinearFormat:
    """Return the format of AutoRound's floats, whose tensors have compressed-tensors' names."""
    kind, asked = _kind(own), own.integer("act_bits", 16)
    rounds = asked < 16
    if kind == "nv_fp":
        integer_among(own, "bits", (4,))
        integer_among(own, "group_size", (16,), 16)
        return fp4("nvfp4", "auto-round", asked)
    if kind == "mx_fp":
        integer_among(own, "group_size", (32,), 32)
        if integer_among(own, "bits", (4, 8)) == 4:
            return fp4("mxfp4", "compressed-tensors", asked)
        return fp8("block", "block" if rounds else "none", block=(1, 32))
    integer_among(own, "bits", (8,))
    if isinstance(own.values.get("group_size"), list):
        return fp8("block", "block" if rounds else "none", "weight_scale_inv", positive_pair(own, "group_size"))
    size_of_groups(own, "group_size", 0)
    return fp8("channel", ("token" if own.flag("act_dynamic", True) else "tensor") if rounds else "none")
