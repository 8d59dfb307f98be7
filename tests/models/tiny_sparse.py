"""Tiny models of families with experts: architecture -> variant -> what differs from BASE."""

from __future__ import annotations

from typing import Any

from tiny_fields import ALPHA_ROPE, GRANITE, LATENT, LLAMA3_ROPE, LLAMA4, ODD, OLMO3_ROPE, QWEN_EXPERTS, YARN_ROPE

GPT_OSS = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "swiglu_limit": 1.5,
}
HARD_YARN = {**YARN_ROPE, "rope_theta": 1500.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
NEAR_ROPE = {"rope_type": "longrope", "rope_theta": 900.0, "short_mscale": 1.3, "long_mscale": 1.7} | {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 256,
}
COHERE_MOE = ODD | {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "num_key_value_heads": 1,
    "sliding_window": 9,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "prefix_dense_intermediate_size": 40,
    "logit_scale": 0.3,
}
WITH_EXPERTS: dict[str, dict[str, dict[str, Any]]] = {
    "MixtralForCausalLM": {
        "full": {"num_local_experts": 6, "num_experts_per_tok": 2},
        "sliding-one-expert": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 8, "head_dim": 32},
    },
    "Qwen2MoeForCausalLM": {
        "full": QWEN_EXPERTS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False},
        "dense-layers": QWEN_EXPERTS
        | {
            "shared_expert_intermediate_size": 72,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        "sliding": QWEN_EXPERTS
        | {"shared_expert_intermediate_size": 40, "use_sliding_window": True, "sliding_window": 8},
    },
    "Qwen3MoeForCausalLM": {
        "full": QWEN_EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
        "unnormalized-tied": QWEN_EXPERTS
        | {"head_dim": 16, "norm_topk_prob": False, "tie_word_embeddings": True, "attention_bias": True},
        "dense-layers-sliding": QWEN_EXPERTS
        | {
            "head_dim": 16,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    },
    "GptOssForCausalLM": {
        "sliding": GPT_OSS | {"sliding_window": 8, "rope_parameters": HARD_YARN},
        "tied-full": GPT_OSS
        | {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention"] * 3,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.4,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "Glm4MoeForCausalLM": {
        "normed": LATENT | {"head_dim": 24, "num_key_value_heads": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
        "biased-groups": LATENT
        | {"head_dim": 16, "num_key_value_heads": 2, "first_k_dense_replace": 0, "attention_bias": True}
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4},
    },
    "MiniMaxM2ForCausalLM": {
        "half-rotated": ODD
        | {"head_dim": 24, "rotary_dim": 12, "num_key_value_heads": 1}
        | {"num_local_experts": 7, "num_experts_per_tok": 3},
    },
    "Dots1ForCausalLM": {
        "windows": LATENT
        | {"head_dim": 24, "num_key_value_heads": 1, "first_k_dense_replace": 1, "sliding_window": 9}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5},
    },
    "Ernie4_5_MoeForCausalLM": {
        "biases": ODD
        | {"head_dim": 24, "num_key_value_heads": 1, "num_hidden_layers": 4, "moe_layer_end_index": 2}
        | {"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 24},
    },
    "GraniteMoeForCausalLM": {"multipliers": GRANITE | {"num_local_experts": 7, "num_experts_per_tok": 3}},
    "GraniteMoeSharedForCausalLM": {
        "shared": GRANITE | {"num_local_experts": 5, "shared_intermediate_size": 48, "tie_word_embeddings": True},
    },
    "GraniteMoeHybridForCausalLM": {
        "experts": GRANITE
        | {"num_local_experts": 5, "shared_intermediate_size": 48, "layer_types": ["full_attention"] * 3},
        "dense": GRANITE
        | {"num_local_experts": 0, "shared_intermediate_size": 48, "layer_types": ["full_attention"] * 3}
        | {"position_embedding_type": "rope"},
    },
    "PhimoeForCausalLM": {
        "near": ODD
        | {"num_key_value_heads": 1, "num_local_experts": 7, "router_jitter_noise": 0.3, "sliding_window": 9}
        | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": NEAR_ROPE},
    },
    "OlmoeForCausalLM": {
        "wide-norms": ODD | {"num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    },
    "Llama4ForCausalLM": {
        "scout": LLAMA4
        | {
            "num_key_value_heads": 1,
            "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0, "original_max_position_embeddings": 32},
        },
        "maverick": LLAMA4
        | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "num_experts_per_tok": 2, "attention_bias": True}
        | {"no_rope_layers": [1, 0, 1, 1], "num_local_experts": 7},
    },
    "HunYuanMoEV1ForCausalLM": {
        "alpha": ODD | {"head_dim": 24, "num_experts": 7, "moe_topk": 3, "rope_parameters": ALPHA_ROPE},
        "each-layer": ODD | {"head_dim": 16, "num_experts": 5, "moe_topk": [1, 3, 2]},
    },
    "BailingMoeV2ForCausalLM": {
        "groups": LATENT
        | {"head_dim": 24, "num_key_value_heads": 1, "first_k_dense_replace": 1, "use_qk_norm": True}
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4, "attention_bias": True}
        | {"routed_scaling_factor": 2.5, "num_experts": 15, "num_shared_experts": 1},
    },
    "HYV3ForCausalLM": {
        "biases": ODD
        | {"head_dim": 24, "num_key_value_heads": 1, "num_shared_experts": 2, "attention_bias": True}
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    },
    "SolarOpenForCausalLM": {
        "groups": LATENT
        | {"head_dim": 24, "num_key_value_heads": 1, "attention_bias": True}
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4},
    },
    "AfmoeForCausalLM": {
        "gates": ODD
        | {"num_hidden_layers": 4, "head_dim": 24, "num_key_value_heads": 1, "sliding_window": 9}
        | {"global_attn_every_n_layers": 3, "mup_enabled": True, "route_scale": 2.5}
        | {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_shared_experts": 1},
    },
    "ExaoneMoeForCausalLM": {
        "windows": ODD
        | {"num_hidden_layers": 4, "head_dim": 24, "num_key_value_heads": 1, "sliding_window": 9}
        | {"sliding_window_pattern": 3, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    },
    "MellumForCausalLM": {
        "two-ropes": ODD
        | {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": 9}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "rope_parameters": OLMO3_ROPE}
        | {"num_local_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    },
    "Cohere2MoeForCausalLM": {
        "average": COHERE_MOE | {"num_shared_experts": 2},
        "sum": COHERE_MOE
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"}
        | {"rms_norm_eps": 1e-5, "attention_bias": True},
    },
    "FlexOlmoForCausalLM": {
        "wide-norms": ODD | {"num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 1, "pad_token_id": 0},
    },
    "GraniteMoeSWAForCausalLM": {
        "sinks": GRANITE | {"sliding_window": 9, "num_local_experts": 7, "num_experts_per_tok": 3},
        "shared": GRANITE | {"sliding_window": 9, "num_local_experts": 5, "shared_intermediate_size": 48},
    },
}
