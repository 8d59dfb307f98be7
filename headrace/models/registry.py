"""The model families: which class serves an architecture, what its config.json leaves unsaid, and what it cannot do.

Imports no torch: planner, server and the command line read this table too. A family is one line of `MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.attention.spec import AttentionSpec
from headrace.errors import ConfigError, UnsupportedModelError
from headrace.layers.moe_spec import ExpertNames, MoeSpec
from headrace.model_config import MOST, Fields, ModelConfig, read_object
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
        """Why this model cannot be served: field, value and what is accepted. Empty: it can. Raises
        UnsupportedModelError for a value that is none of its field."""
        missing = [f"`{name}` is missing" for name in self.needs if config.raw.get(name) is None]
        own = missing or self._own_reasons(config)
        return [*own, *_shape_reasons(config), *_rope_reasons(config), *_feature_reasons(config)]

    def _own_reasons(self, config: ModelConfig) -> list[str]:
        """Windows and experts raise for themselves."""
        self.windows(config)
        if self.moe is None:
            return []
        self.moe(config)
        return [] if config.fields.flag("qkv_bias", True) else ["`qkv_bias` is False; accepted: true"]


def no_window(config: ModelConfig) -> tuple[int | None, ...]:
    return (None,) * config.num_layers


def same_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Mistral's rule: `sliding_window` on every layer (4096 where the field is absent, none where it is null)."""
    return (_window(config.fields),) * config.num_layers


def upper_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen's rule: `layer_types` if given, else the layers from `max_window_layers` (28) on; only with
    `use_sliding_window`."""
    first = config.fields.integer("max_window_layers", 28, minimum=0)
    usual = ["sliding_attention" if i >= first else "full_attention" for i in range(config.num_layers)]
    return _typed_windows(config, usual)


def raw_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Mixtral's rule: `sliding_window` on every layer, none where the field is absent."""
    return (config.fields.optional("sliding_window"),) * config.num_layers


def switched_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen3-MoE's rule: `sliding_window` (4096) on every layer, only with `use_sliding_window`."""
    return (_switched(config.fields),) * config.num_layers


def alternate_window(config: ModelConfig) -> tuple[int | None, ...]:
    """Qwen2-MoE's rule: `layer_types` if given, else every other layer below `max_window_layers` (28), from the first;
    only with `use_sliding_window`."""
    below = config.fields.integer("max_window_layers", 28, minimum=0)
    usual = ["sliding_attention" if i % 2 == 0 and i < below else "full_attention" for i in range(config.num_layers)]
    return _typed_windows(config, usual)


def _window(fields: Fields) -> int | None:
    return fields.optional("sliding_window") if "sliding_window" in fields.values else 4096


def _switched(fields: Fields) -> int | None:
    return _window(fields) if fields.flag("use_sliding_window") else None


def _typed_windows(config: ModelConfig, usual: list[str]) -> tuple[int | None, ...]:
    window = _switched(config.fields)
    return tuple(window if kind == "sliding_attention" else None for kind in _layer_types(config) or usual)


def _layer_types(config: ModelConfig) -> list[str]:
    """One for each layer; empty where config.json names none."""
    types = config.fields.texts("layer_types")
    if types and (len(types) != config.num_layers or {*types} - {"full_attention", "sliding_attention"}):
        raise config.fields.refusal(
            "layer_types", f"full_attention or sliding_attention for each of the {config.num_layers} layers"
        )
    return types


def mixtral_experts(config: ModelConfig) -> MoeSpec:
    experts = config.fields.integer("num_local_experts")
    return MoeSpec(
        num_experts=experts,
        top_k=config.fields.integer("num_experts_per_tok", maximum=experts),
        intermediate_size=config.intermediate_size,
        renormalize=True,
        sparse=(True,) * config.num_layers,
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    )


def qwen_experts(config: ModelConfig) -> MoeSpec:
    """Every `decoder_sparse_step`-th layer but `mlp_only_layers`. transformers 5 writes `num_local_experts`."""
    fields = config.fields
    renamed = fields.values.get("num_experts") is None and "num_local_experts" in fields.values
    experts = fields.integer("num_local_experts" if renamed else "num_experts")
    step, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    return MoeSpec(
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok", maximum=experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob"),
        sparse=tuple((i + 1) % step == 0 and i not in dense for i in range(config.num_layers)),
    )


def qwen_experts_and_shared(config: ModelConfig) -> MoeSpec:
    return replace(
        qwen_experts(config), shared_intermediate_size=config.fields.integer("shared_expert_intermediate_size")
    )


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

SERVED = {entry.architecture: entry for entry in MODELS}
VISION_FIELDS = ("vision_config", "vision_tower", "visual", "image_token_id", "image_token_index")
"""of config.json: any of them is there where a model sees"""

ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
}
"""rope_type -> the fields it cannot do without"""
ROPE_NUMBERS = ("factor", "low_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
"""of any rope type: far enough from 0 and infinity for a logarithm of their quotient"""


def read_served_config(folder: Path) -> ModelConfig:
    """The config of a model's folder, if its architecture is served. That is looked at first: other families have
    other fields, and that one of ours is missing would say nothing.

    Raises UnsupportedModelError, and ModelNotFoundError where a file is missing or cannot be read.
    """
    raw = read_object(folder / "config.json")
    names = Fields(raw, "config.json").texts("architectures")
    if names and names[0] not in SERVED:
        raise _not_served(names[0], raw)
    return ModelConfig.from_folder(folder)


def _not_served(architecture: str, raw: dict[str, Any]) -> UnsupportedModelError:
    """`raw` is config.json."""
    kind = ""
    if any(name in raw for name in VISION_FIELDS):
        kind = "a vision-language model, which is "
    elif "text_config" in raw:
        kind = "a model of more than text, which is "
    return UnsupportedModelError(
        f"architecture {architecture!r:.80} is {kind}not served yet; served: {', '.join(SERVED)}"
    )


def resolve(config: ModelConfig) -> ModelEntry:
    """The entry that serves `config`. Raises UnsupportedModelError naming what is served: of architectures, of one
    architecture's features, or of weight formats."""
    entry = SERVED.get(config.architecture)
    if entry is None:
        raise _not_served(config.architecture, config.raw)
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
    if config.num_heads % config.num_kv_heads:
        reasons.append(
            f"`num_key_value_heads` is {config.num_kv_heads}; must divide num_attention_heads ({config.num_heads})"
        )
    if config.head_dim % 2:
        reasons.append(f"`head_dim` is {config.head_dim}; must be even")
    _layer_types(config)
    return reasons


def _rope_reasons(config: ModelConfig) -> list[str]:
    fields, parameters = config.fields, config.fields.object("rope_parameters")
    if any(isinstance(value, dict) for value in parameters.values.values()):
        return ["`rope_parameters` differs between layers; accepted: one set for all"]
    reasons = []
    partial = fields.number("partial_rotary_factor", parameters.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reasons.append(f"`partial_rotary_factor` is {partial}; accepted: 1.0")
    scaling = Fields(config.rope_scaling or {}, fields.where, "rope_scaling.")
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_FIELDS:
        return [*reasons, f"rope type is {rope_type!r}; accepted: {', '.join(ROPE_FIELDS)}"]
    missing = [name for name in ROPE_FIELDS[rope_type] if scaling.values.get(name) is None]
    if missing:
        reasons.append(f"`rope_scaling` of type {rope_type} lacks {', '.join(missing)}")
    _check_rope_numbers(scaling)
    return reasons


def _check_rope_numbers(scaling: Fields) -> None:
    """Raises UnsupportedModelError for one with which frequencies cannot be computed."""
    for name in ROPE_NUMBERS:
        scaling.number(name, 1.0, above=1e-9, maximum=MOST)
    scaling.number("high_freq_factor", MOST, above=scaling.number("low_freq_factor", 0.0))
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        scaling.number(name, 1.0)


def _feature_reasons(config: ModelConfig) -> list[str]:
    reasons = []
    if config.hidden_act not in ("silu", "swish"):
        reasons.append(f"`hidden_act` is {config.hidden_act!r}; accepted: silu")
    if config.dtype not in ("float16", "bfloat16", "float32"):
        reasons.append(f"`dtype` is {config.dtype!r}; accepted: float16, bfloat16, float32")
    return reasons
