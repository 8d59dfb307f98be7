"""Lists the GPUs that headrace plans for, with the memory, rates and links that the vendor publishes, and detects those
of this machine.

Rates are dense (no sparsity), the bandwidth of links is one direction, memory is what programs see of it. How much of a
rate is reached is not said here, but in constants.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headrace.errors import ConfigError

GIB = 1 << 30
SAME_MEMORY = 0.03
"""Some tools count what the driver keeps for itself: a total within this share of the data sheet's is the same."""


@dataclass(frozen=True)
class Chip:
    """Describes a kind of GPU, or a CPU."""

    name: str
    title: str
    vendor: str
    """amd, nvidia or cpu"""
    arch: str
    """gfx942, sm_90, x86"""
    memory_bytes: int
    """of one GPU, as programs see it"""
    memory_bandwidth: float
    """bytes/s, data sheet"""
    flops: dict[str, float] = field(hash=False)
    """FLOP/s by number type (bf16, fp16, fp8, int8, fp4); without units for a type, it is absent"""
    link: str
    """what connects the GPUs of a node"""
    link_bandwidth: float
    """bytes/s that one GPU sends over all its links together"""
    network_bandwidth: float
    """bytes/s between nodes, for each GPU"""
    gpus_per_node: int
    source: str
    """where these figures are published"""

    @property
    def device_type(self) -> str:
        """As torch names it."""
        return "cpu" if self.vendor == "cpu" else "cuda"


def _rates(bf16: float, **others: float) -> dict[str, float]:
    """FLOP/s by number type, from TFLOP/s."""
    return {name: rate * 1e12 for name, rate in {"bf16": bf16, "fp16": bf16, **others}.items()}


CDNA3 = _rates(1307.4, fp8=2614.9, int8=2614.9)
HOPPER = _rates(989.4, fp8=1978.9, int8=1978.9)
NIC_400 = 50e9
"""bytes/s of one adapter of 400 Gb/s for each GPU, as in the vendors' own systems."""
NIC_200 = 25e9


def _gpu(
    name: str, title: str, arch: str, gib: float, bandwidth: float, flops: dict[str, float], link: str, joined: float,
    source: str, network: float = NIC_400,
) -> Chip:  # fmt: skip
    vendor = "amd" if arch.startswith("gfx") else "nvidia"
    return Chip(
        name, f"{vendor.upper()} {title}", vendor, arch, int(gib * GIB), bandwidth, flops, link, joined, network, 8,
        f"https://www.{vendor}.com/{source}",
    )  # fmt: skip


FABRIC = "Infinity Fabric, a link to each of 7 others"
_ALL = (
    _gpu("mi300x", "Instinct MI300X", "gfx942", 191.98, 5.3e12, CDNA3, FABRIC, 448e9,
         "en/products/accelerators/instinct/mi300/mi300x.html"),
    _gpu("mi325x", "Instinct MI325X", "gfx942", 255.98, 6.0e12, CDNA3, FABRIC, 448e9,
         "en/products/accelerators/instinct/mi300/mi325x.html"),
    _gpu("mi350x", "Instinct MI350X", "gfx950", 287.98, 8.0e12, _rates(2306.9, fp8=4613.7, int8=4613.7, fp4=9227.5),
         FABRIC, 537.6e9, "en/products/accelerators/instinct/mi350/mi350x.html"),
    _gpu("mi355x", "Instinct MI355X", "gfx950", 287.98, 8.0e12, _rates(2516.6, fp8=5033.2, int8=5033.2, fp4=10066.3),
         FABRIC, 537.6e9, "en/products/accelerators/instinct/mi350/mi355x.html"),
    _gpu("h100", "H100 SXM", "sm_90", 79.18, 3.35e12, HOPPER, "NVLink 4", 450e9, "en-us/data-center/h100/"),
    _gpu("h200", "H200 SXM", "sm_90", 139.80, 4.8e12, HOPPER, "NVLink 4", 450e9, "en-us/data-center/h200/"),
    _gpu("b200", "B200 SXM", "sm_100", 178.35, 8.0e12, _rates(2250, fp8=4500, int8=4500, fp4=9000), "NVLink 5", 900e9,
         "en-us/data-center/dgx-b200/"),
    _gpu("a100", "A100 80GB SXM", "sm_80", 79.25, 2.039e12, _rates(312, int8=624), "NVLink 3", 300e9,
         "content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf", NIC_200),
    _gpu("l40s", "L40S", "sm_89", 44.40, 864e9, _rates(362.05, fp8=733, int8=733), "PCIe 4.0 x16", 32e9,
         "en-us/data-center/l40s/", NIC_200),
    Chip("cpu", "a server CPU (Xeon Platinum 8480+, one socket, 512 GiB)", "cpu", "x86", 512 * GIB, 307e9,
         _rates(114.7, int8=229.4), "none", 16e9, NIC_200, 1,
         "https://www.intel.com/content/www/us/en/products/sku/231746.html"),
)  # fmt: skip

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}
OTHER_PRODUCTS = {"h100": ("pcie", "nvl"), "h200": ("nvl",), "a100": ("pcie", "40gb")}
"""Words in a driver's name of a GPU that mean another, slower or smaller product than the one above."""


def find_chip(name: str, memory_bytes: int | None = None) -> Chip:
    """Find the chip of a name as people or drivers write it: `MI300X`, `amd-mi300x`, `NVIDIA H100 80GB HBM3`.

    `memory_bytes` is what a tool reports, 0 where it does not say; a partition of a GPU keeps that. Raises ConfigError
    with the known names.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    chip = next((CHIPS[word] for word in words if word in CHIPS), None)
    if chip is None:
        raise ConfigError(
            f"gpu {name!r} is unknown; choose from {', '.join(CHIPS)}, or auto for what is in this machine"
        )
    if other := next((word for word in OTHER_PRODUCTS.get(chip.name, ()) if word in words), None):
        raise ConfigError(
            f"gpu {name!r} ({other}) has other rates than the {chip.title}, and they are not known here; "
            f"--gpu {chip.name} plans for that one"
        )
    if not memory_bytes or abs(memory_bytes / chip.memory_bytes - 1) <= SAME_MEMORY:
        return chip
    return replace(chip, memory_bytes=memory_bytes, title=f"{chip.title}, {memory_bytes / GIB:.0f} GiB of it")


def this_cpu(memory_bytes: int) -> Chip:
    """Return this machine's CPU, with the rates of the one in CHIPS."""
    return replace(CHIPS["cpu"], title="the CPU of this machine", memory_bytes=memory_bytes)


Run = Callable[[list[str]], str]
"""Runs a command and returns its output, "" where it could not run."""


def run_tool(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def read_gpus(run: Run = run_tool) -> list[tuple[str, int]]:
    """Ask nvidia-smi or rocm-smi for (name, bytes of memory or 0 where that is not reported) of each GPU."""
    listed = run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    gpus = re.findall(r"^(.+), *(\d+|\[.*\])\s*$", listed, re.MULTILINE)
    if gpus:
        return [(name, int(mib) << 20 if mib.isdigit() else 0) for name, mib in gpus]
    return _read_rocm(run(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"]))


def _read_rocm(listed: str) -> list[tuple[str, int]]:
    try:
        cards = json.loads(listed[listed.index("{") :])
    except ValueError:
        return []
    gpus = []
    for card in cards.values():
        total = str(card.get("VRAM Total Memory (B)", "")) if isinstance(card, dict) else ""
        if total:
            names = (str(card.get(key, "")) for key in ("Card Series", "Card series", "Card Model", "Card model"))
            gpus.append((" ".join(names), int(total) if total.isdigit() else 0))
    return gpus


def this_machine(run: Run = run_tool) -> tuple[Chip, int]:
    """Find this machine's chip and how many there are, which is what `--gpu auto` means; without GPUs, one CPU.

    Raises ConfigError for a GPU that is not in CHIPS, and for GPUs of several kinds.
    """
    gpus = read_gpus(run)
    if not gpus:
        return this_cpu(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 1
    chips = {find_chip(name, memory) for name, memory in gpus}
    if len({chip.name for chip in chips}) > 1:
        kinds = ", ".join(sorted(chip.title for chip in chips))
        raise ConfigError(f"gpu auto: this machine has GPUs of several kinds ({kinds}); name the one to plan for")
    return min(chips, key=lambda chip: chip.memory_bytes), len(gpus)
