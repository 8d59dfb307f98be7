"""Describes the measured models as config.json, at full or toy size, by the planner's catalogue."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from h200_parts.bounds import Cost
from headrace.planner.catalogue import catalogue
from headrace.planner.shapes import shape_of
from headrace.quantization.checkpoint_format import read_format
from headrace.quantization.formats import find_format


def in_catalogue(name: str, model_type: str) -> dict[str, Any]:
    """Return config.json of a model of the planner's catalogue."""
    return catalogue()[name].config | {"model_type": model_type}


LLAMA_8B = in_catalogue("llama-3.1-8b", "llama")
EIGHT_B = LLAMA_8B | {"max_position_embeddings": 32768, "rope_scaling": None}
"""The 8B of the cases, which give it as many layers as they need"""
QWEN3_30B_A3B = in_catalogue("qwen3-30b-a3b", "qwen3_moe")
GPT_OSS_20B = in_catalogue("gpt-oss-20b", "gpt_oss")
TOY: dict[str, Any] = {  # sizes that groups of 128 divide
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
TOY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
BATCHES = (1, 8, 32, 128)

FORMATS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("formats.json").read_text())
"""name of a checkpoint's format -> its quantization_config"""


@dataclass(frozen=True)
class BenchModel:
    """Names a model and the format of its linear layers, a row of models.json."""

    name: str
    title: str
    base: str
    """of the planner's catalogue"""
    changes: dict[str, Any] = field(default_factory=dict)
    """fields of config.json that differ from it"""
    toy: dict[str, Any] = field(default_factory=dict)
    """what a toy of it differs in besides"""
    max_model_len: int = 8192
    quantization: str | None = None
    """what weights are rounded to at load"""
    format: str | None = None
    """of FORMATS: how the checkpoint holds weights, where `base` does not say it"""
    batches: tuple[int, ...] = BATCHES
    """of which a decode step is measured"""
    decodes: tuple[tuple[int, int], ...] = ()
    """(requests, tokens of each prompt): of their decode steps attention alone is timed, and"""
    prompts: tuple[tuple[int, int], ...] = ()
    """of the steps that read them"""
    drafted: tuple[int, ...] = ()
    """batches whose tokens an EAGLE-3 head guesses"""
    loaded: tuple[int, ...] = ()
    """batches for which it depends on what is right whether guessing pays"""

    def shape(self, toy: bool = False) -> dict[str, Any]:
        """Return config.json."""
        config = catalogue()[self.base].config
        config = config | config.get("text_config", {}) | self.changes
        config.pop("text_config", None)
        config |= {"quantization_config": FORMATS[self.format]} if self.format else {}
        if not toy:
            return config
        counts = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config}
        return config | TOY | ({**TOY_EXPERTS, **counts} if counts else {}) | self.toy

    def head(self, toy: bool = False) -> dict[str, Any]:
        """Return config.json of a head like those of EAGLE-3's authors: a layer of the model's sizes, 32,000 tokens."""
        config = self.shape(toy)
        count, size = config["num_hidden_layers"], config["vocab_size"]
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": min(32000, size),
            "eagle_aux_hidden_state_layer_ids": [2, max(1, count // 2), max(1, count - 3)],
        }  # fmt: skip

    def cost(self, toy: bool = False) -> Cost:
        """Return the bytes and operations of a token."""
        config = self.shape(toy)
        spec = shape_of(config, self.name).spec
        if self.quantization:
            dense = experts = find_format(self.quantization)
        else:
            held = read_format(config.get("quantization_config"))
            dense = held.format_for("model.layers.1.self_attn.q_proj").format
            experts = held.format_for("model.layers.1.mlp.experts.0.gate_proj", "model.layers.1.mlp.experts").format
        return Cost.of(spec, dense, experts)


MODELS = {
    model.name: model
    for model in msgspec.json.decode(Path(__file__).with_name("models.json").read_bytes(), type=list[BenchModel])
}
