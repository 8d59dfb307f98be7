"""Counts the parameters of the vision encoders that come with language models, from config.json's `vision_config`."""

from __future__ import annotations

from headrace.model_config import Fields


def _layers(count: int, hidden: int, intermediate: int) -> int:
    """Count transformer layers with biases everywhere: four projections, two of the MLP, two norms."""
    return count * (4 * hidden**2 + 2 * hidden * intermediate + 9 * hidden + intermediate)


def gemma3_vision(vision: Fields, hidden_size: int) -> int:
    """Count SigLIP without its head, and the projection to the language model."""
    size = vision.integer
    hidden, patch = size("hidden_size"), size("patch_size")
    positions = (size("image_size") // patch) ** 2 * hidden
    embedding = hidden * (3 * patch**2 + 1) + positions + 2 * hidden
    projector = hidden * hidden_size + hidden
    return embedding + _layers(size("num_hidden_layers"), hidden, size("intermediate_size")) + projector


def llama4_vision(vision: Fields, hidden_size: int) -> int:
    """Count the encoder, its pixel-shuffle adapter, and the projection to the language model."""
    size = vision.integer
    hidden, patch, inner = size("hidden_size"), size("patch_size"), size("intermediate_size")
    positions = ((size("image_size") // patch) ** 2 + 1) * hidden
    embedding = hidden * 3 * patch**2 + hidden + positions + 4 * hidden
    wide, out = size("projector_input_dim"), size("projector_output_dim")
    adapter = inner * wide + wide * out
    projector = size("vision_output_dim") * hidden_size
    return embedding + _layers(size("num_hidden_layers"), hidden, inner) + adapter + projector


def kimi_vision(vision: Fields, hidden_size: int) -> int:
    """Count MoonViT, and the projection of merged patches to the language model."""
    size = vision.integer
    hidden, patch = size("vt_hidden_size"), size("patch_size")
    positions = size("init_pos_emb_height") * size("init_pos_emb_width") * hidden
    embedding = hidden * (3 * patch**2 + 1) + positions + 2 * hidden
    height, width, *_ = vision.integers("merge_kernel_size", least=2)
    merged = size("mm_hidden_size") * height * width
    projector = 2 * hidden + merged**2 + merged + (merged + 1) * hidden_size
    return embedding + _layers(size("vt_num_hidden_layers"), hidden, size("vt_intermediate_size")) + projector


def qwen3_vision(vision: Fields) -> int:
    """Count an encoder with learned positions, and a merger of patches behind it and behind each of
    `deepstack_visual_indexes`."""
    size = vision.integer
    hidden, patch = size("hidden_size"), size("patch_size")
    volume = 3 * size("temporal_patch_size") * patch**2
    embedding = hidden * (volume + 1) + size("num_position_embeddings") * hidden
    merged, deep = hidden * size("spatial_merge_size") ** 2, len(vision.integers("deepstack_visual_indexes"))
    mergers = (1 + deep) * (merged**2 + merged + (merged + 1) * size("out_hidden_size"))
    mergers += 2 * hidden + 2 * deep * merged
    return embedding + _layers(size("depth"), hidden, size("intermediate_size")) + mergers
