"""Reads AMD's GPUs from sysfs, as ROCm itself does, and their links from `rocm-smi --showtopo`."""

from __future__ import annotations

import re

from headrace.advice.doctor.gpu import Gpu, Holder
from headrace.advice.doctor.machine import Machine, Unreadable

NODES = "/sys/class/kfd/kfd/topology/nodes"
HOLDERS = "/sys/class/kfd/kfd/proc"
NAMES = {
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X (virtual function)",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""Names by PCI device id, for drivers that give no product_name."""
HOT = 5.0
"""Degrees below the critical temperature at which clocks are already coming down."""


def read_gpus(machine: Machine, processes_of_host: bool = False) -> tuple[Gpu, ...]:
    """Return the GPUs in HIP's order. One that this container may not use cannot be read, and is left out.

    With `processes_of_host` the driver's pids are not those of /proc here, and no process is named.
    """
    nodes = []
    for node in sorted(filter(str.isdigit, machine.names(NODES)), key=int):
        kfd_id = machine.number(f"{NODES}/{node}/gpu_id")
        properties = _properties(machine.read_or(f"{NODES}/{node}/properties"))
        if kfd_id and properties.get("simd_count"):
            nodes.append((kfd_id, properties))
    holders = _holders(machine, named=not processes_of_host)
    return tuple(
        _gpu(machine, index, properties, holders.get(kfd_id, ())) for index, (kfd_id, properties) in enumerate(nodes)
    )


def _properties(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _gpu(machine: Machine, index: int, properties: dict[str, int], holders: tuple[Holder, ...]) -> Gpu:
    # The low half of location_id is bus, device and function; the top tells a GPU's partitions apart.
    place = properties.get("location_id", 0)
    bus_id = f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    device = f"/sys/bus/pci/devices/{bus_id}"
    version = properties.get("gfx_target_version", 0)
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    sensors = [f"{device}/hwmon/{name}" for name in machine.names(f"{device}/hwmon")]
    width = machine.number(f"{device}/current_link_width"), machine.number(f"{device}/max_link_width")
    limit, default = (
        next((watts for folder in sensors if (watts := machine.number(f"{folder}/{name}"))), None)
        for name in ("power1_cap", "power1_cap_default")
    )
    return Gpu(
        index=index,
        name=machine.read_or(f"{device}/product_name") or NAMES.get(properties.get("device_id", 0), f"AMD {arch}"),
        bus_id=bus_id,
        uuid=f"GPU-{properties['unique_id']:016x}" if properties.get("unique_id") else "",
        memory_total=machine.number(f"{device}/mem_info_vram_total") or 0,
        memory_used=machine.number(f"{device}/mem_info_vram_used") or 0,
        holders=holders,
        power_limit=limit / 1e6 if limit else None,
        power_default=default / 1e6 if default else None,
        slowed_by=_heat(machine, sensors),
        compute_partition=machine.read_or(f"{device}/current_compute_partition"),
        memory_partition=machine.read_or(f"{device}/current_memory_partition"),
        link_width=(width[0], width[1]) if width[0] and width[1] else None,
    )


def _heat(machine: Machine, sensors: list[str]) -> tuple[str, ...]:
    for folder in sensors:
        for name in machine.names(folder):
            if match := re.fullmatch(r"temp(\d+)_crit", name):
                # thousandths of a degree
                now, critical = machine.number(f"{folder}/temp{match[1]}_input"), machine.number(f"{folder}/{name}")
                if now and critical and now >= critical - HOT * 1000:
                    label = machine.read_or(f"{folder}/temp{match[1]}_label", "sensor")
                    return (f"{label} at {now / 1000:.0f} of {critical / 1000:.0f} C",)
    return ()


def _holders(machine: Machine, named: bool) -> dict[int, tuple[Holder, ...]]:
    """The driver's id of a GPU -> who holds its memory."""
    holders: dict[int, list[Holder]] = {}
    for pid in filter(str.isdigit, machine.names(HOLDERS)):
        for name in machine.names(f"{HOLDERS}/{pid}"):
            held = machine.number(f"{HOLDERS}/{pid}/{name}") if re.fullmatch(r"vram_\d+", name) else None
            if held:
                command = machine.read_or(f"/proc/{pid}/comm") if named else ""
                holders.setdefault(int(name[5:]), []).append(Holder(int(pid), command, held))
    return {gpu: tuple(held) for gpu, held in holders.items()}


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Return the kind of link for each pair of GPUs, XGMI or PCIE, from `rocm-smi --showtopo`. Raises Unreadable."""
    part = re.search(r"=+ Link Type between two GPUs =+\n(.*?)(?:\n\s*=|\Z)", text, re.DOTALL)
    links: dict[tuple[int, int], str] = {}
    for line in part[1].splitlines() if part else ():
        row = line.split()
        if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not row[1].startswith("GPU"):
            own = int(row[0][3:])
            links |= {(own, other): kind for other, kind in enumerate(row[1:]) if other != own}
    if not links:
        raise Unreadable("rocm-smi --showtopo has no matrix of link types")
    return links
