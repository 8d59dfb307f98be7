"""Parameters of the vision encoders that come with language models, counted from config.json's `vision_config`."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _layers(count: int, hidden: int, intermediate: int) -> int:
    """Transformer layers with biases everywhere: four projections, two of the MLP, two norms."""
    return count * (4 * hidden**2 + 2 * hidden * intermediate + 9 * hidden + intermediate)


def gemma3_vision(vision: Config, hidden_size: int) -> int:
    """SigLIP without its head, and the projection to the language model."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    positions = (vision["image_size"] // patch) ** 2 * hidden
    embedding = hidden * (3 * patch**2 + 1) + positions + 2 * hidden
    projector = hidden * hidden_size + hidden
    return embedding + _layers(vision["num_hidden_layers"], hidden, vision["intermediate_size"]) + projector


def llama4_vision(vision: Config, hidden_size: int) -> int:
    """Encoder, pixel-shuffle adapter, and the projection to the language model."""
    hidden, patch, inner = vision["hidden_size"], vision["patch_size"], vision["intermediate_size"]
    positions = ((vision["image_size"] // patch) ** 2 + 1) * hidden
    embedding = hidden * 3 * patch**2 + hidden + positions + 4 * hidden
    wide, out = vision["projector_input_dim"], vision["projector_output_dim"]
    adapter = inner * wide + wide * out
    projector = vision["vision_output_dim"] * hidden_size
    return embedding + _layers(vision["num_hidden_layers"], hidden, inner) + adapter + projector


def kimi_vision(vision: Config, hidden_size: int) -> int:
    """MoonViT, and the projection of merged patches to the language model."""
    hidden, patch = vision["vt_hidden_size"], vision["patch_size"]
    positions = vision["init_pos_emb_height"] * vision["init_pos_emb_width"] * hidden
    embedding = hidden * (3 * patch**2 + 1) + positions + 2 * hidden
    merged = vision["mm_hidden_size"] * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    projector = 2 * hidden + merged**2 + merged + (merged + 1) * hidden_size
    return embedding + _layers(vision["vt_num_hidden_layers"], hidden, vision["vt_intermediate_size"]) + projector


def qwen3_vision(vision: Config) -> int:
    """Encoder with learned positions, and a merger of patches after it and after each of `deepstack_visual_indexes`."""
    hidden, patch = vision["hidden_size"], vision["patch_size"]
    volume = 3 * vision["temporal_patch_size"] * patch**2
    embedding = hidden * (volume + 1) + vision["num_position_embeddings"] * hidden
    merged, deep = hidden * vision["spatial_merge_size"] ** 2, len(vision["deepstack_visual_indexes"])
    mergers = (1 + deep) * (merged**2 + merged + (merged + 1) * vision["out_hidden_size"])
    mergers += 2 * hidden + 2 * deep * merged
    return embedding + _layers(vision["depth"], hidden, vision["intermediate_size"]) + mergers
