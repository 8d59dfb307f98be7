"""Lists the GPUs that headrace plans for, with the memory, rates and links that the vendor publishes, and detects those
of this machine.

Their figures stand in chips.json: rates are dense (no sparsity), the bandwidth of links is one direction, memory is
what programs see of it. How much of a rate is reached is not said there, but in efficiencies.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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


def _read(row: dict[str, Any]) -> Chip:
    tflops, gib = row.pop("tflops"), row.pop("memory_gib")
    return Chip(memory_bytes=int(gib * GIB), flops={name: rate * 1e12 for name, rate in tflops.items()}, **row)


DATA = Path(__file__).with_name("chips.json")
CHIPS: dict[str, Chip] = {chip.name: chip for chip in map(_read, json.loads(DATA.read_text(encoding="utf-8")))}
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
