"""Checks what lies between GPUs, and between them and the host: links, PCIe width, IOMMU, InfiniBand."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, Severity, ok, unknown
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.survey import PCI, Survey


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
