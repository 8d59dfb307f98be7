"""A progress bar on standard error, where somebody watches; nothing where nobody does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(title: str, total: int, disabled: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes how many are done."""
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
    # The bar draws itself four times a second from its own thread: a benchmark has no time for more.
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=4, transient=True
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
