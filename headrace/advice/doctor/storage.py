"""Checks the disks of caches: of the hub, where weights go, of compiled kernels, and of measurements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.advice.doctor.finding import Finding, ok, unknown
from headrace.advice.doctor.gpu import GIB, gib
from headrace.advice.doctor.machine import Machine
from headrace.advice.doctor.survey import Survey
from headrace.environment import cache_folder

SMALL_DISK = 40 * GIB
"""An 8B model in bf16 takes 16 GB, a 70B one 141 GB."""
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


def check_hub_cache(survey: Survey) -> Iterator[Finding]:
    machine = survey.machine
    folder = hub_folder(machine)
    place, free = _nearest(machine, folder)
    if free is None:
        yield unknown(f"{folder}: free space cannot be read")
        return
    seen = f"{folder}: {gib(free)} free"
    if not machine.may_write(place):
        yield survey.finding("hub-closed", folder=folder)
    elif survey.model_bytes is not None and free < survey.model_bytes:
        yield survey.finding("hub-too-small", seen=seen, weights=gib(survey.model_bytes))
    elif survey.model_bytes is None and free < SMALL_DISK:
        yield survey.finding("hub-full" if free < FULL_DISK else "hub-small", seen=seen)
    elif (kind := _filesystem(machine, place)).startswith(NETWORK):
        yield survey.finding("hub-over-network", seen=seen, kind=kind)
    elif kind == "tmpfs":
        yield survey.finding("hub-in-memory", seen=seen)
    elif kind == "overlay" and survey.container:
        yield survey.finding("hub-in-container", seen=seen, parent=folder.parent)
    else:
        yield ok(seen)
    if machine.environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true"):
        yield survey.finding("hub-offline", id="HF_HUB_OFFLINE")


def check_kernel_caches(survey: Survey) -> Iterator[Finding]:
    machine = survey.machine
    caches = {
        "kernel-cache": (kernel_folder(machine), "TRITON_CACHE_DIR", "Kernels are compiled again at each start."),
        "measurements": (
            cache_folder(machine.environment),
            "HEADRACE_CACHE",
            "Choices that are measured once a machine are measured again at each start.",
        ),
    }
    lost = []
    for id, (folder, variable, cost) in caches.items():
        place, free = _nearest(machine, folder)
        if free is None:
            yield unknown(f"{folder}: free space cannot be read", id=id)
        elif not machine.may_write(place):
            yield survey.finding("kernels-closed", id=id, folder=folder, cost=cost, variable=variable)
        elif free < KERNEL_SPACE:
            yield survey.finding("kernels-full", id=id, folder=folder, free=gib(free), cost=cost, variable=variable)
        elif (kind := _filesystem(machine, place)).startswith(NETWORK):
            yield survey.finding("kernels-over-network", id=id, folder=folder, kind=kind, variable=variable)
        elif kind == "overlay" and survey.container and survey.checked_gpus:
            lost.append((id, folder))
        else:
            yield ok(str(folder), id=id)
    if lost:
        volumes = " ".join(f"-v headrace-{id}:{folder}" for id, folder in lost)
        seen = " and ".join(str(folder) for _, folder in lost)
        yield survey.finding("kernels-in-container", id=lost[0][0], seen=seen, volumes=volumes)


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
