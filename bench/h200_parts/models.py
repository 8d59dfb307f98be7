"""Describes the measured models as config.json, at full or toy size. The sizes are those of the planner's catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from h200_parts.bounds import Cost
from headrace.planner.catalogue import catalogue
from headrace.planner.shapes import shape_of

LLAMA_8B: dict[str, Any] = catalogue()["llama-3.1-8b"].config | {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
}
EIGHT_B = LLAMA_8B | {"max_position_embeddings": 32768, "rope_scaling": None}
"""The 8B of the cases, which give it as many layers as they need"""
QWEN3_30B_A3B: dict[str, Any] = catalogue()["qwen3-30b-a3b"].config | {
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
TOY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class BenchModel:
    """Names a model and the format that its linear layers are quantized to at load."""

    name: str
    title: str
    config: dict[str, Any]
    quantization: str | None = None

    def shape(self, toy: bool = False) -> dict[str, Any]:
        """Return config.json."""
        if not toy:
            return self.config
        return self.config | TOY | (TOY_EXPERTS if "num_experts" in self.config else {})

    def cost(self, toy: bool = False) -> Cost:
        """Return the bytes and operations of a token."""
        return Cost.of(shape_of(self.shape(toy), self.name).spec, linear_bytes=1 if self.quantization else 2)


MODELS = {
    model.name: model
    for model in (
        BenchModel("bf16", "Llama-3.1-8B bf16", LLAMA_8B),
        BenchModel("fp8", "Llama-3.1-8B fp8", LLAMA_8B, quantization="fp8"),
        BenchModel("moe", "Qwen3-30B-A3B bf16", QWEN3_30B_A3B),
        BenchModel("moe-fp8", "Qwen3-30B-A3B fp8", QWEN3_30B_A3B, quantization="fp8"),
    )
}
