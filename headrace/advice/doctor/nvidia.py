"""Reads NVIDIA's GPUs from what `nvidia-smi -q -x` and `nvidia-smi topo -m` print.

The XML form has names that stay over the years and leaves out what a driver does not know, where the CSV form refuses
the whole query.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from xml.etree import ElementTree

from headrace.advice.doctor.gpu import Gpu, Holder
from headrace.advice.doctor.machine import Unreadable

SLOWDOWNS = {
    "hw_thermal_slowdown": "too hot",
    "sw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake of the server",
    "hw_slowdown": "hardware slowdown",
}
MIB = 1024**2


@dataclass(frozen=True)
class NvidiaReport:
    """Holds what `nvidia-smi -q -x` tells."""

    driver: str
    cuda: tuple[int, int] | None
    """The newest CUDA that the driver speaks."""
    gpus: tuple[Gpu, ...]


def parse_report(xml: str) -> NvidiaReport:
    """Return what the XML tells. Raises Unreadable."""
    try:
        # The document names a DTD that is never fetched; the text comes from the driver's own tool.
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise Unreadable(f"nvidia-smi -q -x: {error}") from None
    cuda = re.fullmatch(r"(\d+)\.(\d+)", root.findtext("cuda_version", "").strip())
    return NvidiaReport(
        root.findtext("driver_version", "").strip(),
        (int(cuda[1]), int(cuda[2])) if cuda else None,
        tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu"))),
    )


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    def text(path: str) -> str:
        return (node.findtext(path) or "").strip()

    power = "gpu_power_readings" if node.find("gpu_power_readings") is not None else "power_readings"
    now, most = (_number(text(f"pci/pci_gpu_link_info/link_widths/{name}_link_width")) for name in ("current", "max"))
    persistence = text("persistence_mode")
    return Gpu(
        index=index,
        name=text("product_name"),
        # 00000000:61:00.0 here, 0000:61:00.0 in sysfs
        bus_id=node.get("id", "").lower()[-12:],
        uuid=text("uuid"),
        memory_total=_memory(text("fb_memory_usage/total")),
        memory_used=_memory(text("fb_memory_usage/used")),
        holders=tuple(
            Holder(
                int(process.findtext("pid") or 0),
                (process.findtext("process_name") or "").strip(),
                _memory(process.findtext("used_memory") or ""),
            )
            for process in node.findall("processes/process_info")
            # "G" draws on a screen
            if "C" in (process.findtext("type") or "C")
        ),
        persistence={"Enabled": True, "Disabled": False}.get(persistence),
        power_limit=_number(text(f"{power}/current_power_limit") or text(f"{power}/enforced_power_limit")),
        power_default=_number(text(f"{power}/default_power_limit")),
        slowed_by=_slowdowns(node),
        faults=_faults(text),
        compute_mode=text("compute_mode"),
        mig=text("mig_mode/current_mig") == "Enabled",
        slices=tuple(
            _memory(part.findtext("fb_memory_usage/total") or "") for part in node.findall("mig_devices/mig_device")
        ),
        link_width=(int(now), int(most)) if now and most else None,
    )


def _slowdowns(node: ElementTree.Element) -> tuple[str, ...]:
    active: list[str] = []
    # The list was called clocks_throttle_reasons until 2023.
    for kind in ("clocks_event_reason", "clocks_throttle_reason"):
        for reason, words in SLOWDOWNS.items():
            if (node.findtext(f"{kind}s/{kind}_{reason}") or "").strip() == "Active" and words not in active:
                active.append(words)
    return tuple(active)


def _faults(text: Callable[[str], str]) -> tuple[str, ...]:
    faults = []
    if text("remapped_rows/remapped_row_pending") == "Yes":
        faults.append("a memory row waits to be remapped")
    if text("remapped_rows/remapped_row_failure") == "Yes":
        faults.append("a memory row could not be remapped")
    if text("gpu_reset_status/reset_required") == "Yes":
        faults.append("the driver asks for a reset")
    if text("gpu_recovery_action") not in ("", "None", "N/A"):
        faults.append(f"the driver asks for: {text('gpu_recovery_action').lower()}")
    if (errors := _number(text("ecc_errors/volatile/dram_uncorrectable"))) and errors > 0:
        faults.append(f"{errors:.0f} memory errors since the last reset")
    if text("fabric/state") not in ("", "N/A", "Completed"):
        faults.append(f"NVLink fabric: {text('fabric/state').lower()}")
    return tuple(faults)


def _number(text: str) -> float | None:
    """`300.00 W`, `16x`, `97887 MiB`; None for `N/A`."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else None


def _memory(text: str) -> int:
    return int((_number(text) or 0) * MIB)


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Return the kind of link for each pair of GPUs: NV18, PIX, PXB, PHB, NODE or SYS. Raises Unreadable."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    heads = next((row for row in rows if row[:1] == ["GPU0"]), [])
    columns = [int(name[3:]) for name in heads if re.fullmatch(r"GPU\d+", name)]
    links: dict[tuple[int, int], str] = {}
    for row in rows:
        if row and row is not heads and re.fullmatch(r"GPU\d+", row[0]) and len(row) > len(columns):
            own = int(row[0][3:])
            links |= {(own, other): kind for other, kind in zip(columns, row[1:], strict=False) if other != own}
    if not links:
        raise Unreadable("nvidia-smi topo -m has no matrix of GPUs")
    return links
