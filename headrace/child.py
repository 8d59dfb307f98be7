"""Runs a child process: process.py starts it as `python -P child.py MODULE CONFIG_FD PARENT_PID`.

From its first moment on the child ends with its parent, whatever it is doing. It imports the very package that the
parent runs, wherever that is; neither the working directory nor this file's folder is searched for modules.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import runpy
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that started it ends, which lives as long as the parent."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def load_package(folder: Path) -> None:
    """Import the package in a folder that need not be on Python's path."""
    name, file = folder.name, folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main(module: str, config_fd: str, parent: str) -> None:
    """Run a module as the main program."""
    die_with_parent(int(parent))
    load_package(Path(__file__).parent)

    from headrace.output import take_streams

    take_streams(output_matters=False)
    sys.argv = [module, config_fd]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
