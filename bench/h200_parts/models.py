"""The two models of the table as config.json, their toy likenesses, and what a token costs in bytes and operations.

Pure arithmetic on shapes; knows nothing of engines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TOY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
TOY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class BenchModel:
    name: str
    title: str
    config: dict[str, Any]
    quantization: str | None = None

    def write(self, folder: Path, toy: bool = False) -> Path:
        """A folder with config.json alone."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.shape(toy), indent=2))
        return folder

    def shape(self, toy: bool = False) -> dict[str, Any]:
        if not toy:
            return self.config
        return self.config | TOY | (TOY_EXPERTS if "num_experts" in self.config else {})

    def cost(self, toy: bool = False) -> Cost:
        return Cost.of(self.shape(toy), linear_bytes=1 if self.quantization else 2)


MODELS = {
    model.name: model
    for model in (
        BenchModel("bf16", "Llama-3.1-8B bf16", LLAMA_8B),
        BenchModel("fp8", "Llama-3.1-8B fp8", LLAMA_8B, quantization="fp8"),
        BenchModel("moe", "Qwen3-30B-A3B bf16", QWEN3_30B_A3B),
        BenchModel("moe-fp8", "Qwen3-30B-A3B fp8", QWEN3_30B_A3B, quantization="fp8"),
    )
}


@dataclass(frozen=True)
class Cost:
    """What a decoder costs, of all layers together. The output layer, router and KV cache are 16-bit in every row."""

    always_bytes: int
    """weights that every step reads, whatever the batch"""
    expert_bytes: int
    """weights of one expert in every layer; 0 without experts"""
    num_experts: int
    experts_per_token: int
    layer_flops: int
    """of one token through all linears but the output layer"""
    head_flops: int
    """of one token through the output layer"""
    pair_flops: int
    """of one query looking at one key"""
    kv_bytes: int
    """KV cache of one token"""
    fp8: bool

    @classmethod
    def of(cls, config: dict[str, Any], linear_bytes: int) -> Cost:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        dim, kv_heads = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
        attention = hidden * (2 * heads + 2 * kv_heads) * dim
        head = hidden * config["vocab_size"]
        experts, chosen = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)
        if experts:
            expert, dense, router = 3 * hidden * config["moe_intermediate_size"], 0, hidden * experts
        else:
            expert, dense, router = 0, 3 * hidden * config["intermediate_size"], 0
        return cls(
            always_bytes=layers * ((attention + dense) * linear_bytes + router * 2) + head * 2,
            expert_bytes=layers * expert * linear_bytes,
            num_experts=experts,
            experts_per_token=chosen,
            layer_flops=2 * layers * (attention + dense + router + chosen * expert),
            head_flops=2 * head,
            pair_flops=4 * layers * heads * dim,
            kv_bytes=2 * layers * kv_heads * dim * 2,
            fp8=linear_bytes == 1,
        )
