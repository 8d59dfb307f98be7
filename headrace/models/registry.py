"""The model families: which class serves an architecture, what its config.json leaves unsaid, and what it cannot do.

Imports no torch: planner, server and the command line read this table too. A family is one line of `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headrace.attention.spec import AttentionSpec
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.layers.moe_spec import ExpertNames, MoeSpec
from headrace.model_config import ModelConfig
from headrace.quantization.table import resolve_format

Windows = Callable[[ModelConfig], tuple[int | None, ...]]
"""-> each layer's sliding window: the keys a query may look back on, itself included; None: all"""

Experts = Callable[[ModelConfig], MoeSpec]


@dataclass(frozen=True)
class ModelEntry:
    architecture: str
    module: str
    class_name: str
    windows: Windows
    qkv_bias: bool | None = None
    """None here and below: as config.json's `attention_bias` says"""
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    """None: as config.json's `mlp_bias` says"""
    qk_norm: bool = False
    needs: tuple[str, ...] = ()
    """fields that config.json must hold, because the family's default for them is not the usual one"""
    moe: Experts | None = None
    """None: every layer is dense"""

    def reasons(self, config: ModelConfig) -> list[str]:
        """Why this model cannot be served: field, value and what is accepted. Empty: it can."""
        missing = [f"`{name}` is missing" for name in self.needs if config.raw.get(name) is None]
        sparse = _moe_reasons(config, self.moe(config)) if self.moe and not missing else []
        return [*missing, *_shape_reasons(config), *sparse, *_rope_reasons(config), *_feature_reasons(config)]


def no_window(config: ModelConfig) -> tuple[int | None, ...]:
    return (None,) * config.num_layers


def same_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Mistral's rule: `sliding_window` on every layer (4096 where the field is absent, none where it is null)."""
    window = config.sliding_window if "sliding_window" in config.raw else 4096
    return (window,) * config.num_layers


def upper_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types` if given, else the layers from `max_window_layers` (28) on; only with
    `use_sliding_window`."""
    raw = config.raw
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(config.num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def raw_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Mixtral's rule: `sliding_window` on every layer, none where the field is absent."""
    return (config.sliding_window,) * config.num_layers


def switched_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen3-MoE's rule: `sliding_window` (4096) on every layer, only with `use_sliding_window`."""
    raw = config.raw
    return (raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None,) * config.num_layers


def alternate_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen2-MoE's rule: `layer_types` if given, else every other layer below `max_window_layers` (28), from the first;
    only with `use_sliding_window`."""
    raw = config.raw
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    below = raw.get("max_window_layers", 28)
    usual = ["sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in range(config.num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in raw.get("layer_types") or usual)


def mixtral_experts(config: ModelConfig) -> MoeSpec:
    return MoeSpec(
        num_experts=config.raw["num_local_experts"],
        top_k=config.raw["num_experts_per_tok"],
        intermediate_size=config.intermediate_size,
        renormalize=True,
        sparse=(True,) * config.num_layers,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )


def qwen_experts(config: ModelConfig) -> MoeSpec:
    """Every `decoder_sparse_step`-th layer but `mlp_only_layers`. transformers 5 writes `num_local_experts`."""
    raw = config.raw
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return MoeSpec(
        num_experts=raw.get("num_experts") or raw.get("num_local_experts") or 0,
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        renormalize=bool(raw.get("norm_topk_prob", False)),
        sparse=tuple(step > 0 and (i + 1) % step == 0 and i not in dense for i in range(config.num_layers)),
    )


def qwen_experts_and_shared(config: ModelConfig) -> MoeSpec:
    return replace(qwen_experts(config), shared_intermediate_size=config.raw["shared_expert_intermediate_size"])


LLAMA = ("headrace.models.llama", "LlamaForCausalLM")

MODELS = (
    ModelEntry("LlamaForCausalLM", *LLAMA, no_window),
    ModelEntry(
        "MistralForCausalLM",
        *LLAMA,
        same_window,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        needs=("num_key_value_heads",),
    ),
    ModelEntry(
        "Qwen2ForCausalLM",
        *LLAMA,
        upper_window,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        needs=("num_key_value_heads",),
    ),
    ModelEntry(
        "Qwen3ForCausalLM",
        *LLAMA,
        upper_window,
        mlp_bias=False,
        qk_norm=True,
        needs=("num_key_value_heads", "head_dim"),
    ),
    ModelEntry(
        "MixtralForCausalLM",
        *LLAMA,
        raw_window,
        qkv_bias=False,
        o_bias=False,
        needs=("num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
        moe=mixtral_experts,
    ),
    ModelEntry(
        "Qwen2MoeForCausalLM",
        *LLAMA,
        alternate_window,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        needs=(
            "num_key_value_heads",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        moe=qwen_experts_and_shared,
    ),
    ModelEntry(
        "Qwen3MoeForCausalLM",
        *LLAMA,
        switched_window,
        mlp_bias=False,
        qk_norm=True,
        needs=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"),
        moe=qwen_experts,
    ),
)

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
"""rope_type -> the fields it cannot do without"""


def resolve(config: ModelConfig) -> ModelEntry:
    """The entry that serves `config`. Raises UnsupportedModelError naming what is supported: of architectures, of one
    architecture's features, or of weight formats."""
    for entry in MODELS:
        if entry.architecture == config.architecture:
            break
    else:
        supported = ", ".join(entry.architecture for entry in MODELS)
        raise UnsupportedModelError(f"architecture {config.architecture!r} is not supported; supported: {supported}")
    reasons = entry.reasons(config)
    if reasons:
        raise UnsupportedModelError(f"config.json of {config.architecture}: {'; '.join(reasons)}")
    resolve_format(config)
    return entry


def attention_spec(
    config: ModelConfig,
    *,
    tp_size: int,
    block_size: int,
    dtype: str,
    device_type: str,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
) -> AttentionSpec:
    """What attention has to be on one rank of `tp_size`; with a sliding window if any layer has one.

    Raises UnsupportedModelError, and ConfigError where `tp_size` does not divide the heads.
    """
    if config.num_heads % tp_size:
        raise ConfigError(f"tensor_parallel_size {tp_size} does not divide num_attention_heads ({config.num_heads})")
    kv_heads = config.num_kv_heads
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(
            f"tensor_parallel_size {tp_size} must divide num_key_value_heads ({kv_heads}) or be a multiple of it"
        )
    windows = [window for window in resolve(config).windows(config) if window is not None]
    return AttentionSpec(
        num_heads=config.num_heads // tp_size,
        num_kv_heads=max(1, kv_heads // tp_size),
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        block_size=block_size,
        dtype=dtype,
        sliding_window=min(windows, default=None),
        device_type=device_type,
        batch_invariant=batch_invariant,
        kv_cache_dtype=kv_cache_dtype,
    )


def _shape_reasons(config: ModelConfig) -> list[str]:
    reasons = []
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if getattr(config, name) < 1:
            reasons.append(f"`{name}` is {getattr(config, name)}; must be at least 1")
    if config.num_kv_heads > 0 and config.num_heads % config.num_kv_heads:
        reasons.append(
            f"`num_key_value_heads` is {config.num_kv_heads}; must divide num_attention_heads ({config.num_heads})"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        reasons.append(f"`head_dim` is {config.head_dim}; must be even")
    types = config.raw.get("layer_types")
    if types is not None and (len(types) != config.num_layers or set(types) - {"full_attention", "sliding_attention"}):
        reasons.append(
            f"`layer_types` is {types}; must name full_attention or sliding_attention for each of the "
            f"{config.num_layers} layers"
        )
    return reasons


def _moe_reasons(config: ModelConfig, moe: MoeSpec) -> list[str]:
    raw = config.raw
    reasons = []
    if moe.num_experts < 1:
        reasons.append(f"`num_experts` is {moe.num_experts}; must be at least 1")
    elif not 1 <= moe.top_k <= moe.num_experts:
        reasons.append(f"`num_experts_per_tok` is {moe.top_k}; must be in [1, {moe.num_experts}]")
    if moe.intermediate_size < 1:
        reasons.append(f"`moe_intermediate_size` is {moe.intermediate_size}; must be at least 1")
    if "shared_expert_intermediate_size" in raw and moe.shared_intermediate_size < 1:
        reasons.append(f"`shared_expert_intermediate_size` is {moe.shared_intermediate_size}; must be at least 1")
    if raw.get("decoder_sparse_step", 1) < 1:
        reasons.append(f"`decoder_sparse_step` is {raw['decoder_sparse_step']}; must be at least 1")
    if raw.get("qkv_bias", True) is not True:
        reasons.append(f"`qkv_bias` is {raw['qkv_bias']}; accepted: true")
    return reasons


def _rope_reasons(config: ModelConfig) -> list[str]:
    parameters: dict[str, Any] = config.raw.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        return ["`rope_parameters` differs between layers; accepted: one set for all"]
    reasons = []
    partial = config.raw.get("partial_rotary_factor", parameters.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        reasons.append(f"`partial_rotary_factor` is {partial}; accepted: 1.0")
    scaling = config.rope_scaling or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_FIELDS:
        return [*reasons, f"rope type is {rope_type!r}; accepted: {', '.join(ROPE_FIELDS)}"]
    missing = [name for name in ROPE_FIELDS[rope_type] if not scaling.get(name)]
    if missing:
        reasons.append(f"`rope_scaling` of type {rope_type} lacks {', '.join(missing)}")
    return reasons


def _feature_reasons(config: ModelConfig) -> list[str]:
    reasons = []
    if config.hidden_act not in ("silu", "swish"):
        reasons.append(f"`hidden_act` is {config.hidden_act!r}; accepted: silu")
    if config.dtype not in ("float16", "bfloat16", "float32"):
        reasons.append(f"`dtype` is {config.dtype!r}; accepted: float16, bfloat16, float32")
    return reasons
