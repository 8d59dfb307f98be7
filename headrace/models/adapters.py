"""Reads what a folder holds of a low-rank adapter (LoRA, arXiv 2106.09685) as PEFT writes it: which linears it changes,
in which tensors, by which scale. It reads headers alone, checks all that can be wrong with them, and imports no torch,
so that a server can refuse an adapter before any rank loads it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.lora import LowRank
from headrace.mixers import Attention
from headrace.model_config import Fields, ModelConfig, read_object
from headrace.model_spec import ModelSpec
from headrace.models.names import OF_TEXT, text_name
from headrace.models.served import describe

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FLOATS = ("F16", "BF16", "F32")
REFUSED = {
    "use_dora": "DoRA", "lora_bias": "biases", "use_qalora": "QA-LoRA", "modules_to_save": "whole modules beside it",
    "trainable_token_indices": "rows of embeddings", "target_parameters": "parameters that are not linears",
    "layer_replication": "layers that occur several times", "alora_invocation_tokens": "activation by tokens",
}  # fmt: skip
"""fields of adapter_config.json that must not be set -> what they would ask for"""
OVER_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""ways to begin the training of an adapter that leave the model's own weights as they are"""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_BASE = re.compile(r"\.base_layer\.weight$|(?:^|\.)(?:embed_tokens|lm_head)\.weight$")
"""names of copies that PEFT makes of the model's own embeddings"""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class AdapterFile:
    """Describes an adapter."""

    path: Path
    """of its weights"""
    changes: dict[str, LowRank] = field(default_factory=dict)
    """by the changed linear, as models of text alone call it: `model.layers.0.self_attn.q_proj`"""


def adapted_linears(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of the linears that an adapter may change, those too that files may hold as one; of the
    embedding, [vocab_size, hidden_size]. Experts and what attention applies by itself are not among them, nor keys that
    are values too, nor rows of queries, keys and values in turn."""
    found: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(spec.layers):
        for one in layer.adapted:
            outputs, inputs = one.shape
            name = f"model.layers.{index}.{one.name.removesuffix('.weight')}"
            found[name] = outputs, inputs
            in_turn = isinstance(layer.mixer, Attention) and layer.mixer.by_kv_head and one.fused == "qkv_proj"
            if one.fused and not in_turn:
                together = f"{name.rpartition('.')[0]}.{one.fused}"
                found[together] = found.get(together, (0, 0))[0] + outputs, inputs
    found[EMBEDDING] = spec.vocab_size, spec.hidden_size
    if spec.has_head:
        found[HEAD] = spec.vocab_size, spec.hidden_size
    return found


def read_adapter(folder: Path, config: ModelConfig, max_rank: int) -> AdapterFile:
    """Read the headers of an adapter for the model of `config`. Raises CheckpointError, or UnsupportedModelError for a
    field of adapter_config.json, saying what is wrong and what is accepted."""
    fields = _config(folder, max_rank)
    spec = describe(config)
    known, file = adapted_linears(spec), AdapterFile(folder / WEIGHTS)
    shapes, copies = dict[str, tuple[int, ...]](), []
    for name, shape, dtype in _tensors(file.path):
        found = _TENSOR.fullmatch(name)
        if found is None:
            copies.append(name)
            continue
        theirs, which = found.groups()
        module = text_name(theirs, config, spec.names)
        if config.more_than_text and not OF_TEXT.match(f"{module}."):
            continue
        module = module if module in known else f"model.{module}"
        if module not in known:
            raise _refused(file, name, f"changes {theirs!r}, which is no linear of this model that adapters can change")
        if not _is_target(fields, theirs):
            raise _refused(file, name, f"changes {theirs!r}, which target_modules of {CONFIG} does not name")
        if dtype not in FLOATS:
            raise _refused(file, name, f"is of type {dtype}; accepted: {', '.join(FLOATS)}")
        rank = _of_module(fields, "rank_pattern", "r", theirs)
        alpha = _of_module(fields, "alpha_pattern", "lora_alpha", theirs)
        scale = alpha / (math.sqrt(rank) if fields.flag("use_rslora") else rank)
        change = file.changes.setdefault(module, LowRank(scale, int(rank)))
        setattr(change, which.lower(), name)
        shapes[name] = shape
    if not file.changes:
        raise CheckpointError(f"{file.path} holds no adapter: it has no tensors named lora_A and lora_B")
    for name in copies:
        if not _BASE.search(name):
            raise _refused(file, name, "is none of an adapter's (lora_A, lora_B)")
    for module, change in file.changes.items():
        outputs, inputs = known[module][::-1] if module == EMBEDDING else known[module]
        for which, name, shape in (("A", change.a, (change.rank, inputs)), ("B", change.b, (outputs, change.rank))):
            if not name:
                raise CheckpointError(f"{file.path} lacks lora_{which} of {module}")
            if shapes[name] != shape:
                raise _refused(file, name, f"has shape {list(shapes[name])}, model and {CONFIG} ask for {list(shape)}")
    return file


def _config(folder: Path, max_rank: int) -> Fields:
    """Return the fields of adapter_config.json, of which none asks for what is not served."""
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder} is no folder; accepted: one with {CONFIG} and {WEIGHTS}")
    fields = Fields(read_object(folder / CONFIG, CheckpointError), str(folder / CONFIG))
    if not os.path.lexists(folder / WEIGHTS):
        pickled = f" ({PICKLED} is pickled, which is not read; save it as safetensors)"
        raise CheckpointError(f"{folder} lacks {WEIGHTS}{pickled if os.path.lexists(folder / PICKLED) else ''}")
    if fields.text("peft_type", "LORA") != "LORA":
        raise fields.refusal("peft_type", "LORA")
    for name, what in REFUSED.items():
        if fields.values.get(name):
            raise fields.refusal(name, f"left out, since headrace does not serve {what}")
    if fields.text("bias", "none") != "none":
        raise fields.refusal("bias", "none")
    if fields.values.get("init_lora_weights") not in OVER_THE_BASE:
        raise fields.refusal("init_lora_weights", "one that leaves the model's own weights as they are (convert it)")
    fields.number("lora_alpha", 8.0)
    for ranks in (fields, fields.object("rank_pattern")):
        for name in ranks.values if ranks.inside else ("r",):
            if ranks.integer(name, 8) > max_rank:
                raise ranks.refusal(name, f"an integer from 1 to max_lora_rank ({max_rank})")
    for name in (alphas := fields.object("alpha_pattern")).values:
        alphas.number(name)
    return fields


def _tensors(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and type of each tensor of a file."""
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118
                head = opened.get_slice(name)
                yield name, tuple(head.get_shape()), head.get_dtype()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read (truncated or not safetensors?): {error}") from None


def _refused(file: AdapterFile, tensor: str, why: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: tensor {tensor!r} {why}")


def _matches(fields: Fields, pattern: str, module: str) -> bool:
    """Tell whether a regular expression of adapter_config.json matches a whole name."""
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise CheckpointError(f"{fields.where}: {pattern!r} is no regular expression: {error}") from None


def _is_target(fields: Fields, module: str) -> bool:
    """Tell whether `target_modules` names a module: by a regular expression for all its name, or by the end of it."""
    targets: Any = fields.values.get("target_modules")
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _matches(fields, targets, module)
    return any(module == one or module.endswith(f".{one}") for one in fields.texts("target_modules"))


def _of_module(fields: Fields, pattern: str, usual: str, module: str) -> float:
    """Return what the first pattern that matches the end of a module's name says; else what holds for all."""
    patterns = fields.object(pattern)
    for one in patterns.values:
        if _matches(fields, rf"(.*\.)?({one})", module):
            return patterns.number(one)
    return fields.number(usual, 8.0)
