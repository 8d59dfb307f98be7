"""Spawns child processes that never outlive their parent, and makes the folders for their sockets.

A child reads its config from an inherited file descriptor, so that nothing goes over the command line or as pickle.
What it does first is in child.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import logging
import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from headrace.environment import cache_folder, child_environment

logger = logging.getLogger(__name__)

SOCKETS = "headrace-sockets-"
"""The beginning of a socket folder's name."""
MAX_FOLDER_CHARS = 80
"""Most characters of a socket folder's path. The system allows 107 for the path of a socket."""


@dataclass(frozen=True)
class Child:
    """Holds a child process."""

    process: subprocess.Popen[bytes]

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, timeout: float) -> None:
        """End the process with SIGTERM, after `timeout` seconds with SIGKILL; return when it is gone."""
        if self.is_alive():
            self.process.terminate()
        self.end_within(timeout)

    def end_within(self, timeout: float) -> None:
        """Wait until the process is gone; it is killed if that takes longer than `timeout` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port at which nothing listens now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def spawn(
    module: str, config: bytes, environment: Mapping[str, str] | None = None, descriptors: Sequence[int] = ()
) -> Child:
    """Start a child with `module` as its main program, which reads `config` and inherits `descriptors` under the same
    numbers; `environment` yields to what the user set. Ctrl-C and a closed terminal do not reach the child, although
    they reach all processes of a group: the parent decides."""
    variables = child_environment(**(environment or {}))
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        variables.update(bytecode_environment(variables, torch.origin))
    return _spawner(os.getpid()).do(functools.partial(_start, module, config, descriptors, variables))


def _start(module: str, config: bytes, descriptors: Sequence[int], variables: dict[str, str]) -> Child:
    config_fd = os.memfd_create("headrace-config")
    try:
        os.write(config_fd, config)
        os.lseek(config_fd, 0, os.SEEK_SET)
        program = str(Path(__file__).with_name("child.py"))
        process = subprocess.Popen(
            [sys.executable, "-P", program, module, str(config_fd), str(os.getpid())],
            pass_fds=(config_fd, *descriptors),
            env=variables,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(config_fd)
    return Child(process)


def call_after(wait: Callable[[], object], loop: asyncio.AbstractEventLoop, note: Callable[[], object]) -> None:
    """Call `note` in an event loop once `wait` has returned, which a thread of its own calls."""

    def watch() -> None:
        wait()
        try:
            loop.call_soon_threadsafe(note)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("a process ended after the event loop")

    threading.Thread(target=watch, name="watch", daemon=True).start()


class _Spawner(threading.Thread):
    """Starts all children, in a thread that lives as long as the process. It must, because children die with the thread
    that started them. They also inherit the signals that it blocks."""

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
    """Return the spawner of this process; one for each, because threads do not survive a fork."""
    return _Spawner()


class SocketFolder:
    """Makes a new folder that only this user can enter, and holds a lock on it. The system releases the lock when this
    process dies, and whoever makes the next folder removes those without one."""

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
    """Remove the socket folders whose processes are gone."""
    for folder in parent.glob(SOCKETS + "*"):
        descriptor = _lock(folder)
        if descriptor is not None:
            _remove(folder, descriptor)


def _lock(folder: Path, by_maker: bool = False) -> int | None:
    """Lock a folder; return the descriptor that holds the lock. Returns None if another process holds it or has just
    removed the folder, or if it is no folder of this user. On a disk without locks, only the process that made the
    folder (`by_maker`) gets a descriptor."""
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
    """Remove a socket folder and the sockets and files in it; one that contains a folder is not ours and stays."""
    try:
        with contextlib.suppress(OSError):
            for name in os.listdir(descriptor):
                os.unlink(name, dir_fd=descriptor)
            folder.rmdir()
    finally:
        os.close(descriptor)


def configure_logging(level: str, process: str = "") -> None:
    """Log to standard error. `level` holds for headrace itself: debug messages of other libraries are never shown.
    `process` names this process in each line."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s {process}%(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("headrace").setLevel(level.upper())


def exit_at_once(status: int) -> NoReturn:
    """End this process from a signal handler, without waiting for threads. Children die with it; folders are
    removed."""
    for folder in list(_FOLDERS):
        folder.remove()
    os._exit(status)


def bytecode_environment(environ: Mapping[str, str], source: str) -> dict[str, str]:
    """Return variables that make a child keep bytecode in our cache folder, if `source`, a module, has none beside it.

    Container images often come without bytecode and forbid to write it (PYTHONDONTWRITEBYTECODE). Every start then
    compiles torch's 1,400 modules again, which takes 2 to 4 s. Returns nothing if the user has named a folder, or if
    others may write to ours, because code is run from it.
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
    """Return the config that the parent gave to this child, whose `sys.argv` is `argv`."""
    with os.fdopen(int(argv[1]), "rb") as file:
        return file.read()


def trim_heap() -> None:
    """Give the heap's free pages back to the system, where the C library can do that (glibc). It frees pages only at
    the heap's end by itself, and buffers of ever new sizes among longer-lived objects leave gaps everywhere else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
