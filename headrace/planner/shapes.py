"""What a model weighs and caches, layer by layer, counted from its config.json alone.

Pure arithmetic on published fields: no weights are looked at. Knows nothing of GPUs, of the bytes of weight formats,
nor of how layers are spread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.models.registry import MODELS, ModelEntry
from headrace.planner.checkpoint_format import PARTS, bytes_per_weight, holds_kv_scales, read_format
from headrace.planner.encoders import gemma3_vision, kimi_vision, llama4_vision, qwen3_vision
from headrace.planner.layer_shapes import AttentionShape, LayerGroup, MlpShape, dense, gqa, mla, sparse


@dataclass(frozen=True)
class ModelShape:
    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    groups: tuple[LayerGroup, ...]
    embedding_weights: int
    head_weights: int
    """0: the embedding serves as head"""
    extra_weights: int
    """not read by a step of text: vision encoder, layers that predict further tokens"""
    dtype: str
    """bfloat16, float16 or float32: of activations, and of weights without a format"""
    weight_format: str
    """as the checkpoint holds the linears: bf16 (the dtype as it is), fp8, mxfp4, int4, int8"""
    source: str
    """where config.json comes from"""
    final_weights: int = 0
    """the last norm"""
    draft_weights: int = 0
    """of `extra_weights`: layers that predict further tokens, loaded for speculation alone"""
    format_parts: tuple[str, ...] = PARTS
    """what the checkpoint holds in `weight_format`; the rest is in `dtype`"""
    format_bytes: float = 0.0
    """of a weight in the checkpoint's format, scales included, where config.json tells; 0: as usual"""
    fp8_kv_cache: bool = False
    """the checkpoint brings scales for an fp8 cache"""

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def total_weights(self) -> int:
        layers = sum(group.weights for group in self.groups)
        return layers + self.embedding_weights + self.head_weights + self.final_weights + self.extra_weights

    @property
    def active_weights(self) -> int:
        """Parameters that one token reads: one row of the embedding, the chosen experts, the head."""
        layers = sum(group.active_weights for group in self.groups)
        head = self.head_weights or self.embedding_weights
        return layers + self.hidden_size + head + self.final_weights

    @property
    def is_moe(self) -> bool:
        return any(group.mlp.num_experts for group in self.groups)

    @property
    def is_mla(self) -> bool:
        return any(group.attention.kind == "mla" for group in self.groups)

    @property
    def num_experts(self) -> int:
        return max(group.mlp.num_experts for group in self.groups)

    @property
    def num_heads(self) -> int:
        return max(group.attention.num_heads for group in self.groups)

    @property
    def num_kv_heads(self) -> int:
        return max(group.attention.num_kv_heads for group in self.groups)

    @property
    def intermediate_size(self) -> int:
        """of the widest dense MLP or shared experts; 0 where there are none"""
        return max(group.mlp.intermediate_size for group in self.groups)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers cached for a token in all layers together, windows not counted."""
        return sum(group.count * group.attention.kv_values for group in self.groups)

    @property
    def quantizable(self) -> int:
        """Parameters that a weight format may apply to: linears of attention, MLPs and experts; not router, norms,
        biases, embedding and head."""
        return sum(
            group.count
            * (
                group.attention.weights
                - group.attention.plain_weights
                + group.mlp.dense_weights
                - group.mlp.router_weights
                + group.mlp.num_experts * (group.mlp.expert_weights - group.mlp.expert_plain_weights)
            )
            for group in self.groups
        )

    def parts_in(self, weight_format: str, engine: str = "vllm") -> tuple[str, ...]:
        """The parts that are held in `weight_format` when it is asked for: as the checkpoint has it, else all; headrace
        rounds no experts while it loads."""
        if weight_format == self.weight_format:
            return self.format_parts
        made_at_load = self.weight_format == "bf16" and weight_format in ("fp8", "ptpc_fp8")
        return ("attention", "dense") if made_at_load and engine == "headrace" else PARTS

    def bytes_per_weight(self, weight_format: str) -> float:
        """of a weight held in `weight_format`, scales included"""
        return (weight_format == self.weight_format and self.format_bytes) or bytes_per_weight(weight_format)


Layer = tuple[AttentionShape, MlpShape, int]
"""attention, MLP, parameters of its norms"""


class _Layers(NamedTuple):
    layers: list[Layer]
    vision: int = 0
    draft: int = 0


Config = dict[str, Any]


def shape_of(config: Config, name: str, source: str = "") -> ModelShape:
    """Count a raw config.json. Raises ConfigError where no family here knows its architecture, a field is missing, or
    the weight format is none of ours."""
    architecture = next(iter(config.get("architectures") or ["none"]))
    text: Config = {**config, **(config.get("text_config") or {})}
    family, registered = _FAMILIES.get(architecture), _REGISTERED.get(architecture)
    try:
        if family is not None:
            text = {**family.defaults, **text}
            counted = family.layers(text)
        elif registered is not None:
            counted = _count_registered(text, registered)
        else:
            known = ", ".join(sorted(_FAMILIES.keys() | _REGISTERED.keys()))
            raise ConfigError(f"architecture {architecture!r} of {name} is not one that can be counted; known: {known}")
        hidden, vocab = int(text["hidden_size"]), int(text["vocab_size"])
    except KeyError as error:
        raise ConfigError(f"config.json of {name} ({architecture}) lacks `{error.args[0]}`") from None
    layers = Counter(counted.layers)  # in the order in which they first come
    quantization = text.get("quantization_config")
    held = read_format(quantization, len(counted.layers))
    return ModelShape(
        name=name,
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=int(text.get("max_position_embeddings") or 2048),
        groups=tuple(LayerGroup(count, *layer) for layer, count in layers.items()),
        embedding_weights=hidden * vocab,
        head_weights=0 if text.get("tie_word_embeddings") else hidden * vocab,
        extra_weights=counted.vision + counted.draft,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        weight_format=held.name,
        source=source or name,
        final_weights=hidden,
        draft_weights=counted.draft,
        format_parts=held.parts,
        format_bytes=held.bytes_per_weight,
        fp8_kv_cache=holds_kv_scales(quantization),
    )


def in_format(shape: ModelShape, weight_format: str, fp8_kv_cache: bool = False) -> ModelShape:
    """The same model in a checkpoint that holds all its linears in `weight_format`."""
    return replace(shape, weight_format=weight_format, format_parts=PARTS, format_bytes=0.0, fp8_kv_cache=fp8_kv_cache)


def _count_registered(c: Config, entry: ModelEntry) -> _Layers:
    """The families that headrace serves: windows, biases and experts as models/registry.py says."""
    missing = [field for field in entry.needs if c.get(field) is None]
    if missing:
        raise KeyError(missing[0])
    model = ModelConfig.from_dict(c)
    hidden, moe = model.hidden_size, entry.moe(model) if entry.moe else None
    filled = {**c, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim}

    def said(quirk: bool | None, otherwise: bool) -> bool:
        return otherwise if quirk is None else quirk

    layers: list[Layer] = []
    for i, window in enumerate(entry.windows(model)):
        attention = gqa(
            filled,
            window,
            qkv_bias=said(entry.qkv_bias, model.attention_bias),
            o_bias=said(entry.o_bias, model.attention_bias),
            head_norms=entry.qk_norm,
        )
        if moe and moe.sparse[i]:
            shared = moe.shared_intermediate_size
            gate = hidden if shared else 0
            mlp = sparse(hidden, moe.num_experts, moe.top_k, moe.intermediate_size, shared, gate)
        else:
            mlp = dense(hidden, model.intermediate_size, said(entry.mlp_bias, model.mlp_bias))
        layers.append((attention, mlp, 2 * hidden))
    return _Layers(layers)


def _count_deepseek(c: Config) -> _Layers:
    """Dense layers first, then experts and shared ones; layers for further tokens are drafts (their embedding and head
    are the model's own)."""
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    attention, first = mla(c), c["first_k_dense_replace"]
    plain = dense(hidden, c["intermediate_size"])
    shared = width * (c.get("n_shared_experts") or 0)
    experts = c["n_routed_experts"]
    routed = sparse(hidden, experts, c["num_experts_per_tok"], width, shared)
    layers = [(attention, plain if i < first else routed, 2 * hidden) for i in range(c["num_hidden_layers"])]
    draft = attention.weights + routed.weights + 2 * hidden + 2 * hidden**2 + 3 * hidden
    vision = kimi_vision(c["vision_config"], hidden) if c.get("vision_config") else 0
    return _Layers(layers, vision, (c.get("num_nextn_predict_layers") or 0) * draft)


def _count_llama4(c: Config) -> _Layers:
    """Experts in every n-th layer beside a shared one; every fourth layer sees all keys, without positions, the others
    those of their chunk."""
    hidden, count, width = c["hidden_size"], c["num_hidden_layers"], c["intermediate_size"]
    step, chunk = c["interleave_moe_layer_step"], c.get("attention_chunk_size")
    everything, chunked = gqa(c), gqa(c, chunk)
    routed = sparse(hidden, c["num_local_experts"], c["num_experts_per_tok"], width, shared=width)
    plain = dense(hidden, c["intermediate_size_mlp"])
    layers = [
        (chunked if (i + 1) % 4 else everything, plain if (i + 1) % step else routed, 2 * hidden) for i in range(count)
    ]
    return _Layers(layers, llama4_vision(c["vision_config"], hidden) if c.get("vision_config") else 0)


def _count_gpt_oss(c: Config) -> _Layers:
    """Windows in every other layer, from the first; sinks; biases everywhere."""
    hidden = c["hidden_size"]
    kinds = c.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(c["num_hidden_layers"])
    ]
    windows = [c["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    mlp = sparse(hidden, c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"], bias=True)
    return _Layers([(gqa(c, window, qkv_bias=True, o_bias=True, sinks=True), mlp, 2 * hidden) for window in windows])


def _count_gemma3(c: Config) -> _Layers:
    """Five layers with a window, then one without; four norms a layer."""
    hidden, pattern = c["hidden_size"], c["sliding_window_pattern"]
    windows = [c["sliding_window"] if (i + 1) % pattern else None for i in range(c["num_hidden_layers"])]
    mlp = dense(hidden, c["intermediate_size"])
    layers = [(gqa(c, window, head_norms=True), mlp, 4 * hidden) for window in windows]
    return _Layers(layers, gemma3_vision(c["vision_config"], hidden) if c.get("vision_config") else 0)


def _count_qwen3_vl(c: Config) -> _Layers:
    """Qwen3-MoE behind a vision encoder."""
    text = _count_registered({**c, "architectures": ["Qwen3MoeForCausalLM"]}, _REGISTERED["Qwen3MoeForCausalLM"])
    return _Layers(text.layers, qwen3_vision(c["vision_config"]))


def _count_minimax(c: Config) -> _Layers:
    """Experts in every layer. The layers for further tokens that config.json speaks of are in no checkpoint."""
    hidden = c["hidden_size"]
    attention = gqa(c, wide_norms=bool(c.get("use_qk_norm", True)))
    experts = (c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"])
    return _Layers([(attention, sparse(hidden, *experts), 2 * hidden)] * c["num_hidden_layers"])


@dataclass(frozen=True)
class _Family:
    layers: Callable[[Config], _Layers]
    defaults: Config = field(default_factory=dict)
    """what config.json leaves out where it is as usual"""


_GEMMA3 = _Family(
    _count_gemma3,
    {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6, "tie_word_embeddings": True},
)
_DEEPSEEK = _Family(_count_deepseek)
_FAMILIES = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _DEEPSEEK,
    "Llama4ForConditionalGeneration": _Family(_count_llama4),
    "GptOssForCausalLM": _Family(_count_gpt_oss),
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma3ForCausalLM": _GEMMA3,
    "MiniMaxM2ForCausalLM": _Family(_count_minimax),
    "Qwen3VLMoeForConditionalGeneration": _Family(_count_qwen3_vl),
}
"""The families that headrace does not serve yet; those that it does are in models/registry.py."""
_REGISTERED = {entry.architecture: entry for entry in MODELS}
