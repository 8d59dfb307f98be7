"""Says what headrace and vLLM can do: which models and layouts headrace lacks, and what vLLM uses where.

headrace's half is read from its own tables; vLLM's is what its documentation says of version 0.26.
"""

from __future__ import annotations

from typing import Any

from headrace.attention.table import BACKENDS
from headrace.config import EngineConfig
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.mixers import Mixer
from headrace.model_config import ModelConfig
from headrace.models.registry import SERVED, served_entry
from headrace.models.served import resolve
from headrace.planner.chips import Chip
from headrace.planner.graphs import decide_graphs
from headrace.planner.parallel import Parallel
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape
from headrace.quantization.table import resolve_format

FULL_GRAPHS: dict[str, str] = {
    **{entry.name: entry.full_graphs for entry in BACKENDS},
    **dict.fromkeys(("TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_ATTN"), "any"),
}
"""Attention backend -> which whole steps may be one graph with it, in the words of attention/table.py."""
AITER_HEAD_DIMS = (64, 128, 256)
"""Head sizes for which ROCM_AITER_FA has kernels."""


def model_gaps(raw: dict[str, Any], asked: str | None = None) -> list[str]:
    """Say why headrace cannot serve the model of a raw config.json, with --quantization `asked`; empty: it can."""
    name = _architecture(raw)
    if served_entry(name) is None:
        return [f"headrace has no {name} yet; it has {', '.join(SERVED)}"]
    try:
        config = served_config(raw)
        resolve(config)
        resolve_format(config, asked)
    except (UnsupportedModelError, ConfigError) as error:
        return [f"headrace: {error}"]
    return []


def served_config(raw: dict[str, Any]) -> ModelConfig:
    """Read a raw config.json of an architecture that headrace has. Raises UnsupportedModelError, and ConfigError."""
    entry = served_entry(_architecture(raw))
    return ModelConfig.from_dict(raw, defaults={} if entry is None else entry.defaults)


def _architecture(raw: dict[str, Any]) -> str:
    return (raw.get("architectures") or ["unknown"])[0]


def layout_gaps(parallel: Parallel, chip: Chip) -> list[str]:
    """Say why headrace cannot use the layout yet; empty: it can. Replicas are servers of their own."""
    gaps = []
    together = parallel.gpus // parallel.replicas
    if parallel.dp_attention and together > chip.gpus_per_node:
        gaps.append(f"headrace's engines that share experts run on one machine yet, and {together} GPUs are on several")
    if parallel.dp_attention and not parallel.ep:
        gaps.append("headrace's data-parallel engines share whole experts alone (enable_expert_parallel)")
    return gaps


def default_block_size(engine: str, shape: ModelShape, chip: Chip) -> int:
    """Return the tokens of a block. In vLLM an index that chooses keys one by one has a block size of its own."""
    if engine == "vllm" and widest_mixer(shape).sparse_top_k:
        return 1 if chip.vendor == "amd" else 64
    return 16


def graph_decision(request: PlanRequest, chip: Chip, backend: str) -> Decision:
    """Decide on cudagraph_mode by the rules that serving itself follows."""
    config = EngineConfig(compilation_config=request.compilation_config, enforce_eager=request.enforce_eager)
    return decide_graphs(config, chip.device_type, backend, FULL_GRAPHS.get(backend, "decode"))[1][0]


def vllm_backend(shape: ModelShape, chip: Chip) -> Decision:
    """Decide which attention backend vLLM should use."""
    attention, field = widest_mixer(shape), "attention_backend"
    if chip.vendor == "cpu":
        return Decision(field, "CPU_ATTN", "the CPU's only one")
    if chip.vendor != "amd":
        why = f"vLLM orders its backends by compute capability; {chip.arch} needs no help"
        return Decision(field, "auto", why)
    if attention.kind == "mla":
        if attention.sparse_top_k:
            why = "the one ROCm backend that attends to the keys an index chose"
            return Decision(field, "ROCM_AITER_MLA_SPARSE", why)
        return Decision(field, "ROCM_AITER_MLA", "AITER's decode over the shared latent", "TRITON_MLA")
    if smallest_window(shape) is not None:
        why = "windows (and sinks) in the same launch as full layers"
        return Decision(field, "ROCM_AITER_UNIFIED_ATTN", why, "TRITON_ATTN")
    if attention.head_dim in AITER_HEAD_DIMS:
        why = "AITER's separate paths for decodes, chunks and prompts"
        return Decision(field, "ROCM_AITER_FA", why, "ROCM_ATTN")
    return Decision(field, "TRITON_ATTN", f"AITER has no kernel for head_dim {attention.head_dim}")


def widest_mixer(shape: ModelShape) -> Mixer:
    """Find the token mixer that caches most for a token; all are alike in most models."""
    return max((group.mixer for group in shape.groups), key=lambda mixer: mixer.cached_values)


def smallest_window(shape: ModelShape) -> int | None:
    return min((group.mixer.window for group in shape.groups if group.mixer.window is not None), default=None)
