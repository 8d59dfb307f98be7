"""Checks what lies between GPUs, and between them and the host: links, PCIe width, IOMMU, ACS, InfiniBand."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, Severity, hurts, note, ok, unknown
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.survey import PCI, Survey

ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x04 | 0x08
"""Request and completion redirect: peer traffic goes up to the root complex and down again."""
BRIDGE_CLASS = "0x0604"
IOMMU_FIX = "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot"


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
    tool = "nvidia-smi topo -m" if survey.vendor == "nvidia" else "rocm-smi --showtopo"
    if len(fast) == len(links):
        weak = _weakest(links, indices) if survey.vendor == "nvidia" else None
        if weak is not None:
            own = sorted({kind for (one, _), kind in links.items() if one == weak})
            yield hurts(
                f"GPU {weak} reaches the others over {', '.join(own)}, where {kinds[-1]} would be whole",
                "Links are down, and every all-reduce waits for the slowest GPU.",
                f"nvidia-smi nvlink -s -i {weak}  # which; then reset the GPU, or call the vendor",
            )
        else:
            yield ok(f"{' and '.join(kinds)} between all {len(indices)} GPUs")
        return
    islands = _islands(indices, fast)
    if fast:
        text = " and ".join("{" + ",".join(map(str, island)) + "}" for island in islands)
        variable = "CUDA_VISIBLE_DEVICES" if survey.vendor == "nvidia" else "HIP_VISIBLE_DEVICES"
        largest: list[int] = max(islands, key=len)
        slow = sorted({kind for pair, kind in links.items() if pair not in fast})
        yield note(
            f"fast links join only {text}; between them {', '.join(slow)}",
            "A tensor-parallel group across islands runs at the speed of PCIe.",
            f"export {variable}={','.join(map(str, largest))}  # one server for each island",
        )
    elif survey.vendor == "amd" and "Instinct MI3" in survey.checked_gpus[0].name:
        cost = "These GPUs ship fully connected: all-reduces now go over PCIe."
        yield hurts(f"no Infinity Fabric between GPUs ({', '.join(kinds)})", cost, f"{tool}; dmesg | grep -i xgmi")
    else:
        cost = (
            "Tensor parallelism's all-reduces go over PCIe, tens of GB/s: prefer one GPU a server where a model fits."
        )
        yield note(f"no NVLink or Infinity Fabric between GPUs ({', '.join(kinds)})", cost)


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
        tool = f"sudo lspci -vv -s {narrow[0].bus_id} | grep LnkSta"
        cost = "Weights load, and GPUs without fast links talk, at that share of the speed."
        yield hurts("; ".join(parts), cost, f"{tool}  # then reseat the card or its riser")
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
        cost = "Peer traffic over PCIe goes through the CPU's IOMMU: slower, and on some servers it hangs."
        yield Finding(
            severity, "the IOMMU translates the GPUs' addresses (no iommu=pt)", cost, survey.on_host(IOMMU_FIX)
        )
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
        fix = f"for b in {' '.join(redirecting)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done"
        yield Finding(
            severity,
            f"ACS redirects peer traffic on {len(redirecting)} PCIe bridge{'s' if len(redirecting) > 1 else ''}",
            f"What passes between {traffic} over PCIe goes up to the CPU and back.",
            survey.on_host(fix),
        )
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
        cost = "Between nodes NCCL does without them, or falls back to TCP. One node alone is not concerned."
        yield note(f"{', '.join(down)} not active ({states[down[0]]})", cost, "ibstat")
    elif states:
        first = next(iter(states))
        device, _, port = first.partition(":")
        rate = machine.read_or(f"{INFINIBAND}/{device}/ports/{port}/rate")
        yield ok(f"{len(states)} active port{'s' if len(states) > 1 else ''}, {rate}")
