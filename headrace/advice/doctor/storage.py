"""Checks the disks of caches: of the hub, where weights go, of compiled kernels, and of measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.advice.doctor.finding import Finding, ok, unknown
from headrace.advice.doctor.gpu import GIB, gib
from headrace.advice.doctor.machine import Machine
from headrace.advice.doctor.survey import Survey
from headrace.environment import cache_folder

FULL_DISK = 5 * GIB
KERNEL_SPACE = GIB
NETWORK = ("nfs", "cifs", "smb", "fuse.", "lustre", "ceph", "glusterfs", "beegfs", "9p", "gpfs")


def hub_folder(machine: Machine) -> Path:
    """Return where huggingface_hub keeps models, by its own rules."""
    environment = machine.environment
    if given := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return _home(machine, given)
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return _home(machine, environment.get("HF_HOME") or f"{cache}/huggingface") / "hub"


def kernel_folder(machine: Machine) -> Path:
    """Return where Triton keeps what it compiled."""
    environment = machine.environment
    if given := environment.get("TRITON_CACHE_DIR"):
        return _home(machine, given)
    return _home(machine, environment.get("TRITON_HOME") or "~") / ".triton" / "cache"


def _home(machine: Machine, path: str) -> Path:
    if path.startswith("~"):
        return Path(machine.environment.get("HOME") or "/root") / path[1:].lstrip("/")
    return Path(path)


class Cache(NamedTuple):
    """Describes a cache that has a folder."""

    id: str
    folder: Path
    variable: str
    """It names another folder."""
    room: int
    """Bytes below which the cache is of no use."""
    cost: str
    """What it costs to do without."""


def caches(survey: Survey) -> list[Cache]:
    """Return the caches of models, of compiled kernels and of measurements."""
    machine, room = survey.machine, FULL_DISK
    models = "Models are fetched into it: in bf16 an 8B one takes 16 GB, a 70B one 141 GB."
    if survey.model_bytes is not None:
        room, models = survey.model_bytes, f"{gib(survey.model_bytes)} of weights have to be there already."
    kernels = "Kernels are compiled again at each start."
    measured = "Choices that are measured once a machine are measured again at each start."
    return [
        Cache("hub-cache", hub_folder(machine), "HF_HOME", room, models),
        Cache("kernel-cache", kernel_folder(machine), "TRITON_CACHE_DIR", KERNEL_SPACE, kernels),
        Cache("measurements", cache_folder(machine.environment), "HEADRACE_CACHE", KERNEL_SPACE, measured),
    ]


def check_caches(survey: Survey) -> Iterator[Finding]:
    """Verify that each cache has a disk to write to, with room, near, and not lost with a container."""
    machine = survey.machine
    for cache in caches(survey):
        place, free = _nearest(machine, cache.folder)
        if free is None:
            yield unknown(f"{cache.folder}: free space cannot be read", id=cache.id)
            continue
        kind, text = _filesystem(machine, place), ""
        if not machine.may_write(place):
            text = "cache-closed"
        elif free < cache.room:
            text = "cache-full"
        elif kind.startswith(NETWORK):
            text = "cache-over-network"
        elif kind == "tmpfs" or (kind == "overlay" and survey.container and survey.checked_gpus):
            text = "cache-passing"
        if text:
            yield survey.finding(text, **cache._asdict(), free=gib(free), kind=kind)
        else:
            yield ok(f"{cache.folder}: {gib(free)} free", id=cache.id)
    if machine.environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        yield survey.finding("hub-offline", id="HF_HUB_OFFLINE")


def _nearest(machine: Machine, folder: Path) -> tuple[Path, int | None]:
    """The folder, or the first above it that exists, and the bytes free there."""
    place = machine.path(str(folder))
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return place, machine.disk(place).free
    except OSError:
        return place, None


def _filesystem(machine: Machine, place: Path) -> str:
    """The type of what is mounted there, as /proc/mounts names it; "" if that cannot be read."""
    inside = "/" + str(place.relative_to(machine.root)) if place.is_relative_to(machine.root) else str(place)
    best, kind = "", ""
    for line in machine.read_or("/proc/mounts").splitlines():
        fields = line.split()
        if len(fields) > 2 and len(fields[1]) >= len(best) and (inside + "/").startswith(fields[1].rstrip("/") + "/"):
            best, kind = fields[1], fields[2]
    return kind
