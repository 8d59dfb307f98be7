"""Tiny models of families that attend to latents or keep states: architecture -> variant -> what differs from BASE."""

from __future__ import annotations

from typing import Any

from tiny_fields import DELTA, LATENT, QWEN_EXPERTS, YARN_ROPE

SPARSE = LATENT | {"index_topk": 7, "index_head_dim": 20, "index_n_heads": 13}
"""an index that chooses few keys; with fewer heads, keys whose scores are all zero would tie"""
WARM = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}
LATENT_OR_STATES: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": {
        "hybrid": DELTA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        "plain-heads-tied": DELTA
        | QWEN_EXPERTS
        | {
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": False,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
        },
    },
    "Qwen3_5ForCausalLM": {"two-kv-heads": DELTA | {"num_key_value_heads": 2}},
    "Qwen3_5MoeForCausalLM": {"hybrid": DELTA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 40}},
    "DeepseekV2ForCausalLM": {
        "queries-too": LATENT | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 2},
        "whole-queries": LATENT
        | {"q_lora_rank": None, "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7}}
        | {"topk_method": "group_limited_greedy", "n_routed_experts": 15, "n_group": 5, "topk_group": 2},
    },
    "DeepseekV3ForCausalLM": {
        "queries-too": LATENT
        | {"attention_bias": True}
        | {"first_k_dense_replace": 1, "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}}
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4},
        "whole-queries": LATENT
        | {"q_lora_rank": None, "first_k_dense_replace": 2, "norm_topk_prob": False, "rope_interleave": False},
    },
    "KimiK25ForConditionalGeneration": {
        "text": LATENT
        | {"first_k_dense_replace": 1, "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}}
        | {"n_routed_experts": 15, "num_experts_per_tok": 4, "routed_scaling_factor": 1.7},
    },
    "DeepseekV32ForCausalLM": {
        "sparse-groups": SPARSE
        | {"first_k_dense_replace": 1, "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}}
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4},
        "dense": SPARSE | {"index_topk": 200},
    },
    "GlmMoeDsaForCausalLM": {
        "shared-index": SPARSE
        | {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "shared", "full"]}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"], "index_head_dim": 12},
        "own-index": SPARSE | {"index_topk": 1},
    },
    "MistralLarge3ForCausalLM": {
        "warmed": LATENT
        | {"rope_parameters": {**YARN_ROPE, **WARM, "mscale_all_dim": 1.0}}
        | {"first_k_dense_replace": 1, "v_head_dim": 20},
    },
    "Mistral4ForCausalLM": {
        "warmed": LATENT
        | {"rope_parameters": {**YARN_ROPE, **WARM, "mscale": 1.0, "mscale_all_dim": 1.0}}
        | {"first_k_dense_replace": 1},
        "whole-queries": LATENT | {"q_lora_rank": None, "rope_parameters": {**YARN_ROPE, **WARM, "mscale": 0.8}},
    },
    "Glm4MoeLiteForCausalLM": {
        "wide-values": LATENT | {"v_head_dim": 40, "mlp_layer_types": ["dense", "sparse", "dense"]},
    },
    "YoutuForCausalLM": {"dense": LATENT | {"tie_word_embeddings": True}},
    "MiniCPM3ForCausalLM": {
        "multipliers": LATENT | {"scale_emb": 6, "scale_depth": 0.5, "dim_model_base": 24, "rms_norm_eps": 1e-2},
    },
    "AXK1ForCausalLM": {
        "norms-behind": LATENT
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4}
        | {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    },
}
