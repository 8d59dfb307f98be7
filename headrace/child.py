"""The program of a child process: `python -P child.py MODULE CONFIG_FD PARENT_PID`, as process.py starts it.

It ends with its parent from its first moment on, whatever state it is in, and imports the very package that the parent
runs, wherever that lies: neither the working directory nor this file's folder is searched for modules.
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
    """The system kills this process when the thread that started it ends (`process.Spawner`, which never does before
    its process)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it was faster
        os._exit(1)


def load_package(folder: Path) -> None:
    """Import the package in `folder`, which need not be on the path."""
    name, file = folder.name, folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main(module: str, config_fd: str, parent: str) -> None:
    die_with_parent(int(parent))
    load_package(Path(__file__).parent)

    from headrace.output import take_streams

    take_streams(output_matters=False)
    sys.argv = [module, config_fd]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
