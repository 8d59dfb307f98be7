"""Reads what a folder holds of a low-rank adapter (LoRA, arXiv 2106.09685) as PEFT writes it: which linears it changes,
in which tensors, by which scale. It reads headers alone, checks all that can be wrong with them, and imports no torch,
so that a server can refuse an adapter before any rank loads it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.feed_forwards import Experts
from headrace.lora import LowRank
from headrace.mixers import Attention
from headrace.model_config import Fields, ModelConfig, read_object
from headrace.model_spec import ModelSpec
from headrace.models.names import OF_TEXT, text_module
from headrace.models.served import describe

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FLOATS = ("F16", "BF16", "F32")
REFUSED = {
    "use_dora": "DoRA", "lora_bias": "biases", "use_qalora": "QA-LoRA", "modules_to_save": "whole modules beside it",
    "trainable_token_indices": "rows of embeddings",
    "layer_replication": "layers that occur several times", "alora_invocation_tokens": "activation by tokens",
}  # fmt: skip
"""fields of adapter_config.json that must not be set -> what they would ask for"""
OVER_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""ways to begin the training of an adapter that leave the model's own weights as they are"""
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_BASE = re.compile(r"\.base_layer\.weight$|(?:^|\.)(?:embed_tokens|lm_head)\.weight$")
"""names of copies that PEFT makes of the model's own embeddings"""
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_OF_ALL_EXPERTS = re.compile(r"(.*\.experts)((?:\.base_layer)*)")
PARAMETERS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
"""the tensors of all experts that `target_parameters` may name: PEFT puts the adapter of each around those before it"""


@dataclass(frozen=True)
class AdapterFile:
    """Describes an adapter."""

    path: Path
    """of its weights"""
    changes: dict[str, LowRank] = field(default_factory=dict)
    """by the changed linear, as models of text alone call it: `model.layers.0.self_attn.q_proj`, and that of one expert
    or of all `model.layers.0.mlp.experts.7.up_proj` and `model.layers.0.mlp.experts.gate_up_proj`"""


def adapted_linears(spec: ModelSpec, experts: bool = False) -> dict[str, tuple[int, ...]]:
    """Return [outputs, inputs] of the linears that an adapter may change, those too that files may hold as one; of the
    embedding, [vocab_size, hidden_size]. What attention applies by itself is not among them, nor keys that are values
    too, nor rows of queries, keys and values in turn, nor routers, nor without `experts` those: each one's linears, and
    [experts, outputs, inputs] of all together."""
    found: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(spec.layers):
        for one in layer.adapted:
            outputs, inputs = one.shape
            name = f"model.layers.{index}.{one.name.removesuffix('.weight')}"
            found[name] = outputs, inputs
            in_turn = isinstance(layer.mixer, Attention) and layer.mixer.by_kv_head and one.fused == "qkv_proj"
            if one.fused and not in_turn:
                together = f"{name.rpartition('.')[0]}.{one.fused}"
                found[together] = found.get(together, (0, 0))[0] + outputs, inputs
        if experts and isinstance(block := layer.feed_forward, Experts):
            path, names, number = f"model.layers.{index}.{block.block}.experts", block.names, block.num_experts
            hidden, wide = block.hidden_size, block.expert_intermediate_size
            up, down = (wide, hidden), (hidden, wide)
            found[f"{path}.gate_up_proj"], found[f"{path}.down_proj"] = (number, 2 * wide, hidden), (number, *down)
            for linear, shape in ((names.gate, up), (names.up, up), (names.down, down)):
                found |= {f"{path}.{expert}.{linear}": shape for expert in range(number)}
    found[EMBEDDING] = spec.vocab_size, spec.hidden_size
    if spec.has_head:
        found[HEAD] = spec.vocab_size, spec.hidden_size
    return found


def read_adapter(folder: Path, config: ModelConfig, max_rank: int, experts: bool = False) -> AdapterFile:
    """Read the headers of an adapter for the model of `config`, which may change its experts if `experts` says so.
    Raises CheckpointError, or UnsupportedModelError for a field of adapter_config.json, saying what is wrong and what
    is accepted."""
    fields = _config(folder, max_rank)
    spec = describe(config)
    known, file = adapted_linears(spec, experts=True), AdapterFile(folder / WEIGHTS)
    blocks = {layer.feed_forward.block for layer in spec.layers}
    shapes, copies = dict[str, tuple[int, ...]](), []
    for name, shape, dtype in _tensors(file.path):
        found = _TENSOR.fullmatch(name)
        if found is None:
            copies.append(name)
            continue
        theirs, which = _parameter(fields, found[1]), found[2]
        module = text_module(theirs, config.more_than_text, spec.names)
        if config.more_than_text and not OF_TEXT.match(f"{module}."):
            continue
        # transformers calls every feed-forward mlp, whatever checkpoints do
        others = (module.replace(".mlp.", f".{block}.") for block in sorted(blocks))
        module = next((one for name in (module, *others) for one in (name, f"model.{name}") if one in known), "")
        if not module:
            accepted = ", ".join(sorted({one.rpartition(".")[2] for one in adapted_linears(spec, experts)}))
            raise _refused(file, name, f"changes {theirs!r}, which is no linear of this model that adapters can change "
                           f"(there are {accepted})")  # fmt: skip
        if ".experts." in module and not experts:
            raise _refused(file, name, f"changes {theirs!r}, which needs lora_experts (--lora-experts)")
        if not _is_target(fields, theirs):
            raise _refused(file, name, f"changes {theirs!r}, which neither target_modules nor target_parameters of "
                           f"{CONFIG} names")  # fmt: skip
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
    _complete(file, known, shapes)
    for module, change in file.changes.items():
        outputs, inputs = known[module][-2:][:: -1 if module == EMBEDDING or change.turned else 1]
        rank = change.rank * (change.experts or 1)
        for which, name, shape in (("A", change.a, (rank, inputs)), ("B", change.b, (outputs, rank))):
            if not name:
                raise CheckpointError(f"{file.path} lacks lora_{which} of {module}")
            if shapes[name] != shape:
                raise _refused(file, name, f"has shape {list(shapes[name])}, model and {CONFIG} ask for {list(shape)}")
    return file


def _complete(file: AdapterFile, known: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Say of changes of all experts together how many those are, and what their shapes tell: that PEFT took the weights
    for [experts, in, out], whatever they were, as it did up to 0.18. Raises CheckpointError where they tell nothing."""
    found = [(one, known[module]) for module, one in file.changes.items() if len(known[module]) == 3]
    told = [shapes.get(one.a, (0,))[-1] == rows for one, (_, rows, columns) in found if rows != columns]
    for change, (number, *_) in found:
        change.experts, change.turned = number, any(told)
        if not told:
            why = "may be of inputs or of outputs, as versions of PEFT have it: they are equally many, and no other"
            raise _refused(file, change.a, f"{why} tensor tells")


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


def _parameter(fields: Fields, module: str) -> str:
    """Return the name of what a module's adapter changes: of all experts, one of the tensors that `target_parameters`
    names."""
    found = _OF_ALL_EXPERTS.fullmatch(module)
    if found is None:
        return module
    names = [name for one in PARAMETERS if _ends(name := f"{found[1]}.{one}", fields.texts("target_parameters"))]
    inner = found[2].count(".base_layer")
    return names[-1 - inner] if inner < len(names) else module


def _ends(name: str, ends: Sequence[str]) -> bool:
    """Tell whether a name is one of `ends`, or ends with a dot and one of them."""
    return any(name == one or name.endswith(f".{one}") for one in ends)


def _is_target(fields: Fields, module: str) -> bool:
    """Tell whether `target_modules` names a module, by a regular expression for all its name or by the end of it, or
    `target_parameters` it or its weight."""
    if any(_ends(name, fields.texts("target_parameters")) for name in (module, f"{module}.weight")):
        return True
    targets: Any = fields.values.get("target_modules")
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str):
        return _matches(fields, targets, module)
    return _ends(module, fields.texts("target_modules"))


def _of_module(fields: Fields, pattern: str, usual: str, module: str) -> float:
    """Return what the first pattern that matches the end of a module's name says; else what holds for all."""
    patterns = fields.object(pattern)
    for one in patterns.values:
        if _matches(fields, rf"(.*\.)?({one})", module):
            return patterns.number(one)
    return fields.number(usual, 8.0)
