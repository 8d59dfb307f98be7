"""What is tried, what came of it, and the file that keeps it, a line a trial.

A line is whole on the disk before the next trial starts, so whatever ends the process, what was measured stays. Where
the disk takes no line, the results last as long as the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.errors import ConfigError

Positive = Annotated[float, msgspec.Meta(gt=0)]
"""Figures that others are divided by."""


class Load(msgspec.Struct, frozen=True):
    """What `headrace bench serve` measured under one kind of load; milliseconds, tokens/s."""

    tok_s: Positive
    ttft_p50: float
    ttft_p99: Positive
    itl_p50: float
    itl_p99: float
    e2e_p50: Positive


class Trial(msgspec.Struct, frozen=True):
    """The plan with one knob changed, or with several."""

    changes: dict[str, Any]
    """knob -> value; empty: the plan itself"""
    again: bool = False
    """The same once more, as single runs differ"""

    @property
    def id(self) -> str:
        return json.dumps(self.changes, sort_keys=True) + (" again" if self.again else "")

    @property
    def is_lossy(self) -> bool:
        """It rounds what the plan does not, so its answers are others."""
        return str(self.changes.get("kv_cache_dtype")).startswith("fp8")

    @property
    def title(self) -> str:
        changed = ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "the plan"
        changed += " (lossy)" if self.is_lossy else ""
        return f"{changed}, again" if self.again else changed


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

    def __post_init__(self) -> None:
        if self.ok and self.at_once is None:
            raise ValueError("`at_once` must say what was measured where `status` is ok")

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
        """Raises ConfigError for a file that cannot be read."""
        self._path, self._key, self._say = path, key, say
        self.results: dict[str, Result] = {}
        self.lost = ""
        """why some results are in this process alone; empty: all are in the file"""
        try:
            self._read()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _unusable(path, error) from None

    def start_anew(self) -> None:
        """The old file is kept beside the new one. Raises ConfigError where it cannot be."""
        self.results = {}
        try:
            if self._path.exists():
                self._path.replace(self._path.with_suffix(".jsonl.old"))
        except OSError as error:
            raise _unusable(self._path, error) from None

    def add(self, result: Result) -> None:
        """Where the file cannot be written the result is kept in memory, and `lost` says why."""
        self.results[result.trial.id] = result
        try:
            _append(self._path, msgspec.json.encode(_Line(self._key, result)) + b"\n")
        except OSError as error:
            if not self.lost:
                self._say(f"{self._path} cannot be written: {error.strerror}; this run goes on without it")
            self.lost = f"{self._path} cannot be written: {error.strerror}"

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


def _append(path: Path, line: bytes) -> None:
    """All of it or nothing: half a line would spoil the next one too."""
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[file.write(rest) or 0 :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(start)
            raise


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error.strerror}; --output names another folder for it")
