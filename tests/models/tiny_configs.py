"""Tiny models of every registered architecture, made by transformers in the Hugging Face layout.

A new line in the registry needs an entry here; the conformance tests then cover it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace.models.expert_families import LING

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

ODD = {"vocab_size": 101, "num_hidden_layers": 3, "intermediate_size": 72}
"""sizes that are no multiples of what kernels like"""
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CLIP = {**VISION, "model_type": "clip_vision_model", "projection_dim": 16}
GLM_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 16} | {
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "mrope_section": [2, 3, 3]}}
"""three positions, which are the same for text"""
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

SPARSE = LATENT | {"index_topk": 7, "index_head_dim": 20, "index_n_heads": 13}
"""an index that chooses few keys; with fewer heads, keys whose scores are all zero would tie"""
WARM = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}

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

DELTA_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64} | {
    "intermediate_size": 16,
    "num_position_embeddings": 4,
}

GRANITE = ODD | {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.11,
    "logits_scaling": 3.0,
    "rms_norm_eps": 1e-2,
}
ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 900.0, "alpha": 50.0, "factor": 1.0}
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

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {
        "gqa": {},
        "mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "mqa-odd-vocab": {"num_key_value_heads": 1, "vocab_size": 101},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "wide-heads": {"head_dim": 32},
        "rope-llama3": {"rope_parameters": LLAMA3_ROPE},
        "rope-yarn": {"rope_parameters": YARN_ROPE},
        "rope-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        "rope-dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    },
    "MistralForCausalLM": {
        "sliding": {"sliding_window": 8},
        "full": {"sliding_window": None, "head_dim": 32},
    },
    "Qwen2ForCausalLM": {
        "full": {},
        "tied": {"tie_word_embeddings": True},
        "upper-sliding": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
    "Qwen3ForCausalLM": {
        "full": {"head_dim": 32},
        "bias-tied": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
        "upper-sliding": {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    },
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
    "Qwen3_5ForConditionalGeneration": {"text": DELTA | {"vision_config": DELTA_VISION}},
    "Qwen3_5MoeForConditionalGeneration": {
        "text": DELTA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 40, "vision_config": DELTA_VISION}
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
    "GemmaForCausalLM": {"one-kv-head": ODD | {"head_dim": 24, "num_key_value_heads": 1}},
    "Gemma2ForCausalLM": {
        "caps": ODD
        | {
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 9,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 17,
        },
    },
    "Gemma3ForCausalLM": {
        "two-ropes": ODD
        | {
            "num_hidden_layers": 5,
            "head_dim": 24,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 1 + ["sliding_attention"] * 2,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    },
    "CohereForCausalLM": {
        "qk-norm": ODD | {"use_qk_norm": True, "logit_scale": 0.3},
        "plain-untied": ODD | {"tie_word_embeddings": False, "attention_bias": True},
    },
    "Cohere2ForCausalLM": {"windows": ODD | {"num_hidden_layers": 4, "sliding_window": 9, "num_key_value_heads": 1}},
    "GlmForCausalLM": {"half-rotated": ODD | {"head_dim": 24, "pad_token_id": 0}},
    "Glm4ForCausalLM": {"half-rotated": ODD | {"head_dim": 24, "pad_token_id": 0, "attention_bias": False}},
    "Phi3ForCausalLM": {
        "fused": ODD | {"pad_token_id": 0, "sliding_window": 9},
        "longrope": ODD
        | {
            "pad_token_id": 0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.2, 1.5, 2.0, 4.0, 7.5],
            },
        },
    },
    "GraniteForCausalLM": {
        "multipliers": GRANITE,
    },
    "OlmoForCausalLM": {"clipped": ODD | {"clip_qkv": 0.9}},
    "Olmo2ForCausalLM": {"one-kv-head": ODD | {"num_key_value_heads": 1}},
    "Olmo3ForCausalLM": {"windows": ODD | {"num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": OLMO3_ROPE}},
    "MinistralForCausalLM": {
        "mixed": ODD
        | {
            "sliding_window": 9,
            "head_dim": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    },
    "Ministral3ForCausalLM": {
        "temperature": ODD
        | {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4},
        },
    },
    "SmolLM3ForCausalLM": {"no-rope": ODD | {"no_rope_layer_interval": 3, "pad_token_id": 0}},
    "Exaone4ForCausalLM": {
        "windows": ODD | {"sliding_window": 9, "sliding_window_pattern": 3, "num_key_value_heads": 1},
        "full": ODD | {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    },
    "PhiForCausalLM": {"biased": ODD | {"num_key_value_heads": 1}},
    "StableLmForCausalLM": {
        "parallel": ODD | {"use_parallel_residual": True, "num_key_value_heads": 1},
        "biased": ODD | {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    },
    "SeedOssForCausalLM": {"biased": ODD | {"head_dim": 24, "pad_token_id": 0}},
    "ArceeForCausalLM": {"biased": ODD | {"head_dim": 24, "attention_bias": True, "mlp_bias": True}},
    "NemotronForCausalLM": {"half-rotated": ODD | {"head_dim": 24, "num_key_value_heads": 1}},
    "Starcoder2ForCausalLM": {
        "windows": ODD | {"sliding_window": 9, "num_key_value_heads": 1, "tie_word_embeddings": True}
    },
    "HeliumForCausalLM": {"interleaved": ODD | {"head_dim": 16, "pad_token_id": 0}},
    "Gemma3ForConditionalGeneration": {
        "text": ODD
        | {"num_hidden_layers": 3, "head_dim": 24, "sliding_window": 9, "sliding_window_pattern": 2}
        | {"vision_config": SIGLIP, "outer": {"mm_tokens_per_image": 4}},
    },
    "Mistral3ForConditionalGeneration": {
        "text": ODD
        | {"model_type": "mistral", "sliding_window": None, "head_dim": 24}
        | {"vision_config": {**VISION, "model_type": "pixtral"}, "outer": {"tie_word_embeddings": False}},
        "ministral3": ODD
        | {
            "model_type": "ministral3",
            "head_dim": 24,
            "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4},
            "vision_config": {**VISION, "model_type": "pixtral"},
        },
    },
    "Qwen2VLForConditionalGeneration": {
        "text": ODD | MROPE | {"vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text": ODD
        | MROPE
        | {"num_key_value_heads": 1, "tie_word_embeddings": True}
        | {"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}},
    },
    "Qwen3VLForConditionalGeneration": {
        "text": ODD
        | {"head_dim": 16, "rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
        | {
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}
            | {"intermediate_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
        },
    },
    "InternVLForConditionalGeneration": {
        "qwen2": ODD
        | {"model_type": "qwen2"}
        | {"vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
    },
    "LlavaForConditionalGeneration": {
        "llama": ODD | {"model_type": "llama", "num_key_value_heads": 1} | {"vision_config": CLIP},
    },
    "LlavaNextForConditionalGeneration": {
        "mistral": ODD | {"model_type": "mistral", "sliding_window": None, "head_dim": 24} | {"vision_config": CLIP},
    },
    "Glm4vForConditionalGeneration": {
        "text": ODD
        | {"head_dim": 16, "pad_token_id": 0, "vision_config": GLM_VISION}
        | {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    },
    "Glm4vMoeForConditionalGeneration": {
        "text": LATENT
        | {"head_dim": 16, "num_key_value_heads": 1, "first_k_dense_replace": 1, "pad_token_id": 0}
        | {"vision_config": GLM_VISION}
        | {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
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
    "OlmoeForCausalLM": {
        "wide-norms": ODD | {"num_experts": 7, "num_experts_per_tok": 3, "num_key_value_heads": 1},
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text": ODD
        | QWEN_EXPERTS
        | {"head_dim": 16, "rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
        | {
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}
            | {"intermediate_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
        },
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
    "Llama4ForConditionalGeneration": {
        "text": LLAMA4
        | {"vision_config": {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    },
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
    "MiMoForCausalLM": {"biased": ODD},
    "YoutuForCausalLM": {"dense": LATENT | {"tie_word_embeddings": True}},
    "Ernie4_5ForCausalLM": {"biased": ODD | {"head_dim": 24, "use_bias": True}},
    "CwmForCausalLM": {
        "windows": ODD
        | {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": 9, "rope_parameters": LLAMA3_ROPE},
    },
    "VaultGemmaForCausalLM": {
        "caps": ODD
        | {"head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 17}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    },
    "Jais2ForCausalLM": {"biased": ODD | {"head_dim": 24, "num_key_value_heads": 1}},
    "HunYuanDenseV1ForCausalLM": {
        "alpha": ODD
        | {"head_dim": 24, "num_key_value_heads": 1, "attention_bias": True, "rope_parameters": ALPHA_ROPE},
        "plain": ODD | {"head_dim": 16},
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
    "GraniteSWAForCausalLM": {
        "sinks": GRANITE | {"sliding_window": 9, "layer_rope_theta": [900.0, 0, 300.0], "tie_word_embeddings": True},
    },
    "GraniteMoeSWAForCausalLM": {
        "sinks": GRANITE | {"sliding_window": 9, "num_local_experts": 7, "num_experts_per_tok": 3},
        "shared": GRANITE | {"sliding_window": 9, "num_local_experts": 5, "shared_intermediate_size": 48},
    },
    "HyperCLOVAXForCausalLM": {
        "post-norms": GRANITE | {"head_dim": 24, "num_key_value_heads": 1, "logits_scaling": 0.3},
        "plain": GRANITE | {"use_post_norm": False},
    },
    "MiniCPMForCausalLM": {"multipliers": GRANITE | {"attention_multiplier": 0.25}},
    "MiniCPM3ForCausalLM": {
        "multipliers": LATENT | {"scale_emb": 6, "scale_depth": 0.5, "dim_model_base": 24, "rms_norm_eps": 1e-2},
    },
    "AXK1ForCausalLM": {
        "norms-behind": LATENT
        | {"n_routed_experts": 15, "n_group": 5, "topk_group": 2, "num_experts_per_tok": 4}
        | {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    },
}

REFERENCES = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "MistralLarge3ForCausalLM": "Mistral4ForCausalLM",
    "MiniCPMForCausalLM": "GraniteForCausalLM",
    "BailingMoeV2ForCausalLM": "Glm4MoeForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
"""architecture that transformers has not, or not under the names of its checkpoint -> one that computes the same"""
KIMI_VISION = {"vt_num_hidden_layers": 1, "vt_hidden_size": 16, "vt_intermediate_size": 16, "mm_hidden_size": 16} | {
    "patch_size": 14, "init_pos_emb_height": 2, "init_pos_emb_width": 2, "merge_kernel_size": [2, 2],
}  # fmt: skip

CASES = [(architecture, variant) for architecture, variants in VARIANTS.items() for variant in variants]
ALIKE = {
    "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "Gemma3ForCausalLM", "GlmForCausalLM", "GraniteForCausalLM",
    "MinistralForCausalLM", "SmolLM3ForCausalLM", "Exaone4ForCausalLM", "SeedOssForCausalLM", "HeliumForCausalLM",
    "Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    "InternVLForConditionalGeneration", "OlmoeForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM",
    "Ernie4_5ForCausalLM", "KimiK25ForConditionalGeneration", "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "MistralLarge3ForCausalLM", "CwmForCausalLM",
    "Jais2ForCausalLM", "SolarOpenForCausalLM", "ExaoneMoeForCausalLM", "MellumForCausalLM", "FlexOlmoForCausalLM",
    "MiniCPMForCausalLM", "MiniCPM3ForCausalLM", "AXK1ForCausalLM", "VaultGemmaForCausalLM", "MiMoForCausalLM",
}  # fmt: skip
"""Families all of whose layers' parts others have too: what is the parts' own (two ranks) is tested of those, and of
these in `make test-all`. A family that is not named here is tested in every way."""


def tiny_config(architecture: str, changes: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' config of a model like BASE but for `changes`; with a `vision_config`, that of a model of more than
    text, whose further fields are those of `outer`."""
    config_class, fields = reference_class(architecture).config_class, {**BASE, **changes}
    if "vision_config" not in fields:
        return config_class(**fields, architectures=[architecture])
    vision, outer = fields.pop("vision_config"), fields.pop("outer", {})
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
    return config_class(text_config=fields, vision_config=vision, architectures=[architecture], **{**tied, **outer})


def save_tiny_model(architecture: str, variant: str, folder: Path) -> torch.nn.Module:
    """Random weights on disk, every parameter far from its usual start (norms off one, biases off zero), so that none
    can be dropped or swapped unseen. Returns transformers' own float32 model, or its text part if it has a head."""
    model_class = reference_class(architecture)
    config = tiny_config(architecture, VARIANTS[architecture][variant])
    torch.manual_seed(7)
    model = model_class(config).eval()
    fill_at_random(model, len(variant))
    model.save_pretrained(folder)
    if architecture in REFERENCES:
        _as_published(folder, architecture)
    text = getattr(model, "language_model", None)
    return text if type(text).__name__.endswith("ForCausalLM") else model


def fill_at_random(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2, generator=generator)


def reference_class(architecture: str) -> Any:
    """transformers' class that computes what models of an architecture do."""
    return getattr(transformers, REFERENCES.get(architecture, architecture))


def _as_published(folder: Path, architecture: str) -> None:
    """Give a model that was saved as its reference the fields and names of its own checkpoint."""
    file = folder / "model.safetensors"
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(file)
    config["architectures"] = [architecture]
    if (residual := config.pop("residual_multiplier", None)) is not None:
        config["scale_emb"], config["scale_depth"] = config.pop("embedding_multiplier"), residual * 3**0.5
        config["dim_model_base"] = 64 / config.pop("logits_scaling")
    if architecture == "BailingMoeV2ForCausalLM":
        _as_ling(config, tensors)
        save_file(tensors, file)
    if (rope := config["rope_parameters"]).get("llama_4_scaling_beta"):
        original = rope["original_max_position_embeddings"]
        config["llama_4_scaling"] = {
            "beta": rope.pop("llama_4_scaling_beta"),
            "original_max_position_embeddings": original,
        }
    if architecture.endswith("ForConditionalGeneration"):
        outer = {"architectures": config.pop("architectures"), "vision_config": KIMI_VISION}
        config = {**outer, "text_config": {**config, "model_type": "kimi_k2"}}
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors |= {"vision_tower.encoder.a.weight": torch.zeros(3), "mm_projector.proj.0.weight": torch.zeros(2)}
        save_file(tensors, file)
    (folder / "config.json").write_text(json.dumps(config))


def _as_ling(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Give fields and tensors the names of Ling's checkpoints, whose queries, keys and values are one linear."""
    del config["n_routed_experts"], config["n_shared_experts"]
    config["use_qkv_bias"], config["score_function"] = config.pop("attention_bias"), "sigmoid"
    names = {ours: theirs for theirs, ours in LING}
    for name in [*tensors]:
        if ".q_proj." in name:
            parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            tensors[name.replace(".self_attn.q_proj.", ".attention.query_key_value.")] = torch.cat(parts)
    for name in [*tensors]:
        tensor, new = tensors.pop(name), name
        for ours, theirs in names.items():
            new = new.replace(ours, theirs)
        tensors[new] = tensor


@torch.inference_mode()
def best_tokens(model: torch.nn.Module, prompt: list[int], answer: list[int], never: int | None = None) -> list[int]:
    """What transformers' model likes best after `prompt` and after each token of an answer but the last: the answer
    itself, if that is the greedy one. `never`: a token that is not to be chosen."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    if never is not None:
        logits[:, never] = -torch.inf
    found: list[int] = logits.argmax(-1).tolist()
    return found


def shard(folder: Path) -> None:
    """Split model.safetensors into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
