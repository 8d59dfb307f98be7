"""Links between GPUs, PCIe width, IOMMU, ACS, InfiniBand."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.machine import Unreadable
from tests.advice.doctor.made_up import PCI, MadeUp, showtopo, topo, topo_matrix

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
ISLANDS = [
    ["X" if own == other else "NV18" if own // 2 == other // 2 else "SYS" for other in range(4)] for own in range(4)
]
WEAK = [["X" if own == other else "NV16" if 2 in (own, other) else "NV18" for other in range(4)] for own in range(4)]
MESH = [["X", "NV1", "NV2", "NV2"], ["NV1", "X", "NV2", "NV2"], ["NV2", "NV2", "X", "NV1"], ["NV2", "NV2", "NV1", "X"]]


def test_nvlink_everywhere(here: MadeUp) -> None:
    assert here.nvidia(8).finding("gpu-links").seen == "NV18 between all 8 GPUs"


def test_a_mesh_of_uneven_pairs_is_whole(here: MadeUp) -> None:
    here.nvidia(4).commands["nvidia-smi topo -m"] = topo_matrix(MESH)
    assert here.finding("gpu-links").seen == "NV1 and NV2 between all 4 GPUs"


def test_links_that_are_down(here: MadeUp) -> None:
    here.nvidia(4).commands["nvidia-smi topo -m"] = topo_matrix(WEAK)
    finding = here.finding("gpu-links")
    assert (finding.severity, finding.seen) == (HURTS, "GPU 2 reaches the others over NV16, where NV18 would be whole")
    assert finding.fix.startswith("nvidia-smi nvlink -s -i 2")


def test_islands(here: MadeUp) -> None:
    here.nvidia(4).commands["nvidia-smi topo -m"] = topo_matrix(ISLANDS)
    finding = here.finding("gpu-links")
    assert (finding.severity, finding.seen) == (NOTE, "fast links join only {0,1} and {2,3}; between them SYS")
    assert finding.fix == "export CUDA_VISIBLE_DEVICES=0,1  # one server for each island"
    # Whoever uses one island has no trouble.
    here.environment["CUDA_VISIBLE_DEVICES"] = "2,3"
    assert here.finding("gpu-links").seen == "NV18 between all 2 GPUs"


def test_pcie_alone(here: MadeUp) -> None:
    here.nvidia(2).commands["nvidia-smi topo -m"] = topo(2, "PHB")
    finding = here.finding("gpu-links")
    assert (finding.severity, finding.seen) == (NOTE, "no NVLink or Infinity Fabric between GPUs (PHB)")


def test_infinity_fabric(here: MadeUp) -> None:
    here.amd(4)
    assert here.finding("gpu-links").seen == "XGMI between all 4 GPUs"
    here.commands["rocm-smi --showtopo"] = showtopo(4, "PCIE")
    assert here.finding("gpu-links").severity is HURTS


def test_links_that_nobody_tells(here: MadeUp) -> None:
    here.amd(4).commands["rocm-smi --showtopo"] = Unreadable("no rocm-smi in PATH")
    finding = here.finding("gpu-links")
    assert (finding.severity, finding.seen) == (UNKNOWN, "no rocm-smi in PATH")


def test_one_gpu_needs_no_links(here: MadeUp) -> None:
    assert not {"gpu-links", "acs"} & {finding.id for finding in here.nvidia(1).findings()}


def test_pcie_width(here: MadeUp) -> None:
    here.nvidia()
    assert here.finding("pcie-width").seen == "PCIe x16, all there is"
    here.gpu_xml("<current_link_width>16x", "<current_link_width>8x")
    finding = here.finding("pcie-width")
    assert (finding.severity, finding.seen) == (HURTS, "GPU 0: x8 of x16")
    assert finding.fix.startswith("sudo lspci -vv -s 0000:61:00.0")


def test_pcie_width_of_amd(here: MadeUp) -> None:
    here.amd().write(f"{PCI}/0000:06:00.0/current_link_width", "4\n")
    assert here.finding("pcie-width").seen == "GPU 1: x4 of x16"


@pytest.mark.parametrize(
    ("vendor", "kind", "severity"), [("nvidia", "NV18", NOTE), ("nvidia", "SYS", HURTS), ("amd", "XGMI", HURTS)]
)
def test_an_iommu_that_translates(here: MadeUp, vendor: str, kind: str, severity: Severity) -> None:
    getattr(here, vendor)()
    if vendor == "nvidia":
        here.commands["nvidia-smi topo -m"] = topo(2, kind)
    assert here.finding("iommu").severity is OK
    for gpu in here.survey().gpus:
        here.write(f"{PCI}/{gpu.bus_id}/iommu_group/type", "DMA-FQ\n")
    finding = here.finding("iommu")
    assert finding.severity is severity
    assert "iommu=pt" in finding.fix
    assert "update-grub" in finding.fix


def test_an_iommu_that_does_no_harm(here: MadeUp) -> None:
    here.nvidia(1).write(f"{PCI}/0000:61:00.0/iommu_group/type", "DMA")
    assert here.finding("iommu").severity is OK
    here.remove(f"{PCI}/0000:61:00.0/iommu_group/type")
    assert here.finding("iommu").severity is UNKNOWN
    here.write("/proc/cmdline", "root=/dev/sda1 amd_iommu=on iommu=pt\n")
    assert here.finding("iommu").seen == "the kernel was started with iommu=pt"
    here.remove("/sys/kernel/iommu_groups/0/type")
    (here.root / "sys/kernel/iommu_groups/0").rmdir()
    assert here.finding("iommu").seen == "no IOMMU is active"


@pytest.mark.parametrize(("kind", "severity"), [("PHB", HURTS), ("NV18", NOTE)])
def test_acs(here: MadeUp, kind: str, severity: Severity) -> None:
    here.nvidia().commands["nvidia-smi topo -m"] = topo(2, kind)
    assert here.finding("acs").seen == "no redirection on the 2 PCIe bridges above the GPUs"
    # Source validation, request and completion redirect, upstream forwarding.
    here.bridge("0000:60:01.0", acs=0x1D)
    finding = here.finding("acs")
    assert (finding.severity, finding.seen) == (severity, "ACS redirects peer traffic on 1 PCIe bridge")
    assert finding.fix == "for b in 0000:60:01.0; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done"


def test_acs_of_two_bridges_in_a_row(here: MadeUp) -> None:
    here.nvidia(1)
    root_port = here.bridge("0000:00:01.0", acs=0x4, under="/sys/devices/pci0000:00")
    switch = here.bridge("0000:01:00.0", acs=0, under=root_port)
    (here.root / f"{PCI}/0000:61:00.0".lstrip("/")).unlink()
    here.on_bus("0000:61:00.0", "nvidia", switch)
    here.commands["nvidia-smi -q -x"] = here.nvidia(2).commands["nvidia-smi -q -x"]
    assert "0000:00:01.0" in here.finding("acs").fix


def test_acs_that_only_root_may_read(here: MadeUp) -> None:
    here.nvidia().bridge("0000:60:00.0", acs=None)
    finding = here.finding("acs")
    assert (finding.severity, finding.seen) == (UNKNOWN, "PCIe extended configuration space is for root")
    here.write("/proc/cpuinfo", "flags\t\t: fpu hypervisor sse4_2\n")
    assert here.finding("acs").severity is OK


def test_infiniband(here: MadeUp) -> None:
    assert "infiniband" not in [finding.id for finding in here.nvidia().findings()]
    for device in ("mlx5_0", "mlx5_1"):
        here.write(f"/sys/class/infiniband/{device}/ports/1/state", "4: ACTIVE\n")
        here.write(f"/sys/class/infiniband/{device}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    assert here.finding("infiniband").seen == "2 active ports, 400 Gb/sec (4X NDR)"
    here.write("/sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n")
    finding = here.finding("infiniband")
    assert (finding.severity, finding.seen, finding.fix) == (NOTE, "mlx5_1:1 not active (DOWN)", "ibstat")
    here.remove("/sys/class/infiniband/mlx5_1/ports/1/state")
    assert here.finding("infiniband").severity is UNKNOWN
