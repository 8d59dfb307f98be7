"""What the device of this process is and can do. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Platform:
    device_type: str
    """cuda (also on AMD, as torch has it) or cpu"""
    vendor: str
    """nvidia, amd or cpu"""
    name: str
    arch: str
    """sm_90, gfx942, ...; empty on a CPU"""
    multiprocessors: int
    triton: bool
    """Triton can be used here"""


def detect(device: torch.device) -> Platform:
    has_triton = find_spec("triton") is not None
    if device.type == "cpu":
        return Platform("cpu", "cpu", "CPU", "", 0, False)
    facts = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        arch = facts.gcnArchName.split(":")[0]
        return Platform("cuda", "amd", facts.name, arch, facts.multi_processor_count, has_triton)
    return Platform(
        "cuda", "nvidia", facts.name, f"sm_{facts.major}{facts.minor}", facts.multi_processor_count, has_triton
    )
