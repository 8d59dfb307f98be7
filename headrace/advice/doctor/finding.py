"""Defines findings: what a check saw, what that costs, and the command that mends it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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

    id: str
    """The check's name in checkup.py, unless the check gives another."""
    severity: Severity
    seen: str
    cost: str = ""
    fix: str = ""
    """A command, or where none can help, what to do in a few words; "" where nothing is to be done."""


def finding(severity: Severity, seen: str, cost: str = "", fix: str = "", id: str = "") -> Finding:
    """Return a finding; it bears its check's name where `id` is empty."""
    return Finding(id, severity, seen, cost, fix)


def hurts(seen: str, cost: str, fix: str, id: str = "") -> Finding:
    """Return a finding that is to be mended first."""
    return Finding(id, Severity.HURTS, seen, cost, fix)


def note(seen: str, cost: str, fix: str = "", id: str = "") -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(id, Severity.NOTE, seen, cost, fix)


def unknown(why: str, id: str = "") -> Finding:
    """Return a finding about something that could not be read."""
    return Finding(id, Severity.UNKNOWN, why)


def ok(seen: str, id: str = "") -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding(id, Severity.OK, seen)
