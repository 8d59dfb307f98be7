"""Checks what lies between GPUs, and between them and the host: links, PCIe width, IOMMU, ACS, InfiniBand."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, Severity, ok, unknown
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.survey import PCI, Survey

ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x04 | 0x08
"""Request and completion redirect: peer traffic goes up to the root complex and down again."""
BRIDGE_CLASS = "0x0604"


def check_links(survey: Survey) -> Iterator[Finding]:
    if not survey.several:
        return
    if not survey.links:
        yield unknown(survey.link_problem)
        return
    links = survey.links
    indices = [gpu.index for gpu in survey.checked_gpus]
    fast = {pair for pair, kind in links.items() if kind.startswith("NV") or kind == "XGMI"}
    kinds = sorted(set(links.values()))
    if len(fast) == len(links):
        weak = _weakest(links, indices) if survey.vendor == "nvidia" else None
        if weak is not None:
            own = sorted({kind for (one, _), kind in links.items() if one == weak})
            yield survey.finding("links-down", gpu=weak, own=", ".join(own), most=kinds[-1])
        else:
            yield ok(f"{' and '.join(kinds)} between all {len(indices)} GPUs")
        return
    islands = _islands(indices, fast)
    if fast:
        text = " and ".join("{" + ",".join(map(str, island)) + "}" for island in islands)
        largest: list[int] = max(islands, key=len)
        slow = sorted({kind for pair, kind in links.items() if pair not in fast})
        yield survey.finding("links-islands", islands=text, slow=", ".join(slow), largest=",".join(map(str, largest)))
    else:
        lost = survey.vendor == "amd" and "Instinct MI3" in survey.checked_gpus[0].name
        yield survey.finding("links-lost" if lost else "links-none", kinds=", ".join(kinds))


def _weakest(links: dict[tuple[int, int], str], indices: list[int]) -> int | None:
    """The GPU with fewer NVLinks than others have; None if all have as many, as in a mesh of uneven pairs."""
    lanes = {own: sum(int(kind[2:]) for (one, _), kind in links.items() if one == own) for own in indices}
    return min(indices, key=lambda index: lanes[index]) if len(set(lanes.values())) > 1 else None


def _islands(indices: list[int], pairs: set[tuple[int, int]]) -> list[list[int]]:
    """GPUs that reach each other over fast links, each island sorted."""
    islands: list[set[int]] = []
    for index in indices:
        near = {index} | {other for own, other in pairs if own == index}
        touching = [island for island in islands if island & near]
        islands = [island for island in islands if island not in touching] + [near.union(*touching)]
    return sorted(sorted(island) for island in islands)


def check_width(survey: Survey) -> Iterator[Finding]:
    known = [gpu for gpu in survey.checked_gpus if gpu.link_width]
    narrow = [gpu for gpu in known if gpu.link_width and gpu.link_width[0] < gpu.link_width[1]]
    if narrow:
        parts = [f"GPU {gpu.index}: x{gpu.link_width[0]} of x{gpu.link_width[1]}" for gpu in narrow if gpu.link_width]
        yield survey.finding("pcie-narrow", seen="; ".join(parts), bus_id=narrow[0].bus_id)
    elif known and known[0].link_width:
        yield ok(f"PCIe x{known[0].link_width[0]}, all there is")


def check_iommu(survey: Survey) -> Iterator[Finding]:
    if not survey.checked_gpus:
        return
    machine = survey.machine
    modes = {machine.read_or(f"{PCI}/{gpu.bus_id}/iommu_group/type") for gpu in survey.checked_gpus} - {""}
    if any(mode.startswith("DMA") for mode in modes):
        if not survey.several:
            yield ok("the IOMMU translates, which costs a single GPU little")
            return
        severity = Severity.NOTE if survey.vendor == "nvidia" and survey.fast_links else Severity.HURTS
        yield survey.finding("iommu-translates", severity)
    elif modes:
        yield ok(f"the IOMMU passes the GPUs through ({', '.join(sorted(modes))})")
    elif not machine.names("/sys/kernel/iommu_groups"):
        yield ok("no IOMMU is active")
    elif {"iommu=pt", "iommu.passthrough=1"} & set(machine.read_or("/proc/cmdline").split()):
        yield ok("the kernel was started with iommu=pt")
    else:
        yield unknown(f"no {PCI}/{survey.checked_gpus[0].bus_id}/iommu_group/type")


def check_acs(survey: Survey) -> Iterator[Finding]:
    """Access control on the bridges above the GPUs sends peer traffic through the root complex."""
    if not survey.several:
        return
    if survey.virtual:
        yield ok("in a virtual machine: the hypervisor's concern")
        return
    machine = survey.machine
    bridges = sorted({name for gpu in survey.checked_gpus for name in _bridges_above(machine, gpu.bus_id)})
    states = {name: _acs_control(machine, name) for name in bridges}
    redirecting = [name for name, control in states.items() if control and control & ACS_REDIRECT]
    if redirecting:
        severity = Severity.NOTE if survey.fast_links else Severity.HURTS
        traffic = "GPU and network card" if survey.fast_links else "GPUs"
        count = f"{len(redirecting)} PCIe bridge{'s' if len(redirecting) > 1 else ''}"
        yield survey.finding("acs-redirects", severity, bridges=count, traffic=traffic, names=" ".join(redirecting))
    elif not bridges or None in states.values():
        what = "PCIe extended configuration space is for root" if bridges else "no PCIe bridge above the GPUs in sysfs"
        yield unknown(what)
    else:
        yield ok(f"no redirection on the {len(bridges)} PCIe bridges above the GPUs")


def _bridges_above(machine: Machine, bus_id: str) -> list[str]:
    parts = machine.path(f"{PCI}/{bus_id}").resolve().parts
    above = [part for part in parts if re.fullmatch(r"[\da-f]{4}:[\da-f]{2}:[\da-f]{2}\.\d", part) and part != bus_id]
    return [name for name in above if machine.read_or(f"{PCI}/{name}/class").startswith(BRIDGE_CLASS)]


def _acs_control(machine: Machine, bus_id: str) -> int | None:
    """The control register of a bridge's ACS capability; 0 without that capability, None if it cannot be read."""
    try:
        space = machine.path(f"{PCI}/{bus_id}/config").read_bytes()
    except OSError:
        return None
    if len(space) <= 256:
        return None  # what others than root get
    offset, seen = 0x100, 0
    while 0x100 <= offset <= len(space) - 8 and seen < 64:
        (header,) = struct.unpack_from("<I", space, offset)
        if header & 0xFFFF == ACS_CAPABILITY:
            return int(struct.unpack_from("<H", space, offset + 6)[0])
        offset, seen = header >> 20, seen + 1
    return 0


def check_infiniband(survey: Survey) -> Iterator[Finding]:
    machine = survey.machine
    states = {}
    for device in machine.names(INFINIBAND):
        for port in machine.names(f"{INFINIBAND}/{device}/ports"):
            try:
                # "4: ACTIVE"
                state = machine.read(f"{INFINIBAND}/{device}/ports/{port}/state").rpartition(" ")[2]
            except Unreadable as error:
                yield unknown(str(error))
                return
            states[f"{device}:{port}"] = state
    down = [name for name, state in states.items() if state != "ACTIVE"]
    if down:
        yield survey.finding("infiniband-down", ports=", ".join(down), state=states[down[0]])
    elif states:
        first = next(iter(states))
        device, _, port = first.partition(":")
        rate = machine.read_or(f"{INFINIBAND}/{device}/ports/{port}/rate")
        yield ok(f"{len(states)} active port{'s' if len(states) > 1 else ''}, {rate}")
