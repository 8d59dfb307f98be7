"""Defines findings: what a check saw, what that costs, and the command that mends it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial


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


hurts, note, unknown, ok = (partial(Finding, severity) for severity in Severity)
