"""Links between GPUs, PCIe width, IOMMU, InfiniBand."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.machine import Unreadable
from tests.advice.doctor.made_up import PCI, Case, MadeUp, showtopo, topo, topo_matrix

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
ISLANDS = [
    ["X" if own == other else "NV18" if own // 2 == other // 2 else "SYS" for other in range(4)] for own in range(4)
]
WEAK = [["X" if own == other else "NV16" if 2 in (own, other) else "NV18" for other in range(4)] for own in range(4)]
MESH = [["X", "NV1", "NV2", "NV2"], ["NV1", "X", "NV2", "NV2"], ["NV2", "NV2", "X", "NV1"], ["NV2", "NV2", "NV1", "X"]]
TOPO, SHOWTOPO = "nvidia-smi topo -m", "rocm-smi --showtopo"
GROUP = f"{PCI}/0000:61:00.0/iommu_group/type"
PORTS = "/sys/class/infiniband/mlx5_{}/ports/1/{}"
ACTIVE = {
    PORTS.format(device, name): text
    for device in (0, 1)
    for name, text in (("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n"))
}
CASES: list[Case] = [
    ("gpu-links", "nvidia 8", {}, OK, "NV18 between all 8 GPUs"),
    ("gpu-links", "nvidia 4", {TOPO: topo_matrix(MESH)}, OK, "NV1 and NV2 between all 4 GPUs"),
    ("gpu-links", "nvidia 4", {TOPO: topo_matrix(WEAK)}, HURTS,
     "GPU 2 reaches the others over NV16, where NV18 would be whole", "nvidia-smi nvlink -s -i 2…"),
    ("gpu-links", "nvidia 4", {TOPO: topo_matrix(ISLANDS)}, NOTE,
     "fast links join only {0,1} and {2,3}; between them SYS",
     "export CUDA_VISIBLE_DEVICES=0,1  # one server for each island"),
    # Whoever uses one island has no trouble.
    ("gpu-links", "nvidia 4", {TOPO: topo_matrix(ISLANDS), "CUDA_VISIBLE_DEVICES": "2,3"}, OK,
     "NV18 between all 2 GPUs"),
    ("gpu-links", "nvidia 2", {TOPO: topo(2, "PHB")}, NOTE, "no NVLink or Infinity Fabric between GPUs (PHB)"),
    ("gpu-links", "amd 4", {}, OK, "XGMI between all 4 GPUs"),
    ("gpu-links", "amd 4", {SHOWTOPO: showtopo(4, "PCIE")}, HURTS),
    ("gpu-links", "amd 4", {SHOWTOPO: Unreadable("no rocm-smi in PATH")}, UNKNOWN, "no rocm-smi in PATH"),
    ("gpu-links", "nvidia 1", {}, None),
    ("pcie-width", "nvidia", {}, OK, "PCIe x16, all there is"),
    ("pcie-width", "nvidia", {"<current_link_width>16x": "<current_link_width>8x"}, HURTS, "GPU 0: x8 of x16",
     "sudo lspci -vv -s 0000:61:00.0…"),
    ("pcie-width", "amd", {f"{PCI}/0000:06:00.0/current_link_width": "4\n"}, HURTS, "GPU 1: x4 of x16"),
    ("iommu", "nvidia", {}, OK),
    ("iommu", "amd", {}, OK),
    *(("iommu", machine, {GROUP.replace("61", bus): "DMA-FQ\n" for bus in buses} | links, severity, "…",
       "…iommu=pt…update-grub…") for machine, buses, links, severity in (
           ("nvidia", ("61", "62"), {}, NOTE), ("nvidia", ("61", "62"), {TOPO: topo(2, "SYS")}, HURTS),
           ("amd", ("05", "06"), {}, HURTS))),
    ("iommu", "nvidia 1", {GROUP: "DMA"}, OK),
    ("iommu", "nvidia 1", {GROUP: None}, UNKNOWN),
    ("iommu", "nvidia 1", {GROUP: None, "/proc/cmdline": "root=/dev/sda1 amd_iommu=on iommu=pt\n"}, OK,
     "the kernel was started with iommu=pt"),
    ("iommu", "nvidia 1", {GROUP: None, "/sys/kernel/iommu_groups/0/type": None}, OK, "no IOMMU is active"),
    ("infiniband", "nvidia", {}, None),
    ("infiniband", "nvidia", ACTIVE, OK, "2 active ports, 400 Gb/sec (4X NDR)"),
    ("infiniband", "nvidia", ACTIVE | {PORTS.format(1, "state"): "1: DOWN\n"}, NOTE, "mlx5_1:1 not active (DOWN)",
     "ibstat"),
    ("infiniband", "nvidia", {PORTS.format(1, "rate"): ""}, UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)
