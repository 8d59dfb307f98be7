"""The decisions of a start as one list: what was derived or measured, and what holds because nothing spoke against it.

Reads a resolved config; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.config import EngineConfig
from headrace.graph_sizes import capture_sizes
from headrace.planner.record import Decision

ORDER = (
    "device", "tensor_parallel_size", "attention_backend", "dtype", "quantization", "kv_cache_dtype", "block_size",
    "num_gpu_blocks", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "mixed_step_tokens", "enable_chunked_prefill", "enable_prefix_caching", "async_scheduling", "cudagraph_mode",
    "cudagraph_capture_sizes",
)  # fmt: skip
"""as `headrace plan` lists them; others come after these"""
WHY = {
    "block_size": "little is left over in last blocks; speed hardly depends on it",
    "gpu_memory_utilization": "weights, steps, graphs and cache together; the rest is for others and for surprises",
    "enable_chunked_prefill": "a long prompt delays running requests by one step at most",
    "enable_prefix_caching": "prompts that start alike share blocks; a miss costs nothing",
    "async_scheduling": "the host plans a step while the one before it runs",
}
"""of what stands where nobody asks for another value, in plans too"""


def one_list(config: EngineConfig, decisions: Iterable[Decision]) -> list[Decision]:
    """Each field once, with its last word, and those that nobody decided on filled in."""
    found = {entry.field: entry for entry in decisions}
    for entry in _standing(config):
        found.setdefault(entry.field, entry)
    place = {name: number for number, name in enumerate(ORDER)}
    return sorted(found.values(), key=lambda entry: place.get(entry.field, len(place)))


def _standing(config: EngineConfig) -> Iterable[Decision]:
    usual = EngineConfig()
    size = config.tensor_parallel_size
    if size == 1:
        yield Decision("tensor_parallel_size", 1, "what is used where nothing else is given; `headrace plan` compares")
    else:
        yield Decision("tensor_parallel_size", size, "given", source="user")
    if config.quantization is None:
        yield Decision("quantization", None, "weights stay as the checkpoint holds them")
    for name, why in WHY.items():
        if name == "gpu_memory_utilization" and config.device == "cpu":
            continue  # bounds nothing there
        value = getattr(config, name)
        if value == getattr(usual, name):
            yield Decision(name, value, why)
        else:
            yield Decision(name, value, "given", source="user")
    yield _graph_sizes(config)


def _graph_sizes(config: EngineConfig) -> Decision:
    field, graphs = "cudagraph_capture_sizes", config.compilation_config
    if graphs.get("cudagraph_mode", "NONE") == "NONE":
        return Decision(field, [], "no graphs")
    if given := graphs.get(field):
        return Decision(field, given, "given", source="user")
    seqs = config.max_num_seqs or 1
    sizes = [size for size in capture_sizes(seqs) if size <= (graphs.get("max_cudagraph_capture_size") or seqs)]
    if not sizes:
        return Decision(field, [], "max_cudagraph_capture_size leaves none", source="user")
    return Decision(field, sizes, f"decode steps of up to {sizes[-1]} requests, each captured when it comes up again")
