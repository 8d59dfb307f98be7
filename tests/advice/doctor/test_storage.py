"""Disks behind the caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.storage import hub_folder, kernel_folder
from tests.advice.doctor.made_up import GIB, Case, Disk, MadeUp

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
IN_CONTAINER = {"/.dockerenv": ""}
HUB, KERNELS = "/root/.cache/huggingface/hub", "/root/.triton/cache"
MOUNTS = "/proc/mounts"
INSIDE = {"TRITON_CACHE_DIR": "/triton", "HEADRACE_CACHE": "/measured", "/triton/x": ""} | IN_CONTAINER
OVERLAY = "overlay / overlay rw 0 0\n"
CASES: list[Case] = [
    *(("hub-cache", "nvidia",
       {"HF_HOME": "/data/hf", "/data/hf/token": "",
        MOUNTS: f"/dev/sda1 / ext4 rw 0 0\nserver:/x /data {kind} rw 0 0\n/dev/sdb /dat ext4 rw 0 0\n", **container},
       NOTE if words else OK, f"/data/hf/hub{words or ': …'}")
      for kind, container, words in (("nfs4", {}, " is on nfs4"), ("tmpfs", {}, "…(tmpfs)"), ("overlay", {}, ""),
                                     ("overlay", IN_CONTAINER, "…(overlay)"), ("xfs", IN_CONTAINER, ""))),
    ("HF_HUB_OFFLINE", "", {"HF_HUB_OFFLINE": "1"}, NOTE),
    ("kernel-cache", "nvidia", INSIDE | {MOUNTS: OVERLAY}, NOTE, "/triton is lost with the container…",
     "docker run -v headrace-TRITON_CACHE_DIR:/triton …"),
    ("kernel-cache", "", INSIDE | {MOUNTS: OVERLAY}, OK),
    *((id, "nvidia", INSIDE | {MOUNTS: f"{OVERLAY}/dev/sda /triton ext4 rw 0 0\n"}, severity)
      for id, severity in (("kernel-cache", OK), ("measurements", NOTE))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)


@pytest.mark.parametrize(
    ("environment", "hub", "kernels"),
    [
        ({}, HUB, KERNELS),
        ({"HF_HOME": "/data/hf"}, "/data/hf/hub", KERNELS),
        ({"HF_HUB_CACHE": "~/models", "HF_HOME": "/x"}, "/root/models", KERNELS),
        ({"XDG_CACHE_HOME": "/tmp/c"}, "/tmp/c/huggingface/hub", KERNELS),
        ({"TRITON_HOME": "/scratch"}, HUB, "/scratch/.triton/cache"),
        ({"TRITON_CACHE_DIR": "/scratch/t"}, HUB, "/scratch/t"),
    ],
)
def test_folders(here: MadeUp, environment: dict[str, str], hub: str, kernels: str) -> None:
    here.environment |= environment
    assert (hub_folder(here.machine()), kernel_folder(here.machine())) == (Path(hub), Path(kernels))


@pytest.mark.parametrize(
    ("free", "model", "severity"),
    [(1500 * GIB, None, OK), (6 * GIB, None, OK), (2 * GIB, None, HURTS), (100 * GIB, 141 * 10**9, HURTS),
     (30 * GIB, 16 * 10**9, OK)],
)  # fmt: skip
def test_room_for_weights(here: MadeUp, free: int, model: int | None, severity: Severity) -> None:
    here.model_bytes = model
    changes = {"/data/hf/hub/version.txt": "1", "HF_HOME": "/data/hf", "disk /data/hf/hub": free}
    fix = "" if severity is OK else "export HF_HOME=/path/on/a/local/disk"
    here.holds(("hub-cache", "", changes, severity, "/data/hf/hub: …", fix))


def test_a_hub_cache_that_may_not_be_written(here: MadeUp) -> None:
    here.closed = {"/data"}
    changes = {"/data/readme": "", "HF_HOME": "/data/hf"}
    here.holds(("hub-cache", "", changes, HURTS, "/data/hf/hub may not be written"))


@pytest.mark.parametrize(("id", "variable"), [("kernel-cache", "TRITON_CACHE_DIR"), ("measurements", "HEADRACE_CACHE")])
def test_caches_of_kernels_and_measurements(here: MadeUp, id: str, variable: str) -> None:
    here.holds((id, "nvidia", {variable: "/data/cache", "/data/cache/x": ""}, OK, "/data/cache: …"))
    here.holds((id, "", {MOUNTS: "server:/x /data nfs rw 0 0\n"}, NOTE))
    here.holds((id, "", {"disk /data/cache": GIB // 2}, HURTS, "/data/cache: 0.5 GiB free"))
    here.closed = {"/data/cache"}
    fix = f"export {variable}=/path/on/a/local/disk"
    here.holds((id, "", {}, HURTS, "/data/cache may not be written", fix))


def test_a_disk_that_does_not_answer(here: MadeUp) -> None:
    class Dead(dict[str, Disk]):
        def get(self, key: str, default: object = None) -> Disk:
            raise OSError(5, "Input/output error")

    here.disks = Dead()
    assert {"hub-cache", "kernel-cache", "measurements", "shared-memory"} <= set(here.ids(UNKNOWN))
