"""Takes keyword arguments as programs written for vLLM's `LLM` give them, and judges them by the table of its flags.

What a flag means a keyword of its name means too; only values are Python's own instead of text.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.advice.flags.table import Known, Note, flags_by_name, foreign_value, judge, shown
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.knobs import knob_types

LEVEL_FLAG = "--optimization-level"
"""The flag that a number given as compilation_config stands for."""


def engine_keywords(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Note]]:
    """Return the arguments for EngineConfig, and notes on keywords without effect here; None leaves a keyword open.

    Raises ConfigError for a name that vLLM does not have either, a wrong value, and what asks for what we lack.
    """
    kinds = knob_types(EngineConfig)
    table = flags_by_name("engine")
    kept: dict[str, Any] = {}
    notes: list[Note | None] = []
    for name in sorted(given, key=lambda name: name not in kinds):  # what becomes a part of a knob comes after it
        known, value = table.get(_flag(name)), _plain(given[name])
        if known is None or (known.fate == "ours" and name not in kinds):
            raise ConfigError(_unknown(name, kinds))
        if value is None:
            continue
        if name == "compilation_config" and type(value) is int:
            notes.append(judge(table[LEVEL_FLAG], name, str(value)))
        elif name in kinds:
            why = foreign_value(_flag(name), str(value))
            if why is None:
                kept[name] = [value] if kinds[name][0] is list and isinstance(value, str) else value
            else:
                notes.append(Note(shown(name, str(value), known), why))
        elif known.becomes:
            knob, _, key = known.becomes.removeprefix("--").replace("-", "_").partition(".")
            if isinstance(kept.setdefault(knob, {}), dict):
                kept[knob] = {**kept[knob], key: value}
        elif callable(value):
            raise ConfigError(f"{name} given as a function or class is not supported: {known.why}")
        elif not isinstance(value, list | tuple | dict) or value:  # an empty one asks for nothing
            notes.append(judge(known, name, _text(value, known)))
    return kept, [note for note in notes if note is not None]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain(value: Any) -> Any:
    """Paths and torch's dtypes as the text that they stand for."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    return str(value).removeprefix("torch.") if (kind.__module__, kind.__name__) == ("torch", "dtype") else value


def _text(value: Any, known: Known) -> str:
    """The value as the flag would have it."""
    if known.kind.name == "words" and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return json.dumps(value, default=str) if isinstance(value, list | tuple | dict) else str(value)


def _unknown(name: str, knobs: Iterable[str]) -> str:
    foreign = [flag for flag, known in flags_by_name("engine").items() if flag[:2] == "--" and known.fate != "ours"]
    names = {*knobs, *(flag[2:].replace("-", "_") for flag in foreign)}
    near = difflib.get_close_matches(name, sorted(names), 3, 0.6)
    return f"LLM has no keyword {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else "")
