"""Disks behind the caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.storage import hub_folder, kernel_folder
from tests.advice.doctor.made_up import GIB, Disk, MadeUp

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN


@pytest.mark.parametrize(
    ("environment", "hub", "kernels"),
    [
        ({}, "/root/.cache/huggingface/hub", "/root/.triton/cache"),
        ({"HF_HOME": "/data/hf"}, "/data/hf/hub", "/root/.triton/cache"),
        ({"HF_HUB_CACHE": "~/models", "HF_HOME": "/x"}, "/root/models", "/root/.triton/cache"),
        ({"XDG_CACHE_HOME": "/tmp/c"}, "/tmp/c/huggingface/hub", "/root/.triton/cache"),
        ({"TRITON_HOME": "/scratch"}, "/root/.cache/huggingface/hub", "/scratch/.triton/cache"),
        ({"TRITON_CACHE_DIR": "/scratch/t"}, "/root/.cache/huggingface/hub", "/scratch/t"),
    ],
)
def test_folders(here: MadeUp, environment: dict[str, str], hub: str, kernels: str) -> None:
    here.environment |= environment
    assert (hub_folder(here.machine()), kernel_folder(here.machine())) == (Path(hub), Path(kernels))


@pytest.mark.parametrize(
    ("free", "model", "severity"),
    [
        (1500 * GIB, None, OK),
        (30 * GIB, None, NOTE),
        (2 * GIB, None, HURTS),
        (100 * GIB, 141 * 10**9, HURTS),
        (30 * GIB, 16 * 10**9, OK),
    ],
)
def test_room_for_weights(here: MadeUp, free: int, model: int | None, severity: Severity) -> None:
    here.write("/data/hf/hub/version.txt", "1")
    here.environment["HF_HOME"] = "/data/hf"
    here.disks["/data/hf/hub"] = Disk(2000 * GIB, free)
    here.model_bytes = model
    finding = here.finding("hub-cache")
    assert finding.severity is severity
    assert finding.seen.startswith("/data/hf/hub: ")
    assert severity is OK or finding.fix == "export HF_HOME=/path/on/a/large/disk"


@pytest.mark.parametrize(
    ("kind", "container", "severity", "words"),
    [
        ("nfs4", False, NOTE, "on nfs4"),
        ("tmpfs", False, NOTE, "in memory (tmpfs)"),
        ("overlay", True, NOTE, "inside the container"),
        ("overlay", False, OK, ""),
        ("xfs", True, OK, ""),
    ],
)
def test_what_the_hub_cache_lies_on(here: MadeUp, kind: str, container: bool, severity: Severity, words: str) -> None:
    here.environment["HF_HOME"] = "/data/hf"
    here.write("/data/hf/token", "")
    here.write("/proc/mounts", f"/dev/sda1 / ext4 rw 0 0\nserver:/x /data {kind} rw 0 0\n/dev/sdb /dat ext4 rw 0 0\n")
    if container:
        here.write("/.dockerenv", "")
    finding = here.finding("hub-cache")
    assert finding.severity is severity
    assert words in finding.seen


def test_a_hub_cache_that_may_not_be_written(here: MadeUp) -> None:
    here.write("/data/readme", "")
    here.environment["HF_HOME"] = "/data/hf"
    here.closed = {"/data"}
    finding = here.finding("hub-cache")
    assert (finding.severity, finding.seen) == (HURTS, "/data/hf/hub may not be written")


def test_the_hub_is_off_limits(here: MadeUp) -> None:
    here.environment["HF_HUB_OFFLINE"] = "1"
    assert here.finding("HF_HUB_OFFLINE").severity is NOTE


@pytest.mark.parametrize(("id", "variable"), [("kernel-cache", "TRITON_CACHE_DIR"), ("measurements", "HEADRACE_CACHE")])
def test_caches_of_kernels_and_measurements(here: MadeUp, id: str, variable: str) -> None:
    here.nvidia().environment[variable] = "/data/cache"
    here.write("/data/cache/x", "")
    assert here.finding(id).seen == "/data/cache"
    here.write("/proc/mounts", "server:/x /data nfs rw 0 0\n")
    assert here.finding(id).severity is NOTE
    here.disks["/data/cache"] = Disk(GIB, GIB // 2)
    finding = here.finding(id)
    assert (finding.severity, finding.seen) == (HURTS, "/data/cache: 0.5 GiB free")
    here.closed = {"/data/cache"}
    finding = here.finding(id)
    assert (finding.severity, finding.seen) == (HURTS, "/data/cache may not be written")
    assert finding.fix == f"export {variable}=/path/on/a/local/disk"


def test_caches_inside_a_container(here: MadeUp) -> None:
    here.nvidia().environment |= {"TRITON_CACHE_DIR": "/triton", "HEADRACE_CACHE": "/measured"}
    here.write("/proc/mounts", "overlay / overlay rw 0 0\n")
    here.write("/.dockerenv", "")
    here.write("/triton/x", "")
    finding = here.finding("kernel-cache")
    assert (finding.severity, finding.seen) == (NOTE, "/triton and /measured: inside the container")
    assert finding.fix == "docker run -v headrace-kernel-cache:/triton -v headrace-measurements:/measured ..."
    here.write("/proc/mounts", "overlay / overlay rw 0 0\n/dev/sda /triton ext4 rw 0 0\n")
    assert here.finding("kernel-cache").severity is OK
    assert here.finding("measurements").severity is NOTE


def test_a_disk_that_does_not_answer(here: MadeUp) -> None:
    class Dead(dict[str, Disk]):
        def get(self, key: str, default: object = None) -> Disk:
            raise OSError(5, "Input/output error")

    here.disks = Dead()
    assert {"hub-cache", "kernel-cache", "measurements", "shared-memory"} <= set(here.ids(UNKNOWN))
