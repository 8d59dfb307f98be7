"""What the two engines that a plan may be for can do: which attention backend serves, what they cannot run, and why.

headrace's half is read from its own tables; vLLM's is what its documentation says of version 0.26. Knows no speeds.
"""

from __future__ import annotations

from typing import Any

from headrace.attention.spec import AttentionSpec
from headrace.attention.table import BACKENDS, select_backend
from headrace.errors import UnsupportedModelError
from headrace.model_config import ModelConfig
from headrace.model_spec import Mixer
from headrace.models.registry import SERVED, resolve, served_entry
from headrace.planner.chips import Chip
from headrace.planner.cost import Parallel
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape
from headrace.quantization.formats import MADE_AT_LOAD

GRAPHS_OF = {entry.name: entry.full_graphs for entry in BACKENDS} | {
    "TRITON_ATTN": "any",
    "ROCM_AITER_UNIFIED_ATTN": "any",
    "ROCM_ATTN": "any",
}
"""backend -> steps whose attention may be inside a whole graph, as attention/table.py says it"""
AITER_HEAD_DIMS = (64, 128, 256)
"""that ROCM_AITER_FA has kernels for"""


def model_gaps(raw: dict[str, Any], quantization: str | None) -> list[str]:
    """Why headrace cannot serve the model of that config.json in that format; empty: it can."""
    names = raw.get("architectures") or ["unknown"]
    if served_entry(names[0]) is None:
        return [f"headrace has no {names[0]} yet; it has {', '.join(SERVED)}"]
    try:
        resolve(ModelConfig.from_dict(raw))
    except UnsupportedModelError as error:
        return [f"headrace: {error}"]
    if quantization is not None and quantization not in MADE_AT_LOAD:
        made = " or ".join(MADE_AT_LOAD)
        return [f"headrace reads no {quantization} checkpoints yet; it rounds plain ones to {made} at load"]
    return []


def layout_gaps(parallel: Parallel) -> list[str]:
    """Why headrace cannot spread a model like that yet; empty: it can. Replicas are servers of their own."""
    gaps = []
    if parallel.pp > 1:
        gaps.append(f"headrace has no pipeline parallelism yet (pipeline_parallel_size {parallel.pp})")
    if parallel.ep:
        gaps.append("headrace has no expert parallelism yet; its experts are split over tensor-parallel ranks")
    if parallel.dp_attention:
        gaps.append(f"headrace has no data-parallel attention yet (data_parallel_size {parallel.dp})")
    return gaps


def attention_backend(
    engine: str, shape: ModelShape, chip: Chip, tp: int, dtype: str, kv_dtype: str, block_size: int, given: str | None
) -> Decision:
    """Which kernels run attention. Raises ConfigError where `given` cannot."""
    if given is not None and engine == "vllm":
        return Decision("attention_backend", given.upper(), "given", source="user")
    if engine == "headrace":
        return _headrace_backend(shape, chip, tp, dtype, kv_dtype, block_size, given)
    if chip.vendor == "amd":
        return _rocm_backend(shape)
    return _cuda_backend(shape, chip)


def default_block_size(engine: str, shape: ModelShape, chip: Chip) -> int:
    """Tokens of a block; an index that chooses keys one by one has blocks of its own size in vLLM."""
    if engine == "vllm" and _widest(shape).sparse_top_k:
        return 1 if chip.vendor == "amd" else 64
    return 16


def _headrace_backend(
    shape: ModelShape, chip: Chip, tp: int, dtype: str, kv_dtype: str, block_size: int, given: str | None
) -> Decision:
    attention = _widest(shape)
    if attention.kind != "gqa" or not attention.causal:
        kind = attention.kind if attention.causal else "attention to later tokens"
        return Decision("attention_backend", "none", f"headrace has none for {kind} yet")
    spec = AttentionSpec(
        num_heads=max(1, attention.num_heads // tp),
        num_kv_heads=max(1, attention.num_kv_heads // tp),
        head_dim=attention.head_dim,
        scale=attention.head_dim**-0.5,
        block_size=block_size,
        dtype=dtype,
        sliding_window=_window(shape),
        device_type="cpu" if chip.vendor == "cpu" else "cuda",
        kv_cache_dtype=kv_dtype,
    )
    chosen = select_backend([spec], given)
    source = "derived" if given is None else "user"
    return Decision("attention_backend", chosen.name, chosen.why, "; ".join(chosen.passed_over), source)


def _rocm_backend(shape: ModelShape) -> Decision:
    attention = _widest(shape)
    if attention.kind == "mla":
        if attention.sparse_top_k:
            why = "the one ROCm backend that attends to the keys an index chose"
            return Decision("attention_backend", "ROCM_AITER_MLA_SPARSE", why)
        return Decision("attention_backend", "ROCM_AITER_MLA", "AITER's decode over the shared latent", "TRITON_MLA")
    if _window(shape) is not None:
        why = "windows (and sinks) in the same launch as full layers"
        return Decision("attention_backend", "ROCM_AITER_UNIFIED_ATTN", why, "TRITON_ATTN")
    if attention.head_dim in AITER_HEAD_DIMS:
        why = "AITER's separate paths for decodes, chunks and prompts"
        return Decision("attention_backend", "ROCM_AITER_FA", why, "ROCM_ATTN")
    why = f"AITER has no kernel for head_dim {attention.head_dim}"
    return Decision("attention_backend", "TRITON_ATTN", why)


def _cuda_backend(shape: ModelShape, chip: Chip) -> Decision:
    if chip.vendor == "cpu":
        return Decision("attention_backend", "CPU_ATTN", "the CPU's only one")
    return Decision(
        "attention_backend", "auto", f"vLLM orders its backends by compute capability; {chip.arch} needs no help"
    )


def _widest(shape: ModelShape) -> Mixer:
    """Of the layers whose cache grows, the kind that caches most; all are alike in most models."""
    return max((group.mixer for group in shape.groups), key=lambda attention: attention.cached_values)


def _window(shape: ModelShape) -> int | None:
    return min((group.mixer.window for group in shape.groups if group.mixer.window is not None), default=None)
