"""Driver, torch's build, torch in its own process, and visible devices."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.selection import select
from headrace.advice.doctor.survey import Survey
from tests.advice.doctor.made_up import CPU_TORCH, CUDA_TORCH, PCI, ROCM_TORCH, Case, MadeUp, nvidia_xml

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
IN_CONTAINER = {"/.dockerenv": ""}
QUERY, BUILD = "nvidia-smi -q -x", "torch/version.py"
CUDA, HIP, ROCR = (f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR"))
CASES: list[Case] = [
    ("driver", "", {}, OK, "no GPU on the PCI bus: headrace runs on the CPU"),
    ("driver", "nvidia", {}, OK, "NVIDIA driver 580.65.06 drives 2 x NVIDIA H200"),
    ("driver", "", {QUERY: Unreadable("nvidia-smi ended with code 6: No devices were found")}, HURTS,
     "…code 6: No devices were found"),
    ("device-files", "amd", {}, OK),
    ("device-files", "amd 1", {"/dev/dri/renderD128": None}, HURTS, "there is no render node in /dev/dri"),
    *(("torch-build", vendor, {QUERY: nvidia_xml(2, *driver), BUILD: torch} if driver else {BUILD: torch}, HURTS,
       f"…{seen}…", f"…{fix}") for vendor, torch, driver, seen, fix in (
           ("nvidia", CPU_TORCH, ("580.65.06", "13.0"), "torch 2.11.0+cpu (CPU) beside an NVIDIA GPU", "whl/cu130"),
           ("nvidia", ROCM_TORCH, ("535.54.03", "12.2"), "(ROCm 7.2.53211) beside an NVIDIA GPU", "whl/cu126"),
           ("nvidia", CUDA_TORCH, ("535.54.03", "12.2"), "but driver 535.54.03 knows CUDA up to 12.2", "whl/cu126"),
           ("amd", CUDA_TORCH, (), "(CUDA 13.0) beside an AMD GPU", "whl/rocm7.2"),
           ("amd", ROCM_TORCH.replace("2.11.0", "2.9.1"), (), "torch 2.9.1+rocm7.2", "pip install 'torch>=2.11'"))),
    ("torch-build", "", {}, OK, "torch 2.11.0+cpu (CPU)"),
    # Within a major version an older driver runs a newer CUDA.
    ("torch-build", "nvidia", {QUERY: nvidia_xml(2, "590.44.01", "13.1")}, OK),
    ("torch-build", "nvidia", {BUILD: CUDA_TORCH.replace("13.0", "13.2")}, OK),
    ("torch-runs", "", {"python": Unreadable("python ended with code 1: OSError: libcudart.so.13: cannot open")},
     HURTS, "…libcudart.so.13…"),
    ("torch-runs", "", {"python": "nothing of use"}, UNKNOWN),
    ("visible-devices", "nvidia 4", {HIP: "0"}, NOTE, "HIP_VISIBLE_DEVICES=0"),
    ("visible-devices", "nvidia 4", {">NVIDIA H200": ">NVIDIA L40S"}, NOTE, "…", "export CUDA_DEVICE_ORDER=PCI_BUS_ID"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)


def on_bus(here: MadeUp, vendor: str, driver: str = "") -> None:
    here.write(f"{PCI}/0000:61:00.0/vendor", {"nvidia": "0x10de", "amd": "0x1002"}[vendor])
    here.write(f"{PCI}/0000:61:00.0/class", "0x030200")
    if driver:
        here.write(f"/sys/bus/pci/drivers/{driver}/bind", "")
        (here.root / f"{PCI}/0000:61:00.0/driver".lstrip("/")).symlink_to(here.root / f"sys/bus/pci/drivers/{driver}")


@pytest.mark.parametrize(
    ("vendor", "driver", "changes", "seen", "fix"),
    [
        ("nvidia", "", {}, "1 NVIDIA GPU on the PCI bus, without a driver", "sudo apt install nvidia-driver…"),
        ("nvidia", "nouveau", {}, "1 NVIDIA GPU on the PCI bus, driven by nouveau", "sudo apt install nvidia-driver…"),
        ("nvidia", "nvidia", IN_CONTAINER, "…but no nvidia-smi in PATH", "docker run --gpus all…"),
        ("nvidia", "nvidia", {}, "…but no nvidia-smi in PATH", "sudo nvidia-smi"),
        ("nvidia", "nvidia", {QUERY: Unreadable("no answer within 20 s")}, "…no answer within 20 s", "…"),
        ("amd", "", {}, "1 AMD GPU on the PCI bus, without the amdgpu driver", "sudo modprobe amdgpu"),
        ("amd", "amdgpu", IN_CONTAINER, "…but ROCm's driver shows none", "docker run --device=/dev/kfd…"),
    ],
)  # fmt: skip
def test_gpus_that_nothing_drives(
    here: MadeUp, vendor: str, driver: str, changes: dict[str, Any], seen: str, fix: str
) -> None:
    on_bus(here, vendor, driver)
    here.holds(("driver", "", changes, HURTS, seen, fix))


def test_device_files_of_amd(here: MadeUp) -> None:
    here.amd().closed = {"/dev/kfd"}
    fix = "sudo usermod -aG render,video $USER  # then log in again"
    here.holds(("device-files", "", {}, HURTS, "/dev/kfd may not be opened", fix))
    here.holds(("device-files", "", IN_CONTAINER, HURTS, "…", "…--group-add render…"))


def test_no_torch(here: MadeUp) -> None:
    here.packages.clear()
    here.holds(("torch-build", "", {}, HURTS, "torch is not installed"))
    here.holds(("torch-runs", "", {}, None))


@pytest.mark.parametrize(
    ("reported", "severity", "seen", "fix"),
    [
        ({"devices": 0, "needed": [], "error": "Error 803: unsupported display driver"}, HURTS,
         "torch finds no GPU: Error 803: unsupported display driver", "…torch.cuda.init()…"),
        ({"devices": 2, "needed": [], "error": "Error 802: system not yet initialized"}, HURTS, "…",
         "sudo systemctl restart nvidia-fabricmanager"),
        ({"devices": 1, "needed": ["sm_90"]}, NOTE, "torch counts 1 device where 2 should be visible", "…"),
        ({"devices": 2, "seconds": 48.2}, NOTE, "import torch takes 48 s", "…"),
    ],
)  # fmt: skip
def test_what_torch_reports(here: MadeUp, reported: dict[str, Any], severity: Severity, seen: str, fix: str) -> None:
    here.nvidia().probe(**reported)
    here.holds(("torch-runs", "", {}, severity, seen, fix))


@pytest.mark.parametrize(
    ("vendor", "needed", "held", "fits"),
    [
        ("nvidia", "sm_90", ["sm_80", "sm_90"], True),
        ("nvidia", "sm_89", ["sm_80", "sm_90"], True),
        ("nvidia", "sm_103", ["sm_90", "sm_100"], True),
        ("nvidia", "sm_120", ["sm_90", "compute_90"], True),
        ("nvidia", "sm_120", ["sm_90", "sm_100"], False),
        ("nvidia", "sm_70", ["sm_75", "sm_80"], False),
        ("nvidia", "sm_103", ["sm_90a", "sm_100a"], False),
        ("amd", "gfx942:sramecc+:xnack-", ["gfx90a", "gfx942"], True),
        ("amd", "gfx1151", ["gfx90a", "gfx942"], False),
    ],
)
def test_kernels_for_the_chip(here: MadeUp, vendor: str, needed: str, held: list[str], fits: bool) -> None:
    here.made(f"{vendor} 1").probe(devices=1, needed=[needed], architectures=held)
    here.holds(("torch-runs", "", {}, OK if fits else HURTS, "…" if fits else f"…no kernels for {needed}…"))


@pytest.mark.parametrize(
    ("vendor", "environment", "left", "fix"),
    [
        *(("nvidia", {CUDA: value}, left, f"unset {CUDA}") for value, left in (
            ("", []), ("-1", []), ("0,1,7,2", [0, 1]), ("1,1", []), ("0,,1", [0]), ("GPU-9", []))),
        ("amd", {HIP: "4"}, [], f"unset {HIP}"),
        ("amd", {ROCR: "2,3", HIP: "2,3"}, [], f"unset {HIP}"),
        ("amd", {CUDA: "0,1", HIP: "2,3"}, [2, 3], f"unset {CUDA}"),
        ("nvidia", {}, [0, 1, 2, 3], ""),
        ("nvidia", {CUDA: "3, 1"}, [3, 1], ""),
        ("nvidia", {CUDA: "GPU-20000000"}, [2], ""),
        ("nvidia", {CUDA: "MIG-0123"}, [0, 1, 2, 3], ""),
        ("amd", {HIP: "1", CUDA: "1"}, [1], ""),
        ("amd", {ROCR: "2,3", HIP: "1"}, [3], ""),
        ("amd", {CUDA: "0,2"}, [0, 2], ""),
    ],
)  # fmt: skip
def test_visible_devices(here: MadeUp, vendor: str, environment: dict[str, str], left: list[int], fix: str) -> None:
    here.made(f"{vendor} 4").environment |= environment
    assert [gpu.index for gpu in here.survey().visible] == left
    here.holds(("visible-devices", "", {}, HURTS if fix else OK, "…", fix))


def test_a_mistake_that_hides_all_gpus_hides_no_findings(here: MadeUp) -> None:
    here.nvidia(4).change({CUDA: "4", "hw_slowdown>Not Active": "hw_slowdown>Active"}).probe(devices=0, needed=[])
    assert here.ids(HURTS) == ["visible-devices", "gpu-clocks"]


def test_selection_of_nothing(here: MadeUp) -> None:
    assert select({CUDA: "0"}, "", ()).gpus == ()
    assert Survey(here.machine()).visible == ()
