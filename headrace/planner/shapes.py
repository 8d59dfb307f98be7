"""What a model weighs and caches, layer by layer, counted from its config.json alone.

Pure arithmetic on published fields: no weights are looked at. Knows nothing of GPUs, of the bytes of weight formats,
nor of how layers are spread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.graph_sizes import FP8_WEIGHT, most_in_pieces
from headrace.model_config import Fields, ModelConfig, num_layers
from headrace.models.registry import MODELS, ModelEntry
from headrace.planner.checkpoint_format import MADE_AT_LOAD, PARTS, bytes_per_weight, holds_kv_scales, read_format
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
    plain_bytes: int = 2
    """of a number that is in no format, as it will be held: 4 in float32"""
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
        made_at_load = self.weight_format == "bf16" and weight_format in MADE_AT_LOAD
        return ("attention", "dense") if made_at_load and engine == "headrace" else PARTS

    def multiplied_weights(self, weight_format: str) -> float:
        """What a token is multiplied with in all layers, as models/size.py counts it in the loaded model."""
        narrow = self.parts_in(weight_format, "headrace") if weight_format in MADE_AT_LOAD else ()
        attention, dense, experts = (FP8_WEIGHT if part in narrow else 1.0 for part in PARTS)
        return sum(
            group.count
            * (
                attention * group.attention.weights
                + dense * group.mlp.dense_weights
                + experts * group.mlp.experts_per_token * group.mlp.expert_weights
            )
            for group in self.groups
        )

    def most_in_pieces(self, weight_format: str, tp: int) -> int:
        """Tokens of the largest step with prompts in it that headrace captures in pieces."""
        return most_in_pieces(self.multiplied_weights(weight_format) / self.num_layers / tp)

    def held_in(self, dtype: str) -> ModelShape:
        """The model with what is in no format in `dtype`."""
        return replace(self, plain_bytes=4) if dtype in ("float32", "float") else self

    def bytes_per_weight(self, weight_format: str) -> float:
        """of a weight held in `weight_format`, scales included"""
        if weight_format == "bf16":
            return self.plain_bytes
        return (weight_format == self.weight_format and self.format_bytes) or bytes_per_weight(weight_format)


Layer = tuple[AttentionShape, MlpShape, int]
"""attention, MLP, parameters of its norms"""


class _Layers(NamedTuple):
    layers: list[Layer]
    vision: int = 0
    draft: int = 0


Config = dict[str, Any]


def shape_of(config: Config, name: str, source: str = "") -> ModelShape:
    """Count a raw config.json. Raises ConfigError where no family here knows its architecture, a field is missing or
    none of its kind, or the weight format is none of ours."""
    try:
        return _counted(Fields(config, f"config.json of {name}"), name, source or name)
    except UnsupportedModelError as error:
        raise ConfigError(str(error)) from None


def _counted(config: Fields, name: str, source: str) -> ModelShape:
    architecture = next(iter(config.texts("architectures")), "none")
    text = replace(config, where=f"{config.where} ({architecture})")
    text = text.changed(text.object("text_config").values)
    family, registered = _FAMILIES.get(architecture), _REGISTERED.get(architecture)
    if family is not None:
        text = replace(text, values={**family.defaults, **text.values})
        counted = family.layers(text)
    elif registered is not None:
        counted = _count_registered(text, registered)
    else:
        known = ", ".join(sorted(_FAMILIES.keys() | _REGISTERED.keys()))
        raise ConfigError(f"architecture {architecture!r} of {name} is not one that can be counted; known: {known}")
    hidden, vocab = text.integer("hidden_size"), text.integer("vocab_size")
    layers = Counter(counted.layers)  # in the order in which they first come
    quantization = text.object("quantization_config").values
    held = read_format(quantization, len(counted.layers))
    return ModelShape(
        name=name,
        architecture=architecture,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=text.integer("max_position_embeddings", 2048),
        groups=tuple(LayerGroup(count, *layer) for layer, count in layers.items()),
        embedding_weights=hidden * vocab,
        head_weights=0 if text.flag("tie_word_embeddings") else hidden * vocab,
        extra_weights=counted.vision + counted.draft,
        dtype=text.text("dtype", text.text("torch_dtype", "bfloat16")).removeprefix("torch."),
        weight_format=held.name,
        source=source,
        final_weights=hidden,
        draft_weights=counted.draft,
        format_parts=held.parts,
        format_bytes=held.bytes_per_weight,
        fp8_kv_cache=holds_kv_scales(quantization),
    )


def in_format(shape: ModelShape, weight_format: str, fp8_kv_cache: bool = False) -> ModelShape:
    """The same model in a checkpoint that holds all its linears in `weight_format`."""
    return replace(shape, weight_format=weight_format, format_parts=PARTS, format_bytes=0.0, fp8_kv_cache=fp8_kv_cache)


def _count_registered(c: Fields, entry: ModelEntry) -> _Layers:
    """The families that headrace serves: windows, biases and experts as models/registry.py says."""
    for name in entry.needs:
        if c.values.get(name) is None:
            raise c.refusal(name, "given")
    model = ModelConfig.from_dict(c.values)
    hidden, moe = model.hidden_size, entry.moe(model) if entry.moe else None
    filled = c.changed({"num_key_value_heads": model.num_kv_heads})

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


_LISTS_OF_ENCODERS = {"merge_kernel_size": 2, "deepstack_visual_indexes": 0}
"""and how many integers they have at least"""


class _Encoder(Config):
    """`vision_config` for encoders.py: whatever is looked up is a size, or a list of integers."""

    def __init__(self, vision: Fields) -> None:
        super().__init__(vision.values)
        self._vision = vision

    def __getitem__(self, name: str) -> Any:
        least = _LISTS_OF_ENCODERS.get(name)
        return self._vision.integer(name) if least is None else self._vision.integers(name, least)


def _encoder(c: Fields, count: Callable[..., int], *sizes: int) -> int:
    """Parameters of the vision encoder, 0 where there is none."""
    vision = c.object("vision_config")
    return count(_Encoder(vision), *sizes) if vision else 0


def _routed(c: Fields, experts: int, width: int, shared: int = 0, bias: bool = False) -> MlpShape:
    chosen = c.integer("num_experts_per_tok", maximum=experts)
    return sparse(c.integer("hidden_size"), experts, chosen, width, shared, bias=bias)


def _count_deepseek(c: Fields) -> _Layers:
    """Dense layers first, then experts and shared ones; layers for further tokens are drafts (their embedding and head
    are the model's own)."""
    hidden, width = c.integer("hidden_size"), c.integer("moe_intermediate_size")
    attention, first = mla(c), c.integer("first_k_dense_replace", minimum=0)
    plain = dense(hidden, c.integer("intermediate_size"))
    routed = _routed(c, c.integer("n_routed_experts"), width, shared=width * c.integer("n_shared_experts", 0, 0))
    layers = [(attention, plain if i < first else routed, 2 * hidden) for i in range(num_layers(c))]
    draft = attention.weights + routed.weights + 2 * hidden + 2 * hidden**2 + 3 * hidden
    return _Layers(layers, _encoder(c, kimi_vision, hidden), c.integer("num_nextn_predict_layers", 0, 0) * draft)


def _count_llama4(c: Fields) -> _Layers:
    """Experts in every n-th layer beside a shared one; every fourth layer sees all keys, without positions, the others
    those of their chunk."""
    hidden, width = c.integer("hidden_size"), c.integer("intermediate_size")
    step, everything = c.integer("interleave_moe_layer_step"), gqa(c)
    chunked = gqa(c, c.optional("attention_chunk_size"))
    routed = _routed(c, c.integer("num_local_experts"), width, shared=width)
    plain = dense(hidden, c.integer("intermediate_size_mlp"))
    layers = [
        (chunked if (i + 1) % 4 else everything, plain if (i + 1) % step else routed, 2 * hidden)
        for i in range(num_layers(c))
    ]
    return _Layers(layers, _encoder(c, llama4_vision, hidden))


def _count_gpt_oss(c: Fields) -> _Layers:
    """Windows in every other layer, from the first; sinks; biases everywhere."""
    kinds = c.texts("layer_types") or ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(c))]
    window = c.optional("sliding_window")
    sliding, full = (gqa(c, keys, qkv_bias=True, o_bias=True, sinks=True) for keys in (window, None))
    mlp = _routed(c, c.integer("num_local_experts"), c.integer("intermediate_size"), bias=True)
    norms = 2 * c.integer("hidden_size")
    return _Layers([(sliding if kind == "sliding_attention" else full, mlp, norms) for kind in kinds])


def _count_gemma3(c: Fields) -> _Layers:
    """Five layers with a window, then one without; four norms a layer."""
    hidden, pattern = c.integer("hidden_size"), c.integer("sliding_window_pattern")
    sliding, full = gqa(c, c.integer("sliding_window"), head_norms=True), gqa(c, head_norms=True)
    mlp = dense(hidden, c.integer("intermediate_size"))
    layers = [(sliding if (i + 1) % pattern else full, mlp, 4 * hidden) for i in range(num_layers(c))]
    return _Layers(layers, _encoder(c, gemma3_vision, hidden))


def _count_qwen3_vl(c: Fields) -> _Layers:
    """Qwen3-MoE behind a vision encoder."""
    plain = c.changed({"architectures": ["Qwen3MoeForCausalLM"]})
    return _Layers(_count_registered(plain, _REGISTERED["Qwen3MoeForCausalLM"]).layers, _encoder(c, qwen3_vision))


def _count_minimax(c: Fields) -> _Layers:
    """Experts in every layer. The layers for further tokens that config.json speaks of are in no checkpoint."""
    attention = gqa(c, wide_norms=c.flag("use_qk_norm", True))
    mlp = _routed(c, c.integer("num_local_experts"), c.integer("intermediate_size"))
    return _Layers([(attention, mlp, 2 * c.integer("hidden_size"))] * num_layers(c))


@dataclass(frozen=True)
class _Family:
    layers: Callable[[Fields], _Layers]
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
