"""What is tried, what came of it, and the file that keeps it, a line a trial.

A line is whole on the disk before the next trial starts, so whatever ends the process, what was measured stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class Load(msgspec.Struct, frozen=True):
    """What `headrace bench serve` measured under one kind of load; milliseconds, tokens/s."""

    tok_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_p50: float


class Trial(msgspec.Struct, frozen=True):
    """The plan with one knob changed, or with several."""

    changes: dict[str, Any]
    """knob -> value; empty: the plan itself"""

    @property
    def id(self) -> str:
        return json.dumps(self.changes, sort_keys=True)

    @property
    def title(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "the plan"


class Result(msgspec.Struct, frozen=True):
    trial: Trial
    status: str
    """ok, failed or timeout"""
    seconds: float
    why: str = ""
    at_once: Load | None = None
    at_rate: Load | None = None
    settings: dict[str, Any] = {}
    """what the engine decided, by field"""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def felt(self) -> Load:
        """The load whose latencies count: at the rate, where there is one."""
        found = self.at_rate or self.at_once
        assert found is not None
        return found


class _Line(msgspec.Struct):
    key: str
    result: Result


class Journal:
    """The results of one task (`key`) in a file that may hold those of others."""

    def __init__(self, path: Path, key: str, say: Callable[[str], None]) -> None:
        self._path, self._key, self._say = path, key, say
        self.results: dict[str, Result] = {}
        if path.exists():
            self._read()

    def start_anew(self) -> None:
        """The old file is kept beside the new one."""
        self.results = {}
        if self._path.exists():
            self._path.replace(self._path.with_suffix(".jsonl.old"))

    def add(self, result: Result) -> None:
        self.results[result.trial.id] = result
        line = msgspec.json.encode(_Line(self._key, result)) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line)
            os.fsync(file.fileno())

    def _read(self) -> None:
        text = self._path.read_bytes()
        whole, _, rest = text.rpartition(b"\n")
        if rest:
            self._say(f"{self._path}: the last line was cut off in the middle; that trial is run again")
            with self._path.open("rb+") as file:
                file.truncate(len(text) - len(rest))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                self._say(f"{self._path}: line {number} is left out: {error}")
                continue
            if found.key == self._key:
                self.results[found.result.trial.id] = found.result
