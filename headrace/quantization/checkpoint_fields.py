"""Makes the formats of linears out of the fields of config.json, which tools that write checkpoints name alike.

Each function raises UnsupportedModelError, naming field and value, for what no layout holds. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import replace

from headrace.model_config import Fields
from headrace.quantization.formats import FORMATS, LinearFormat, Setting, linear_format

LEAST_BLOCK = 32
"""inputs of the smallest blocks that kernels multiply as they are stored; as LEAST_GROUP of kernels/fp8.py"""


def integers(
    layout: str, bits: int, group_size: int, zeros: bool, asked_bits: int = 0, **settings: Setting
) -> LinearFormat:
    """Return a format whose activations keep 16 bits, with a 16-bit scale for `group_size` inputs (0: for an output),
    and zeros of as many bits as weights have. Weights of 2 and 3 bits are held as 4."""
    held = 8 if bits == 8 else 4
    base = FORMATS["w8a16" if held == 8 else "int4"]
    any_order = bool(group_size and settings.get("act_order"))
    facts = replace(base, group_size=group_size, zero_bits=held if zeros else 0, any_order=any_order)
    made = linear_format(facts, layout, bits=bits, group_size=group_size, **settings)
    return replace(made, asked_bits=asked_bits)


def fp8(
    scale: str,
    activations: str,
    scale_name: str = "weight_scale",
    block: tuple[int, int] | None = None,
    bound: float | None = None,
) -> LinearFormat:
    """Return fp8 as a checkpoint stores it, with a scale a tensor, a channel or a block [rows, columns]; `activations`
    are rounded with a scale a token, a tensor (that the checkpoint brings) or a block of a token, or not: none.
    `bound`: of a token's largest activation."""
    facts = FORMATS["fp8"]
    if activations == "none":
        facts = replace(facts, units="", launched_as=1.0, widened=True)
    settings: dict[str, Setting] = {"scale": scale, "activations": activations, "scale_name": scale_name}
    if block is not None:
        whole = activations == "block" and block[1] >= LEAST_BLOCK
        facts = replace(facts, group_size=block[1], outputs_per_scale=block[0], widened=not whole)
        facts = replace(facts, tiled="experts" if whole else "")
        settings["block"] = block
    if bound is not None:
        settings["bound"] = bound
    return linear_format(facts, "fp8_stored", **settings)


def int8(scale: str, activations: str, symmetric: bool) -> LinearFormat:
    """Return W8A8 in integers. `symmetric`: activations are rounded around zero."""
    facts = replace(FORMATS["int8"], widened=activations == "none")
    return linear_format(facts, "int8", scale=scale, activations=activations, symmetric=symmetric)


def fp4(name: str, tensors: str, asked_bits: int = 0, group_size: int = 0) -> LinearFormat:
    """Return `mxfp4` or `nvfp4` with the tensor names of a tool, perhaps with groups of another size."""
    facts = replace(FORMATS[name], group_size=group_size or FORMATS[name].group_size)
    other: dict[str, Setting] = {"group_size": group_size} if group_size else {}
    return replace(linear_format(facts, name, names=tensors, **other), asked_bits=asked_bits)


def size_of_groups(fields: Fields, name: str, default: int | None = None) -> int:
    """Return the inputs that share a scale; 0, written as -1 or 0: those of an output."""
    return max(0, fields.integer(name, default, minimum=-1))


def one_of(fields: Fields, name: str, accepted: tuple[str, ...], default: str | None = None) -> str:
    """Return a text in lower case that is among `accepted`."""
    value = fields.text(name, default).lower()
    if value not in accepted:
        raise fields.changed({name: value}).refusal(name, f"one of {', '.join(accepted)}")
    return value


def integer_among(fields: Fields, name: str, accepted: tuple[int, ...], default: int | None = None) -> int:
    """Return an integer that is among `accepted`."""
    value = fields.integer(name, default)
    if value not in accepted:
        raise fields.refusal(name, f"one of {', '.join(map(str, accepted))}" if accepted[1:] else str(accepted[0]))
    return value


def positive_pair(fields: Fields, name: str) -> tuple[int, int]:
    """Return a field's (rows, columns)."""
    sizes = fields.integers(name, least=2)
    if len(sizes) != 2 or min(sizes) < 1:
        raise fields.refusal(name, "two positive integers")
    return sizes[0], sizes[1]


def patterns(fields: Fields, *names: str) -> list[str]:
    """Return the names of linears that the fields list, having checked that their regular expressions compile."""
    found = []
    for name in names:
        for entry in fields.texts(name):
            checked_pattern(fields, name, entry)
            found.append(entry)
    return found


def checked_pattern(fields: Fields, name: str, entry: str) -> str:
    """Return an entry of the field `name`, whose regular expression after `re:`, if it is one, compiles."""
    if entry.startswith("re:"):
        try:
            re.compile(entry[3:])
        except re.error as error:
            accepted = f"names, or regular expressions after `re:` ({entry[3:63]}: {error})"
            raise fields.refusal(name, accepted) from None
    return entry


def objects(fields: Fields, name: str) -> dict[str, Fields]:
    """Return the objects that the object `name` holds, by name: of linears, whose regular expressions compile."""
    held = fields.object(name)
    return {checked_pattern(fields, name, key): held.object(key) for key in held.values}
