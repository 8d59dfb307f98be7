"""Runs `headrace serve` as a child process on a free port, keeps its log, and loads it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.main import main as headrace_main

STOP_SECONDS = 10.0
"""A server that has not ended this long after SIGTERM is killed."""


@dataclass
class Server:
    """Watches a started server. `url` is empty until the log names it."""

    process: subprocess.Popen[str]
    launched: float
    """monotonic seconds"""
    lines: list[str] = field(default_factory=list)
    """its log, each line with the seconds since its launch"""
    url: str = ""

    def read_log(self) -> None:
        """Read the log until the process ends, in a thread of its own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{time.monotonic() - self.launched:7.2f} s  {line.rstrip()}")
            if match := re.search(r" on (http://\S+)", line):
                self.url = match[1]

    def wait_for_url(self, seconds: float) -> str:
        """Wait until it serves. Raises RuntimeError with the log where it does not start in time."""
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > self.launched + seconds:
                raise RuntimeError("the server did not start:\n" + "\n".join(self.lines[-40:]))
            time.sleep(0.01)
        return self.url

    def stop(self) -> int:
        """End the process, and return its exit code: negative where it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def serving(flags: list[str], environment: dict[str, str] | None = None) -> AbstractContextManager[Server]:
    """Run `headrace serve` with `flags`, as `running` does."""
    return running([sys.executable, "-m", "headrace.cli.main", "serve", *flags, "--port", "0"], environment)


@contextmanager
def running(command: list[str], environment: dict[str, str] | None = None) -> Iterator[Server]:
    """Run a command that serves; it is stopped afterwards. Its log is printed if the body raises."""
    launched = time.monotonic()
    process = subprocess.Popen(
        command,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    server = Server(process, launched)
    reader = threading.Thread(target=server.read_log, daemon=True)
    reader.start()
    try:
        yield server
    except BaseException:
        print("the server's log:\n" + "\n".join(server.lines[-60:]), file=sys.stderr)
        raise
    finally:
        server.stop()
        reader.join(STOP_SECONDS)


def load(url: str, **flags: int | float) -> dict[str, Any]:
    """Run `headrace bench serve` with such flags against a server; return its result file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = ["bench", "serve", f"--base-url={url}", "--ignore-eos", "--disable-tqdm", f"--result-filename={path}"]
        headrace_main([*command, *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())])
        found: dict[str, Any] = json.loads(path.read_text())
        return found
