"""Tiny models of more than text: architecture -> variant -> what differs from BASE in their text parts."""

from __future__ import annotations

from typing import Any

from tiny_fields import DELTA, GEMMA4, LATENT, LLAMA4, ODD, QWEN_EXPERTS, UNIFIED, YARN_ROPE

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
DELTA_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64} | {
    "intermediate_size": 16,
    "num_position_embeddings": 4,
}
MORE_THAN_TEXT: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen3_5ForConditionalGeneration": {"text": DELTA | {"vision_config": DELTA_VISION}},
    "Qwen3_5MoeForConditionalGeneration": {
        "text": DELTA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 40, "vision_config": DELTA_VISION}
    },
    "Gemma3ForConditionalGeneration": {
        "text": ODD
        | {"num_hidden_layers": 3, "head_dim": 24, "sliding_window": 9, "sliding_window_pattern": 2}
        | {"vision_config": SIGLIP, "outer": {"mm_tokens_per_image": 4}},
    },
    "Gemma4ForConditionalGeneration": {
        "experts": GEMMA4
        | {"attention_k_eq_v": True, "vision_config": VISION, "outer": {"audio_config": None}}
        | {"enable_moe_block": True, "num_experts": 7, "top_k_experts": 3, "moe_intermediate_size": 24},
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "text": UNIFIED | {"vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 4}, "outer": {"audio_config": None}},
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
    "LlavaNextVideoForConditionalGeneration": {
        "llama": ODD | {"model_type": "llama", "head_dim": 24} | {"vision_config": CLIP},
    },
    "LlavaOnevisionForConditionalGeneration": {
        "qwen2": ODD | {"model_type": "qwen2", "num_key_value_heads": 1} | {"vision_config": SIGLIP},
    },
    "VipLlavaForConditionalGeneration": {
        "llama": ODD | {"model_type": "llama", "num_key_value_heads": 1} | {"vision_config": CLIP},
    },
    "Idefics3ForConditionalGeneration": {"llama": ODD | {"model_type": "llama", "vision_config": VISION}},
    "SmolVLMForConditionalGeneration": {"llama": ODD | {"model_type": "llama", "vision_config": VISION}},
    "Exaone4_5_ForConditionalGeneration": {
        "windows": ODD
        | {"model_type": "exaone4", "sliding_window": 9, "sliding_window_pattern": 3, "num_key_value_heads": 1}
        | {"vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}},
    },
    "Glm46VForConditionalGeneration": {
        "text": ODD
        | {"model_type": "glm4v_text", "head_dim": 16, "pad_token_id": 0, "vision_config": GLM_VISION}
        | {"rope_parameters": {**MROPE["rope_parameters"], "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
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
    "Qwen3VLMoeForConditionalGeneration": {
        "text": ODD
        | QWEN_EXPERTS
        | {"head_dim": 16, "rope_parameters": {**MROPE["rope_parameters"], "mrope_interleaved": True}}
        | {
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}
            | {"intermediate_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}
        },
    },
    "Llama4ForConditionalGeneration": {
        "text": LLAMA4
        | {"vision_config": {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}},
    },
}
