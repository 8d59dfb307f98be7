"""A finding: what a check saw, what it costs, and the command that mends it. Knows nothing of machines or printing."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """In the order in which findings are shown."""

    HURTS = "hurts"
    """Makes a start fail or serving slower: mend it first."""
    NOTE = "note"
    """Worth knowing, and right on some machines."""
    UNKNOWN = "unknown"
    """The source could not be read; `seen` says why."""
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    seen: str
    cost: str = ""
    fix: str = ""
    """A command, or where none can help, what to do in a few words; "" where nothing is to be done."""


def hurts(id: str, seen: str, cost: str, fix: str) -> Finding:
    return Finding(id, Severity.HURTS, seen, cost, fix)


def note(id: str, seen: str, cost: str, fix: str = "") -> Finding:
    return Finding(id, Severity.NOTE, seen, cost, fix)


def unknown(id: str, why: str) -> Finding:
    return Finding(id, Severity.UNKNOWN, why)


def ok(id: str, seen: str) -> Finding:
    return Finding(id, Severity.OK, seen)
