"""Tiny models that pool, made by transformers, with a tokenizer of bytes and the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors
from torch import Tensor

from tests.engine.fakes import byte_tokenizer

ODD: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 60,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 128,
}
"""sizes that are no multiples of what kernels like"""
DECODER = ODD | {"num_key_value_heads": 1, "head_dim": 20, "pad_token_id": 0, "tie_word_embeddings": False}
SENTENCES = "sentence_transformers.models"


def save(name: str, config: transformers.PretrainedConfig, folder: Path) -> Any:
    """Save a model of that class whose weights are large enough to matter, and return it."""
    torch.manual_seed(len(name))
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, around: tuple[str, str] | None = None) -> None:
    """Save a tokenizer of bytes; `around`: what stands in front of a text and behind it, and between two."""
    backend = byte_tokenizer()
    if around is not None:
        first, last = around
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys(around)]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first}:0 $A:0 {last}:0", pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1", special_tokens=ids
        )
    backend.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def save_sentences(
    folder: Path,
    mode: str,
    normalize: bool = True,
    dense: tuple[tuple[Tensor, Tensor | None, str], ...] = (),
    **more: Any,
) -> None:
    """Write what sentence-transformers keeps beside a model: modules, pooling, linears behind it, prompts."""
    modules = [("", f"{SENTENCES}.Transformer"), ("1_Pooling", f"{SENTENCES}.Pooling")]
    (folder / "1_Pooling").mkdir()
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    flags = {f"pooling_mode_{one}": one == mode for one in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 60, **flags}))
    for number, (weight, bias, activation) in enumerate(dense, 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        modules.append((place.name, f"{SENTENCES}.Dense"))
        outputs, inputs = weight.shape
        described = {"in_features": inputs, "out_features": outputs, "bias": bias is not None}
        described["activation_function"] = activation
        (place / "config.json").write_text(json.dumps(described))
        from safetensors.torch import save_file

        tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        save_file(tensors, place / "model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", f"{SENTENCES}.Normalize"))
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    if more:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(more))


def pool(hidden: Tensor, mode: str, normalize: bool = True) -> Tensor:
    """Return what sentence-transformers makes of one text's hidden states # [num_tokens, hidden_size]."""
    by_mode = {"lasttoken": hidden[-1], "cls_token": hidden[0], "mean_tokens": hidden.mean(0)}
    vector = by_mode[mode]
    return vector / vector.norm() if normalize else vector
