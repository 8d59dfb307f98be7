"""Reads the formats of tools whose weights are integers beside activations of 16 bits: AWQ, GPTQ and AutoRound.
Imports no torch.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.model_config import Fields
from headrace.quantization.checkpoint_fields import (
    bits_among,
    checked_pattern,
    integers,
    objects,
    one_of,
    size_of_groups,
)
from headrace.quantization.formats import UNQUANTIZED, LinearFormat
from headrace.quantization.linear_rules import CheckpointFormat, Rules, containing, left_alone

HEAD = "lm_head"
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
"""what AutoRound tells patterns from names by"""


def awq(fields: Fields) -> CheckpointFormat:
    """Read AutoAWQ's fields. A name that is left alone may occur anywhere in a linear's."""
    one_of(fields, "version", ("gemm",), "gemm")
    one_of(fields, "backend", ("autoawq", "auto"), "autoawq")
    one_of(fields, "checkpoint_format", ("gemm",), "gemm")
    bits = "bits" if "bits" in fields.values else "w_bit"
    group = "group_size" if "group_size" in fields.values else "q_group_size"
    plain = [containing(name) for name in fields.texts("modules_to_not_convert")]
    linear = _awq(
        bits_among(fields, bits, (4,), 4), size_of_groups(fields, group, 128), fields.flag("zero_point", True)
    )
    return CheckpointFormat("awq", linear, left_alone((*plain, HEAD)))


def _awq(bits: int, group_size: int, zero_point: bool) -> LinearFormat:
    return integers("awq", bits, group_size, zero_point, zero_point=zero_point)


def gptq(fields: Fields) -> CheckpointFormat:
    """Read GPTQ's fields, of AutoGPTQ, GPTQModel or optimum. `dynamic` has patterns of linears: those behind `-:` are
    left alone, the others have fields of their own."""
    method = fields.text("quant_method").lower()
    stored = one_of(fields, "checkpoint_format", ("gptq", "gptq_v2"), "gptq_v2" if method == "gptq_v2" else "gptq")
    one_of(fields, "pack_dtype", ("int32",), "int32")
    if fields.flag("is_marlin_format"):
        raise fields.refusal("is_marlin_format", "false: weights that are packed for one kernel are not served")
    base = {**fields.values, "checkpoint_format": stored}
    default, rules = _gptq(fields, base), _dynamic(fields, base)
    blocks = [name for names in _blocks(fields) for name in names]
    if blocks:
        rules = (*rules, *((name, default) for name in blocks))
        default = UNQUANTIZED
    elif not fields.flag("lm_head"):
        rules = (*rules, (HEAD, UNQUANTIZED))
    return CheckpointFormat("gptq", default, rules)


def _gptq(fields: Fields, values: dict[str, Any]) -> LinearFormat:
    """Return the format of the linears with these values of the fields."""
    own = Fields(values, fields.where, fields.inside)
    bits, group_size = bits_among(own, "bits", (2, 3, 4, 8)), size_of_groups(own, "group_size", 128)
    symmetric, act_order = own.flag("sym", True), own.flag("desc_act")
    return integers(
        "gptq", bits, group_size, not symmetric, act_order=act_order, symmetric=symmetric,
        zeros_plus_one=values["checkpoint_format"] == "gptq",
    )  # fmt: skip


def _dynamic(fields: Fields, base: dict[str, Any]) -> Rules:
    """Return the rules that `dynamic` states."""
    rules = []
    for pattern in fields.object("dynamic").values:
        expression = f"re:{pattern.removeprefix('+:').removeprefix('-:')}"
        checked_pattern(fields, "dynamic", expression)
        if pattern.startswith("-:"):
            rules.append((expression, UNQUANTIZED))
        else:
            own = fields.object("dynamic").object(pattern)
            rules.append((expression, _gptq(own, {**base, **own.values})))
    return tuple(rules)


def _blocks(fields: Fields) -> list[list[str]]:
    """Return optimum's lists of the linears of a layer that are quantized, if the field is there."""
    value = fields.values.get("modules_in_block_to_quantize") or []
    if not isinstance(value, list):
        raise fields.refusal("modules_in_block_to_quantize", "a list of lists of names")
    return [fields.changed({"names": names}).texts("names") for names in value]


def auto_round(fields: Fields) -> CheckpointFormat:
    """Read AutoRound's fields: packed as GPTQ's or AWQ's, in the blocks that `block_name_to_quantize` names, with
    exceptions by name or pattern in `extra_config`."""
    one_of(fields, "data_type", ("int",), "int")
    formats = {
        "auto_gptq": "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
        "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
        "auto_awq": "awq", "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
    }  # fmt: skip
    packing = formats[one_of(fields, "packing_format", tuple(formats), "auto_round:auto_gptq")]
    base = {"group_size": 128, "sym": True, **fields.values}
    extra = tuple(_exception(fields, name, one, base, packing) for name, one in objects(fields, "extra_config").items())
    default = _rounded(fields, base, packing)
    blocks = fields.values.get("block_name_to_quantize") or fields.values.get("to_quant_block_names") or []
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks
    if isinstance(blocks, list) and all(isinstance(block, list) for block in blocks):
        blocks = [name for block in blocks for name in block]
    names = [block.strip() for block in fields.changed({"blocks": blocks}).texts("blocks")]
    if names:
        of_blocks = tuple((f"re:{re.escape(block)}", default) for block in names)
        return CheckpointFormat("auto-round", UNQUANTIZED, (*extra, *of_blocks))
    return CheckpointFormat("auto-round", default, (*extra, (HEAD, UNQUANTIZED)))


def _exception(fields: Fields, name: str, own: Fields, base: dict[str, Any], packing: str) -> tuple[str, LinearFormat]:
    """Return the rule of an entry of `extra_config`."""
    pattern = checked_pattern(fields, "extra_config", f"re:.*(?:{name})") if _SPECIAL.search(name) else name
    return pattern, _rounded(own, {**base, **own.values}, packing)


def _rounded(fields: Fields, values: dict[str, Any], packing: str) -> LinearFormat:
    """Return the format of the linears with these values of AutoRound's fields."""
    own = Fields(values, fields.where, fields.inside)
    if own.integer("bits") >= 16:
        return UNQUANTIZED
    if packing != "awq":
        return _gptq(fields, {**values, "checkpoint_format": packing, "desc_act": False})
    # its symmetric weights have zero points too, all of them the middle
    return _awq(bits_among(own, "bits", (4,)), size_of_groups(own, "group_size"), zero_point=True)
