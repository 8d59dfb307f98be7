"""Defines findings: what a check saw, what that costs, and the command that mends it.

Those that want mending have their texts in findings.json.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec


class Severity(enum.StrEnum):
    """Ranks the findings; they are shown in this order."""

    HURTS = "hurts"
    """Makes a start fail or serving slower: mend it first."""
    NOTE = "note"
    """Worth knowing, and right on some machines."""
    UNKNOWN = "unknown"
    """The source could not be read; `seen` says why."""
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """Holds what one check has to say; a check may yield several."""

    severity: Severity
    seen: str
    cost: str = ""
    fix: str = ""
    """A command, or where none can help, what to do in a few words; "" where nothing is to be done."""
    id: str = ""
    """The check's name in checkup.py, unless the check gives another."""


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds a row of findings.json; words in braces are filled in."""

    seen: str
    cost: str
    fix: str = ""
    severity: Severity = Severity.HURTS
    fix_amd: str = ""
    """in place of `fix` on AMD's GPUs"""
    fix_container: str = ""
    """in place of `fix` in a container"""
    on_host: bool = False
    """It is a setting of kernel or driver, which no container can change."""


TEXTS = msgspec.json.decode(Path(__file__).with_name("findings.json").read_bytes(), type=dict[str, Text])
hurts, note, unknown, ok = (partial(Finding, severity) for severity in Severity)
