"""Shows progress on standard error, and writes result files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


@contextlib.contextmanager
def progress_bar(title: str, total: int, disabled: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar if standard error is a terminal. Yields a function that takes how many are done."""
    if disabled or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn four times a second, from its own thread, so that the benchmark loses little time
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=4, transient=True
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a result file. Raises ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"result file {str(path)!r} cannot be written: {error.strerror}") from None
