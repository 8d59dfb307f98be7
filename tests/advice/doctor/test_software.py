"""Driver, torch's build, torch in its own process, and visible devices."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.selection import select
from headrace.advice.doctor.survey import Survey
from tests.advice.doctor.made_up import CPU_TORCH, CUDA_TORCH, PCI, ROCM_TORCH, MadeUp, nvidia_xml

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN


def test_no_gpu_is_no_trouble(here: MadeUp) -> None:
    finding = here.finding("driver")
    assert (finding.severity, finding.seen) == (OK, "no GPU on the PCI bus: headrace runs on the CPU")


def test_drivers_that_work(here: MadeUp) -> None:
    assert here.nvidia().finding("driver").seen == "NVIDIA driver 580.65.06 drives 2 x NVIDIA H200"


def on_bus(here: MadeUp, vendor: str, driver: str = "") -> None:
    here.write(f"{PCI}/0000:61:00.0/vendor", {"nvidia": "0x10de", "amd": "0x1002"}[vendor])
    here.write(f"{PCI}/0000:61:00.0/class", "0x030200")
    if driver:
        here.write(f"/sys/bus/pci/drivers/{driver}/bind", "")
        (here.root / f"{PCI}/0000:61:00.0/driver".lstrip("/")).symlink_to(here.root / f"sys/bus/pci/drivers/{driver}")


@pytest.mark.parametrize(
    ("vendor", "driver", "container", "seen", "fix"),
    [
        ("nvidia", "", False, "1 NVIDIA GPU on the PCI bus, without a driver", "sudo apt install nvidia-driver"),
        (
            "nvidia",
            "nouveau",
            False,
            "1 NVIDIA GPU on the PCI bus, driven by nouveau",
            "sudo apt install nvidia-driver",
        ),
        ("nvidia", "nvidia", True, "but no nvidia-smi in PATH", "docker run --gpus all"),
        ("nvidia", "nvidia", False, "but no nvidia-smi in PATH", "sudo nvidia-smi"),
        ("amd", "", False, "1 AMD GPU on the PCI bus, without the amdgpu driver", "sudo modprobe amdgpu"),
        ("amd", "amdgpu", True, "but ROCm's driver shows none", "docker run --device=/dev/kfd"),
    ],
)
def test_gpus_that_nothing_drives(here: MadeUp, vendor: str, driver: str, container: bool, seen: str, fix: str) -> None:
    on_bus(here, vendor, driver)
    if container:
        here.write("/.dockerenv", "")
    finding = here.finding("driver")
    assert finding.severity is HURTS
    assert seen in finding.seen
    assert finding.fix.startswith(fix)


def test_a_driver_that_does_not_answer(here: MadeUp) -> None:
    on_bus(here, "nvidia", "nvidia")
    here.commands["nvidia-smi -q -x"] = Unreadable("nvidia-smi did not answer within 20 s")
    assert "did not answer within 20 s" in here.finding("driver").seen


def test_a_driver_whose_gpu_is_gone(here: MadeUp) -> None:
    here.commands["nvidia-smi -q -x"] = Unreadable("nvidia-smi ended with code 6: No devices were found")
    finding = here.finding("driver")
    assert finding.severity is HURTS
    assert "code 6: No devices were found" in finding.seen


def test_device_files_of_amd(here: MadeUp) -> None:
    here.amd()
    assert here.finding("device-files").severity is OK
    here.closed = {"/dev/kfd"}
    finding = here.finding("device-files")
    assert (finding.severity, finding.seen) == (HURTS, "/dev/kfd may not be opened")
    assert finding.fix == "sudo usermod -aG render,video $USER  # then log in again"
    here.write("/.dockerenv", "")
    assert "--group-add render" in here.finding("device-files").fix


def test_device_files_that_a_container_was_not_given(here: MadeUp) -> None:
    here.amd(1)
    here.remove("/dev/dri/renderD128")
    assert here.finding("device-files").seen == "there is no render node in /dev/dri"


@pytest.mark.parametrize(
    ("vendor", "torch", "driver", "seen", "fix"),
    [
        ("nvidia", CPU_TORCH, ("580.65.06", "13.0"), "torch 2.11.0+cpu (CPU) beside an NVIDIA GPU", "whl/cu130"),
        ("nvidia", ROCM_TORCH, ("535.54.03", "12.2"), "(ROCm 7.2.53211) beside an NVIDIA GPU", "whl/cu126"),
        ("nvidia", CUDA_TORCH, ("535.54.03", "12.2"), "but driver 535.54.03 knows CUDA up to 12.2", "whl/cu126"),
        ("amd", CUDA_TORCH, None, "(CUDA 13.0) beside an AMD GPU", "whl/rocm7.2"),
        ("amd", ROCM_TORCH.replace("2.11.0", "2.9.1"), None, "torch 2.9.1+rocm7.2", "pip install 'torch>=2.11'"),
    ],
)
def test_torch_builds_that_do_not_fit(
    here: MadeUp, vendor: str, torch: str, driver: tuple[str, str] | None, seen: str, fix: str
) -> None:
    getattr(here, vendor)()
    if driver:
        here.commands["nvidia-smi -q -x"] = nvidia_xml(2, *driver)
    here.packages["torch/version.py"] = torch
    finding = here.finding("torch-build")
    assert finding.severity is HURTS
    assert seen in finding.seen
    assert fix in finding.fix


def test_torch_builds_that_fit(here: MadeUp) -> None:
    assert here.finding("torch-build").seen == "torch 2.11.0+cpu (CPU)"
    here.nvidia()
    # Within a major version an older driver runs a newer CUDA.
    here.commands["nvidia-smi -q -x"] = nvidia_xml(2, "590.44.01", "13.1")
    assert here.finding("torch-build").severity is OK
    here.packages["torch/version.py"] = CUDA_TORCH.replace("13.0", "13.2")
    assert here.finding("torch-build").severity is OK


def test_no_torch(here: MadeUp) -> None:
    here.packages.clear()
    finding = here.finding("torch-build")
    assert (finding.severity, finding.seen) == (HURTS, "torch is not installed")
    assert "torch-runs" not in [finding.id for finding in here.findings()]


def test_torch_that_does_not_load(here: MadeUp) -> None:
    import sys

    here.commands[sys.executable] = Unreadable("python ended with code 1: OSError: libcudart.so.13: cannot open")
    finding = here.finding("torch-runs")
    assert finding.severity is HURTS
    assert "libcudart.so.13" in finding.seen
    here.commands[sys.executable] = "nothing of use"
    assert here.finding("torch-runs").severity is UNKNOWN


def test_torch_that_finds_no_gpu(here: MadeUp) -> None:
    here.nvidia().probe(devices=0, needed=[], error="Error 803: system has unsupported display driver")
    finding = here.finding("torch-runs")
    assert (finding.severity, finding.seen) == (
        HURTS,
        "torch finds no GPU: Error 803: system has unsupported display driver",
    )
    assert "torch.cuda.init()" in finding.fix
    here.probe(devices=2, needed=[], error="Error 802: system not yet initialized")
    assert here.finding("torch-runs").fix == "sudo systemctl restart nvidia-fabricmanager"


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
    getattr(here, vendor)(1)
    here.probe(devices=1, needed=[needed], architectures=held)
    finding = here.finding("torch-runs")
    assert finding.severity is (OK if fits else HURTS)
    assert fits or f"no kernels for {needed}" in finding.seen


def test_torch_counts_other_devices_and_loads_slowly(here: MadeUp) -> None:
    here.nvidia().probe(devices=1, needed=["sm_90"])
    finding = here.finding("torch-runs")
    assert (finding.severity, finding.seen) == (NOTE, "torch counts 1 device where 2 should be visible")
    here.probe(devices=2, seconds=48.2)
    finding = here.finding("torch-runs")
    assert (finding.severity, finding.seen) == (NOTE, "import torch takes 48 s")


@pytest.mark.parametrize(
    ("vendor", "environment", "left", "seen", "fix"),
    [
        ("nvidia", {"CUDA_VISIBLE_DEVICES": ""}, [], "set but empty", "unset CUDA_VISIBLE_DEVICES"),
        (
            "nvidia",
            {"CUDA_VISIBLE_DEVICES": "-1"},
            [],
            "'-1' names no GPU (there is 0-3)",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "0,1,7,2"}, [0, 1], "'7' names no GPU", "export CUDA_VISIBLE_DEVICES=0,1"),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "1,1"}, [], "names a GPU twice", "export CUDA_VISIBLE_DEVICES=1"),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "0,,1"}, [0], "'an empty entry'", "export CUDA_VISIBLE_DEVICES=0"),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-9"}, [], "'GPU-9' names no GPU", "unset CUDA_VISIBLE_DEVICES"),
        ("amd", {"HIP_VISIBLE_DEVICES": "4"}, [], "HIP_VISIBLE_DEVICES=4", "unset HIP_VISIBLE_DEVICES"),
        (
            "amd",
            {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2,3"},
            [],
            "HIP_VISIBLE_DEVICES=2,3: '2' names no GPU (there is 0-1)",
            "unset HIP_VISIBLE_DEVICES",
        ),
        (
            "amd",
            {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2,3"},
            [2, 3],
            "CUDA_VISIBLE_DEVICES=0,1 beside HIP_VISIBLE_DEVICES=2,3",
            "unset CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_visible_devices_that_hurt(
    here: MadeUp, vendor: str, environment: dict[str, str], left: list[int], seen: str, fix: str
) -> None:
    getattr(here, vendor)(4)
    here.environment |= environment
    assert [gpu.index for gpu in here.survey().visible] == left
    finding = here.finding("visible-devices")
    assert finding.severity is HURTS
    assert seen in finding.seen
    assert finding.fix == fix


@pytest.mark.parametrize(
    ("vendor", "environment", "left"),
    [
        ("nvidia", {}, [0, 1, 2, 3]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "3, 1"}, [3, 1]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-20000000"}, [2]),
        ("nvidia", {"CUDA_VISIBLE_DEVICES": "MIG-0123"}, [0, 1, 2, 3]),
        ("amd", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ("amd", {"CUDA_VISIBLE_DEVICES": "0,2"}, [0, 2]),
    ],
)
def test_visible_devices_that_are_well(here: MadeUp, vendor: str, environment: dict[str, str], left: list[int]) -> None:
    getattr(here, vendor)(4)
    here.environment |= environment
    assert [gpu.index for gpu in here.survey().visible] == left
    assert here.finding("visible-devices").severity is OK


def test_a_mistake_that_hides_all_gpus_hides_no_findings(here: MadeUp) -> None:
    here.nvidia(4).environment["CUDA_VISIBLE_DEVICES"] = "4"
    here.gpu_xml("hw_slowdown>Not Active", "hw_slowdown>Active")
    here.probe(devices=0, needed=[])
    assert here.ids(HURTS) == ["visible-devices", "gpu-clocks"]


def test_visible_devices_that_are_worth_a_note(here: MadeUp) -> None:
    here.nvidia(4).environment["HIP_VISIBLE_DEVICES"] = "0"
    finding = here.finding("visible-devices")
    assert (finding.severity, finding.seen) == (NOTE, "HIP_VISIBLE_DEVICES=0")
    del here.environment["HIP_VISIBLE_DEVICES"]
    here.gpu_xml("NVIDIA H200", "NVIDIA L40S")
    finding = here.finding("visible-devices")
    assert (finding.severity, finding.fix) == (NOTE, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def test_rocr_chooses_before_hip(here: MadeUp) -> None:
    here.amd(4).environment |= {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}
    finding = here.finding("visible-devices")
    assert (finding.severity, finding.seen) == (NOTE, "ROCR_VISIBLE_DEVICES=2,3 and HIP_VISIBLE_DEVICES=1 leave GPU 3")


def test_selection_of_nothing(here: MadeUp) -> None:
    assert select({"CUDA_VISIBLE_DEVICES": "0"}, "", ()).gpus == ()
    assert Survey(here.machine()).visible == ()
