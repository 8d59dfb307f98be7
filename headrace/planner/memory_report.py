"""A started engine's memory, part by part: what was predicted from shapes, and what the device reports.

Puts the two side by side; counts and measures nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.planner.memory_map import MemoryMap
from headrace.step import WorkerFacts

GIB = 1 << 30
PARTS = ("weights", "tables", "activations", "graphs", "libraries", "left for the KV cache")


@dataclass(frozen=True)
class Part:
    name: str
    predicted: int | None
    """bytes; None: the planner does not know this chip or model"""
    reported: int | None
    """bytes; None: not measured here"""

    def __str__(self) -> str:
        said = (None if size is None else f"{size / GIB:.2f}" for size in (self.predicted, self.reported))
        return f"{self.name} {' / '.join(size or '?' for size in said)}"


@dataclass(frozen=True)
class MemoryReport:
    """Of the rank with the least room."""

    device: str
    total: int
    usable: int
    """the engine's share of it"""
    parts: tuple[Part, ...]
    kv_bytes_per_token: Part
    kv_cache: int
    """bytes allocated: what is left, or what is useful of it"""

    def __str__(self) -> str:
        parts = ", ".join(str(part) for part in self.parts if part.reported is not None)
        cache = f"the KV cache took {self.kv_cache / GIB:.2f}"
        return f"memory of {self.device} in GiB, predicted / reported: {parts}; {cache}"


def report_memory(
    config: EngineConfig, predicted: MemoryMap | None, facts: list[WorkerFacts], num_pages: int
) -> MemoryReport | None:
    """None: no rank has said anything."""
    if not facts:
        return None
    fact = min(facts, key=lambda fact: fact.available_kv_memory)
    reported = {
        "weights": fact.weight_bytes,
        "tables": fact.table_bytes,
        "activations": fact.step_bytes,
        "graphs": fact.graph_bytes,
        "libraries": fact.library_bytes,
        "left for the KV cache": fact.available_kv_memory,
    }
    if not fact.step_bytes:  # a CPU's memory belongs to everybody, and is not profiled
        reported = {"weights": fact.weight_bytes}
    guesses, per_token = _guesses(predicted), fact.layout.bytes_per_token
    return MemoryReport(
        device=fact.device_name,
        total=fact.total_memory,
        usable=int(fact.total_memory * config.gpu_memory_utilization) if fact.device != "cpu" else fact.total_memory,
        parts=tuple(Part(name, guesses.get(name), reported.get(name)) for name in PARTS),
        kv_bytes_per_token=Part("KV cache, a token", guesses.get("KV cache, a token"), per_token),
        kv_cache=num_pages * fact.layout.page_bytes,
    )


def _guesses(found: MemoryMap | None) -> dict[str, int]:
    if found is None:
        return {}
    sizes = (found.weight_bytes, found.tables, found.activations, found.graphs, found.reserve, found.kv_pool)
    return {**dict(zip(PARTS, sizes, strict=True)), "KV cache, a token": found.kv_bytes_per_token}
