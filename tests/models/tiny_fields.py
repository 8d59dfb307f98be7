"""Fields that configs of tiny models share."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN_EXPERTS = {"num_experts": 10, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
ODD = {"vocab_size": 101, "num_hidden_layers": 3, "intermediate_size": 72}
"""sizes that are no multiples of what kernels like"""
OLMO3_ROPE = {
    "full_attention": {**YARN_ROPE, "attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
}
LATENT = {
    **ODD,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Latents; an odd size of everything"""
DELTA = {
    "vocab_size": 101,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention", "full_attention"],
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,  # norms of small outputs of a state would make rounding errors large
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
GRANITE = ODD | {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 3.0,
    "rms_norm_eps": 1e-2,
}
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 900.0, "alpha": 50.0, "factor": 1.0}
LLAMA4 = ODD | {
    "num_hidden_layers": 4,
    "intermediate_size": 80,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "head_dim": 24,
    "attention_chunk_size": 9,
    "floor_scale": 8,
    "attn_scale": 0.4,
}
UNIFIED = ODD | {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "attention_k_eq_v": True,
}
GEMMA4 = UNIFIED | {"attention_k_eq_v": False, "hidden_size_per_layer_input": 0}
