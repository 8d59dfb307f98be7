"""The GPUs that headrace plans for: memory, rates and links, each as the vendor publishes it.

Facts only; nothing here knows a model or how much of a rate is reached. Rates are dense (no sparsity); a bandwidth of links is
one direction. `measured` holds what we measured ourselves on such a GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    name: str
    title: str
    vendor: str
    """amd, nvidia or cpu"""
    arch: str
    """gfx942, sm_90, x86"""
    memory_bytes: int
    """of one GPU, as its driver reports it"""
    memory_bandwidth: float
    """bytes/s, data sheet"""
    flops: dict[str, float] = field(hash=False)
    """FLOP/s by bf16, fp16, fp8, int8, fp4; absent: no units for it"""
    link: str
    """what joins the GPUs of a node"""
    link_bandwidth: float
    """bytes/s that one GPU sends over all its links together"""
    network_bandwidth: float
    """bytes/s between nodes for each GPU"""
    gpus_per_node: int
    source: str
    """where the facts stand"""
    measured: dict[str, float] = field(default_factory=dict, hash=False)
    """read_bandwidth and copy_bandwidth in bytes/s, bf16_flops and fp8_flops in FLOP/s, where we measured them"""


_ALL = (
    Chip(
        name="mi300x",
        title="AMD Instinct MI300X",
        vendor="amd",
        arch="gfx942",
        memory_bytes=206_141_652_992,
        memory_bandwidth=5.3e12,
        flops={"bf16": 1307.4e12, "fp16": 1307.4e12, "fp8": 2614.9e12, "int8": 2614.9e12},
        link="Infinity Fabric, 7 links",
        link_bandwidth=448e9,
        network_bandwidth=50e9,
        gpus_per_node=8,
        source="https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf",
    ),
    Chip(
        name="h200",
        title="NVIDIA H200",
        vendor="nvidia",
        arch="sm_90",
        memory_bytes=143_771 * MIB,
        memory_bandwidth=4.8e12,
        flops={"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12},
        link="NVLink 4",
        link_bandwidth=450e9,
        network_bandwidth=50e9,
        gpus_per_node=8,
        source="https://www.nvidia.com/en-us/data-center/h200/",
        measured={
            "copy_bandwidth": 4.28e12,
            "read_bandwidth": 4.4e12,
            "bf16_flops": 700e12,
            "fp8_flops": 1240e12,
            "bf16_flops_short": 800e12,
            "fp8_flops_short": 1475e12,
        },
    ),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}


def find_chip(name: str) -> Chip:
    """The chip of that name, as `mi300x`, `MI300X`, `amd-mi300x` or `NVIDIA H200`. Raises ConfigError with the names."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    for word in words:
        if word in CHIPS:
            return CHIPS[word]
    raise ConfigError(f"gpu {name!r} is unknown; choose from {', '.join(CHIPS)}, or auto for the GPUs of this machine")
