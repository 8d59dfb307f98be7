"""Child processes that read their config from an inherited descriptor and never outlive their parent.

Nothing travels as pickle or on the command line. The parent holds the write end of a pipe, the *lifeline*: when the
parent dies, by whatever signal, the child's blocking read ends and the child exits at once, even while it still
imports: `python -m headrace.process MODULE CONFIG_FD LIFELINE_FD` watches first. Knows nothing of what children do.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headrace.config import cache_folder, child_environment


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[bytes]
    lifeline: IO[bytes]
    """Write end of the pipe; closing it makes the child exit."""

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, timeout: float) -> None:
        """SIGTERM, then SIGKILL after `timeout` seconds; returns when the process is gone."""
        if self.is_alive():
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.lifeline.close()


def spawn(module: str, config: bytes, **environment: str) -> Child:
    """Run `module` as a child's main program, which reads `config`; `environment` is set where the user has not."""
    variables = child_environment(**environment)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        variables.update(bytecode_environment(variables, torch.origin))
    config_fd = os.memfd_create("headrace-config")
    os.write(config_fd, config)
    os.lseek(config_fd, 0, os.SEEK_SET)
    child_end, parent_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace.process", module, str(config_fd), str(child_end)],
            pass_fds=(config_fd, child_end),
            env=variables,
            stdin=subprocess.DEVNULL,
        )
    except OSError:
        os.close(parent_end)
        raise
    finally:
        os.close(config_fd)
        os.close(child_end)
    return Child(process, os.fdopen(parent_end, "wb"))


def bytecode_environment(environ: Mapping[str, str], source: str) -> dict[str, str]:
    """What makes a child keep compiled modules in our cache folder, if `source`, a module's file, has none beside it.

    Images are often made without, and told to write none (PYTHONDONTWRITEBYTECODE): then every start compiles torch's
    1,400 modules again, 2 to 4 s. Nothing where the user has named a place, or where others may write to ours: code is
    run from it.
    """
    if environ.get("PYTHONPYCACHEPREFIX") or Path(importlib.util.cache_from_source(source)).exists():
        return {}
    folder = cache_folder(environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return {}
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}


def read_config(argv: list[str]) -> bytes:
    """In the child, whose `sys.argv` this is: the config bytes."""
    with os.fdopen(int(argv[1]), "rb") as file:
        return file.read()


def _die_with_parent(lifeline_fd: int) -> None:
    def watch() -> None:
        os.read(lifeline_fd, 1)  # returns only at end of file: nobody ever writes
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


if __name__ == "__main__":
    _die_with_parent(int(sys.argv[3]))
    sys.argv = sys.argv[1:3]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
