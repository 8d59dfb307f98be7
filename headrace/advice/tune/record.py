"""Defines trials and their results, and keeps them in a file with one line for each trial.

A line is on the disk before the next trial starts, so what was measured survives whatever ends the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.errors import ConfigError, HeadraceError

Positive = Annotated[float, msgspec.Meta(gt=0)]
"""Figures that others are divided by."""


class Load(msgspec.Struct, frozen=True):
    """Holds what `headrace bench serve` measured under one kind of load, in milliseconds and tokens/s."""

    tok_s: Positive
    ttft_p50: float
    ttft_p99: Positive
    itl_p50: float
    itl_p99: float
    e2e_p50: Positive


class Trial(msgspec.Struct, frozen=True):
    """Describes what to measure: the plan with some knobs changed."""

    changes: dict[str, Any]
    """Knob -> value; empty: the plan itself."""
    again: bool = False
    """It is a second run of the same, as single runs differ."""

    @property
    def id(self) -> str:
        return json.dumps(self.changes, sort_keys=True) + (" again" if self.again else "")

    @property
    def is_lossy(self) -> bool:
        """It rounds what the plan does not, which changes answers."""
        return str(self.changes.get("kv_cache_dtype")).startswith("fp8")

    @property
    def title(self) -> str:
        changed = ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "the plan"
        changed += " (lossy)" if self.is_lossy else ""
        return f"{changed}, again" if self.again else changed


class Result(msgspec.Struct, frozen=True):
    """Holds what came of a trial."""

    trial: Trial
    status: str
    """`ok`, `failed` or `timeout`."""
    seconds: float
    why: str = ""
    at_once: Load | None = None
    """Measured with as many requests in flight as the load allows."""
    at_rate: Load | None = None
    """Measured at the user's request rate, where there is one."""
    settings: dict[str, Any] = {}
    """What the engine decided, by field."""

    def __post_init__(self) -> None:
        if self.ok and self.at_once is None:
            raise ValueError("`at_once` must say what was measured where `status` is ok")

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def latencies(self) -> Load:
        """The measurement whose latencies count: that at the request rate, where there is one."""
        measured = self.at_rate or self.at_once
        assert measured is not None
        return measured

    @property
    def tok_s(self) -> float:
        """Output tokens per second under full load; 0 where nothing was measured."""
        return self.at_once.tok_s if self.at_once else 0.0


class _Line(msgspec.Struct):
    key: str
    result: Result


class Journal:
    """Keeps the results of one task (`key`) in a file that may also hold those of other tasks."""

    def __init__(self, path: Path, key: str, say: Callable[[str], None]) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._path, self._key, self._say = path, key, say
        self.results: dict[str, Result] = {}
        try:
            self._read()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _unusable(path, error) from None

    def start_anew(self) -> None:
        """Forget all results, and rename the file so that it stays beside the new one. Raises ConfigError."""
        self.results = {}
        try:
            if self._path.exists():
                self._path.replace(self._path.with_suffix(".jsonl.old"))
        except OSError as error:
            raise _unusable(self._path, error) from None

    def add(self, result: Result) -> None:
        """Keep a result. Raises HeadraceError where the file cannot be written; `_read` drops half a line."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(_Line(self._key, result)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise HeadraceError(f"{self._path} cannot be written: {error.strerror}") from None
        self.results[result.trial.id] = result

    def _read(self) -> None:
        text = self._path.read_bytes()
        whole, _, rest = text.rpartition(b"\n")
        if rest:
            self._say(f"{self._path}: the last line was cut off in the middle; that trial is run again")
            with self._path.open("rb+") as file:
                file.truncate(len(text) - len(rest))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                self._say(f"{self._path}: line {number} is left out: {error}")
                continue
            if entry.key == self._key:
                self.results[entry.result.trial.id] = entry.result


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error.strerror}; --output names another folder for it")
