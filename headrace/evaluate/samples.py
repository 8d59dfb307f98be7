"""Keeps what a run has brought so far, an item a line, so that a run that was killed goes on where it was."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.errors import ConfigError, HeadraceError, quoted

Record = dict[str, Any]
"""What is kept of an item: `doc_id`, its place in the data, and whatever the task adds."""


class Samples:
    """Holds the samples file of a run open for more. Its first line is the run's settings; each other one is an item
    that is complete. A last line that a kill cut short is dropped."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Open the file, or make it. Raises ConfigError where it is of other settings, is in use, or cannot be
        written."""
        self.path = path
        self.done: dict[int, Record] = {}
        """By place in the data."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"samples file {str(path)!r} cannot be written: {error.strerror}") from None
        try:
            self._begin(json.loads(json.dumps(settings)))
        except BaseException:
            os.close(self._file)
            raise

    def _begin(self, settings: Record) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run writes to {self.path}") from None
        whole = self.path.read_bytes().rfind(b"\n") + 1
        before, self.done = read_samples(self.path) if whole else ({}, {})
        os.ftruncate(self._file, whole if self.done else 0)
        if not self.done:  # it may have been of other settings
            self._write({"settings": settings})
            return
        for name in {**before, **settings}:
            if before.get(name) != settings.get(name):
                other, own = quoted(before.get(name)), quoted(settings.get(name))
                raise ConfigError(
                    f"{self.path} is of a run with {name} {other}, not {own}; give another --output-path, or remove it"
                )

    def add(self, record: Record) -> None:
        """Keep an item. Raises HeadraceError if the disk is full."""
        self._write(record)
        self.done[record["doc_id"]] = record

    def _write(self, record: Record) -> None:
        line = json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, size)
            raise HeadraceError(f"{self.path} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def read_samples(path: Path) -> tuple[Record, dict[int, Record]]:
    """Return the settings and items of a samples file. Raises ConfigError for a file that is none."""
    try:
        lines = path.read_bytes().split(b"\n")
        records = [json.loads(line) for line in lines[:-1]]
        settings: Record = records[0]["settings"]
        return settings, {record["doc_id"]: record for record in records[1:]}
    except OSError as error:
        raise ConfigError(f"samples file {str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path} is not a samples file of `headrace eval`") from None
