"""Tiny models of every registered architecture, made by transformers in the Hugging Face layout.

A new line in the registry needs an entry in one of the tables beside this file (tiny_dense.py, ...); the conformance
tests then cover it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_dense import DENSE
from tiny_fields import BASE
from tiny_latent import LATENT_OR_STATES
from tiny_sparse import WITH_EXPERTS
from tiny_vision import MORE_THAN_TEXT

from headrace.model_config import RENAMED
from headrace.models.expert_families import LING
from headrace.models.gpt_families import OF_INTERNLM2

VARIANTS = DENSE | WITH_EXPERTS | LATENT_OR_STATES | MORE_THAN_TEXT

REFERENCES = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "MistralLarge3ForCausalLM": "Mistral4ForCausalLM",
    "MiniCPMForCausalLM": "GraniteForCausalLM",
    "BailingMoeV2ForCausalLM": "Glm4MoeForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "InternLM2ForCausalLM": "LlamaForCausalLM",
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
    "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration",
    "GPTBigCodeForCausalLM", "GPTNeoForCausalLM", "GPTJForCausalLM", "FalconForCausalLM", "InternLM2ForCausalLM",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "VipLlavaForConditionalGeneration", "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration", "Glm46VForConditionalGeneration",
}  # fmt: skip
"""Families all of whose layers' parts others have too: what is the parts' own (two ranks) is tested of those, and of
these in `make test-all`. A family that is not named here is tested in every way."""


def tiny_config(architecture: str, changes: dict[str, Any]) -> transformers.PretrainedConfig:
    """transformers' config of a model like BASE but for `changes`; with a `vision_config`, that of a model of more than
    text, whose further fields are those of `outer`."""
    config_class, fields = reference_class(architecture).config_class, {**BASE, **changes}
    known = getattr(config_class, "__dataclass_fields__", {})
    fields |= {name: fields["intermediate_size"] for name in RENAMED["intermediate_size"] if name in known}
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
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)


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
    if architecture == "InternLM2ForCausalLM":
        config["bias"] = False
        save_file(_as_internlm2(tensors, config["num_key_value_heads"]), file)
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
    for name in [*tensors]:
        if ".q_proj." in name:
            parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            tensors[name.replace(".self_attn.q_proj.", ".attention.query_key_value.")] = torch.cat(parts)
    for name in [*tensors]:
        tensors[_renamed_back(name, LING)] = tensors.pop(name)


def _as_internlm2(tensors: dict[str, torch.Tensor], kv_heads: int) -> dict[str, torch.Tensor]:
    """Give tensors InternLM 2's names, and each KV head's rows their place behind the queries that use them."""
    for name in [*tensors]:
        if ".q_proj." in name:
            parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
            in_turn = torch.cat([part.unflatten(0, (kv_heads, -1)) for part in parts], dim=1)
            tensors[name.replace(".q_proj.", ".qkv_proj.")] = in_turn.flatten(0, 1)
    return {_renamed_back(name, OF_INTERNLM2): tensor for name, tensor in tensors.items()}


def _renamed_back(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in names:
        name = name.replace(ours, theirs.removeprefix("^"))
    return name


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
