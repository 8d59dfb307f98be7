"""Child processes that read their config from an inherited descriptor and never outlive their parent, and the folder in
which processes meet.

Nothing travels as pickle or on the command line. What a child does first is in child.py. Knows nothing of what children
are for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import queue
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from headrace.config import cache_folder, child_environment

SOCKETS = "headrace-sockets-"
"""Beginning of a socket folder's name."""
MAX_FOLDER_CHARS = 80
"""Of a socket folder's path; the system allows 107 for a socket's in all."""


@dataclass(frozen=True)
class Child:
    process: subprocess.Popen[bytes]

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


def spawn(module: str, config: bytes, **environment: str) -> Child:
    """Run `module` as a child's main program, which reads `config`; `environment` is set where the user has not.

    Ctrl-C and a closed terminal, which reach all processes of a group, do not reach it: the parent decides.
    """
    variables = child_environment(**environment)
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        variables.update(bytecode_environment(variables, torch.origin))
    return _spawner(os.getpid()).do(functools.partial(_start, module, config, variables))


def _start(module: str, config: bytes, variables: dict[str, str]) -> Child:
    config_fd = os.memfd_create("headrace-config")
    try:
        os.write(config_fd, config)
        os.lseek(config_fd, 0, os.SEEK_SET)
        program = str(Path(__file__).with_name("child.py"))
        process = subprocess.Popen(
            [sys.executable, "-P", program, module, str(config_fd), str(os.getpid())],
            pass_fds=(config_fd,),
            env=variables,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(config_fd)
    return Child(process)


class _Spawner(threading.Thread):
    """Starts all children, and ends with the process alone: children die with the thread that started them, and they
    inherit which signals it blocks."""

    def __init__(self) -> None:
        super().__init__(name="spawner", daemon=True)
        self._orders: queue.SimpleQueue[tuple[Callable[[], Child], Future[Child]]] = queue.SimpleQueue()
        self.start()

    def do(self, start: Callable[[], Child]) -> Child:
        started: Future[Child] = Future()
        self._orders.put((start, started))
        return started.result()

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
        while True:
            start, started = self._orders.get()
            try:
                started.set_result(start())
            except Exception as error:
                started.set_exception(error)


@functools.cache
def _spawner(pid: int) -> _Spawner:
    """One a process: threads do not survive a fork."""
    return _Spawner()


class SocketFolder:
    """A new folder that this user alone can enter. Its maker holds a lock on it, which the system lets go when
    the maker dies; whoever makes the next one removes those without."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(parent) + len(SOCKETS) + 9 > MAX_FOLDER_CHARS:
            parent = "/tmp"
        remove_abandoned(Path(parent))
        descriptor = None
        while descriptor is None:
            self.name = tempfile.mkdtemp(prefix=SOCKETS, dir=parent)  # mode 0700
            descriptor = _lock(Path(self.name), by_maker=True)
        self.remove = weakref.finalize(self, _remove, Path(self.name), descriptor)
        _FOLDERS.add(self)


_FOLDERS: weakref.WeakSet[SocketFolder] = weakref.WeakSet()


def remove_abandoned(parent: Path) -> None:
    """Remove the socket folders whose makers are gone."""
    for folder in parent.glob(SOCKETS + "*"):
        descriptor = _lock(folder)
        if descriptor is not None:
            _remove(folder, descriptor)


def _lock(folder: Path, by_maker: bool = False) -> int | None:
    """A descriptor that holds the lock; None where another start holds it, or has just removed the folder, or where it
    is no folder of this user's. Its maker may have it unlocked on a disk without locks: nobody else will."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            if not by_maker:
                raise
        opened = os.fstat(descriptor)
        if opened.st_uid == os.geteuid() and os.path.samestat(opened, folder.lstat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove(folder: Path, descriptor: int) -> None:
    """Only what processes of ours put there, sockets and files, and so no folder in it."""
    try:
        with contextlib.suppress(OSError):
            for name in os.listdir(descriptor):
                os.unlink(name, dir_fd=descriptor)
            folder.rmdir()
    finally:
        os.close(descriptor)


def exit_at_once(status: int) -> NoReturn:
    """For signal handlers: nothing is left behind, and no thread is waited for; children die with this process."""
    for folder in list(_FOLDERS):
        folder.remove()
    os._exit(status)


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
