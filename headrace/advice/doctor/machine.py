"""Gives checks access to files, commands, environment and disks, each of which a test can replace.

Whatever cannot be read raises `Unreadable`, whose text is shown to the user.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

COMMAND_SECONDS = 30.0
"""A driver in trouble lets nvidia-smi and rocm-smi hang; eight GPUs without persistence mode take ten seconds."""


class Unreadable(Exception):
    """Says why a file, command or package cannot be read; `missing` where it is not there at all."""

    def __init__(self, why: str, missing: bool = False) -> None:
        super().__init__(why)
        self.missing = missing


@dataclass(frozen=True)
class Disk:
    total: int
    free: int


def run_command(command: Sequence[str], seconds: float) -> str:
    """Return what a command prints. Raises Unreadable where it fails or takes longer than `seconds`."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except FileNotFoundError:
        raise Unreadable(f"no {name} in PATH", missing=True) from None
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{name} did not answer within {seconds:.0f} s") from None
    except OSError as error:
        raise Unreadable(f"{name} cannot be run: {error.strerror}") from None
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = lines[-1].strip() if lines else "no message"
        raise Unreadable(f"{name} ended with code {done.returncode}: {last:.200}")
    return done.stdout


def disk_of(path: Path) -> Disk:
    usage = shutil.disk_usage(path)
    return Disk(usage.total, usage.free)


def package_file(package: str, name: str) -> str:
    """Return a text file of an installed package, without importing the package. Raises Unreadable."""
    try:
        return Path(str(importlib.metadata.distribution(package).locate_file(name))).read_text()
    except importlib.metadata.PackageNotFoundError:
        raise Unreadable(f"{package} is not installed", missing=True) from None
    except OSError as error:
        raise Unreadable(f"{name} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Machine:
    """Holds the ways to look at a machine; the defaults look at this one."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    """Every file is looked up under it."""
    run: Callable[[Sequence[str], float], str] = run_command
    disk: Callable[[Path], Disk] = disk_of
    package_file: Callable[[str, str], str] = package_file
    may_write: Callable[[Path], bool] = partial(os.access, mode=os.R_OK | os.W_OK)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """Return the stripped text of a file. Raises Unreadable."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except FileNotFoundError:
            raise Unreadable(f"no {name}", missing=True) from None
        except OSError as error:
            raise Unreadable(f"{name}: {(error.strerror or 'cannot be read').lower()}") from None

    def read_or(self, name: str, otherwise: str = "") -> str:
        try:
            return self.read(name)
        except Unreadable:
            return otherwise

    def number(self, name: str) -> int | None:
        """Return the whole number in a file; None where there is none."""
        try:
            return int(self.read(name))
        except (Unreadable, ValueError):
            return None

    def space(self, name: str) -> Disk:
        """Return the size of the disk under a path. Raises Unreadable."""
        try:
            return self.disk(self.path(name))
        except OSError as error:
            raise Unreadable(f"{name}: {(error.strerror or 'cannot be read').lower()}") from None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none where it cannot be read."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def command(self, *command: str, seconds: float = COMMAND_SECONDS) -> str:
        return self.run(command, seconds)
