"""Tiny models of families with dense feed-forwards: architecture -> variant -> what differs from BASE."""

from __future__ import annotations

from typing import Any

from tiny_fields import ALPHA_ROPE, GEMMA4, GRANITE, LLAMA3_ROPE, ODD, OLMO3_ROPE, UNIFIED, YARN_ROPE

DENSE: dict[str, dict[str, dict[str, Any]]] = {
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
    "Gemma4ForCausalLM": {
        "keys-are-values": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "own-values": GEMMA4 | {"final_logit_softcapping": 2.0},
    },
    "Gemma4UnifiedForCausalLM": {"one-global-head": UNIFIED | {"num_global_key_value_heads": 1}},
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
    "ApertusForCausalLM": {"xielu": ODD | {"num_key_value_heads": 1, "hidden_act": "xielu", "pad_token_id": 0}},
    "NemotronForCausalLM": {"half-rotated": ODD | {"head_dim": 24, "num_key_value_heads": 1}},
    "Starcoder2ForCausalLM": {
        "windows": ODD | {"sliding_window": 9, "num_key_value_heads": 1, "tie_word_embeddings": True}
    },
    "HeliumForCausalLM": {"interleaved": ODD | {"head_dim": 16, "pad_token_id": 0}},
    "MiMoForCausalLM": {"biased": ODD},
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
    "GraniteSWAForCausalLM": {
        "sinks": GRANITE | {"sliding_window": 9, "layer_rope_theta": [900.0, 0, 300.0], "tie_word_embeddings": True},
    },
    "GPT2LMHeadModel": {"by-layer": ODD | {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True}},
    "GPTBigCodeForCausalLM": {
        "one-kv-head": ODD | {"multi_query": True, "tie_word_embeddings": True},
        "in-turn": ODD | {"multi_query": False, "tie_word_embeddings": True},
    },
    "GPTNeoForCausalLM": {
        "windows": ODD
        | {"attention_types": [[["global", "local", "local"], 1]], "window_size": 9, "tie_word_embeddings": True},
    },
    "GPTJForCausalLM": {"part-rotated": ODD | {"rotary_dim": 8}},
    "GPTNeoXForCausalLM": {"two-norms": ODD, "in-line": ODD | {"use_parallel_residual": False}},
    "OPTForCausalLM": {"positions": ODD | {"tie_word_embeddings": True, "pad_token_id": 0}},
    "FalconForCausalLM": {
        "two-norms": ODD | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        "one-kv-head": ODD | {"tie_word_embeddings": True},
        "in-line": ODD | {"parallel_attn": False, "multi_query": False},
    },
    "InternLM2ForCausalLM": {"in-turn": ODD | {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}}},
    "HyperCLOVAXForCausalLM": {
        "post-norms": GRANITE | {"head_dim": 24, "num_key_value_heads": 1, "logits_scaling": 0.3},
        "plain": GRANITE | {"use_post_norm": False},
    },
    "MiniCPMForCausalLM": {"multipliers": GRANITE | {"attention_multiplier": 0.25}},
}
