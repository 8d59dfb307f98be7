"""Replaces standard output and error, so that a reader that goes away or a full disk does not break a server, and has
libraries' warnings come as lines of ours.

A server goes on without output. A command whose output is its purpose reports the loss. Imports only errors.py, because
it is needed before everything else.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from pathlib import Path
from typing import IO, Any, TextIO

from headrace.errors import OutputError


class _Stream(io.FileIO):
    """Drops what cannot be written. If its output `matters`, the first loss raises OutputError."""

    def __init__(self, descriptor: int, matters: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._matters = matters

    def write(self, data: Any, /) -> int:
        try:
            written: int | None = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            if not self._matters:
                return len(data)
            self._matters = False  # Python's own flush at exit must not fail again
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(f"standard output cannot be written: {error.strerror}") from None
        return written


def take_streams(output_matters: bool) -> None:
    """Replace the streams of a process of ours, before anything is printed or logged. Standard error never matters."""
    warnings.showwarning = tell_warning
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: a file or socket opened later would get its number, and what libraries print
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # writing to it still fails
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _text(sys.stdout, _Stream(1, output_matters))
    sys.stderr = _text(sys.stderr, _Stream(2, False))


def tell_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Log what a library warns of, in a line that says what that means; which warnings are shown is up to Python's
    filters."""
    import logging  # only few commands need it

    parts = Path(filename).parts
    library = parts[parts.index("site-packages") + 1] if "site-packages" in parts[:-1] else filename
    logging.getLogger(__name__).warning(
        "A library's warning, which stops nothing; what it computed was used: %s (%s, %s)",
        " ".join(str(message).split()), library.removesuffix(".py"), category.__name__,
    )  # fmt: skip


def _text(before: TextIO | None, stream: _Stream) -> TextIO:
    binary: IO[bytes] = io.BufferedWriter(stream)
    encoding = before.encoding if before is not None else "utf-8"
    return io.TextIOWrapper(binary, encoding, "backslashreplace", line_buffering=True)
