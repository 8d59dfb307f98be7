"""Plans what a new checkpoint holds: which tensors of the old one are rounded, and in which file each goes."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from headrace.convert.weight_scheme import WeightScheme
from headrace.errors import ConfigError
from headrace.feed_forwards import Experts
from headrace.mixers import Attention, RecurrentState
from headrace.model_config import ModelConfig
from headrace.model_spec import LayerSpec, ModelSpec
from headrace.models.checkpoint import (
    TYPES,
    StoredTensor,
    checkpoint_files,
    of_all_experts,
    stored_tensors,
    text_tensors,
)

_NUMBER = re.compile(r"model\.layers\.(\d+)\.")
_STEM = "model-{:05}-of-{:05}.safetensors"
WIDE_TYPES = ("BF16", "F16", "F32")
"""safetensors' types of weights that can be rounded"""
STACKED = "it holds all experts in a form that has no linears for each"
WIDENED = "attention multiplies with parts of it"
IN_TURN = "queries, keys and values are in turn in it"
KEPT = "no scheme rounds it"
"""said of embeddings, heads, routers, and what is not of text"""


@dataclass(frozen=True)
class Piece:
    """Stands for a tensor of the old checkpoint, or a part of one, that is written as one linear or as it is."""

    name: str
    """in the new checkpoint, if it keeps its form"""
    stored: StoredTensor
    own: str = ""
    """its name here, `model.layers.3.self_attn.q_proj.weight`"""
    rounded: bool = False
    why: str = ""
    """why a weight is not rounded"""
    expert: int | None = None
    """which of all experts' weights in the tensor it is; None: the tensor is no such weight"""
    rows: tuple[int, int] = (0, 0)
    """its outputs in that weight: the first, and the one behind the last"""
    transposed: bool = False
    """the old checkpoint has inputs before outputs"""
    shape: tuple[int, ...] = ()
    """as it is written if it is not rounded"""

    @property
    def linear(self) -> str:
        """The name of the linear whose weight this is."""
        return self.name.removesuffix(".weight")

    def read(self) -> Tensor:
        """Read it from its file; nothing else of the file comes into memory."""
        with safe_open(self.stored.file, framework="pt") as file:
            if self.expert is None:
                tensor: Tensor = file.get_tensor(self.stored.name)
                return tensor
            experts, (first, end) = slice(self.expert, self.expert + 1), self.rows
            found = file.get_slice(self.stored.name)
            weight: Tensor = found[experts, :, first:end].mT if self.transposed else found[experts, first:end]
            return weight[0].contiguous()


@dataclass(frozen=True)
class Shard:
    """Stands for one file of the new checkpoint."""

    file: str
    pieces: tuple[Piece, ...]
    num_bytes: int
    """of the tensors in it"""
    layer: int = -1
    """the number of the layer that it holds; -1: none"""
    kv_scales: tuple[str, ...] = ()
    """the names of the scales of K and V that it holds too"""

    @property
    def source_bytes(self) -> int:
        """The bytes that are read for it."""
        return sum(_size(piece.shape, piece.stored.dtype) for piece in self.pieces)


def plan_shards(folder: Path, config: ModelConfig, spec: ModelSpec, scheme: WeightScheme) -> list[Shard]:
    """Return the files of the new checkpoint: one for each layer, so that no more than a layer is ever in memory, and
    then as large ones of all else. Raises ConfigError if there is nothing to round."""
    if spec.transposed:
        raise ConfigError(f"{folder} holds weights [in, out], which no scheme rounds; accepted: [out, in]")
    pieces = [piece for file in checkpoint_files(folder) for piece in _pieces(file, config, spec, scheme)]
    if not any(piece.rounded for piece in pieces):
        kept = next((f": {piece.name}: {piece.why}" for piece in pieces if piece.why not in ("", KEPT)), "")
        raise ConfigError(f"{folder} has no linear that {scheme.name} can be rounded to{kept}")
    sizes = {piece.name: _written_bytes(piece.shape, piece.stored.dtype, piece.rounded, scheme) for piece in pieces}
    layers = [list(group) for _, group in groupby(sorted(pieces, key=_place), key=lambda piece: _place(piece)[0])]
    others = layers.pop(0) if _place(layers[0][0])[0] < 0 else []
    limit = max((sum(sizes[piece.name] for piece in layer) for layer in layers), default=0)
    groups = [*layers, []]
    for piece in others:
        if groups[-1] and sum(sizes[one.name] for one in (*groups[-1], piece)) > limit:
            groups.append([])
        groups[-1].append(piece)
    groups = [group for group in groups if group]
    shards = []
    for number, group in enumerate(groups, 1):
        layer, scales = _place(group[0])[0], _kv_scales(group, spec, scheme)
        size = sum(sizes[piece.name] for piece in group) + _SCALE_BYTES * len(scales)
        shards.append(Shard(_STEM.format(number, len(groups)), tuple(group), size, layer, scales))
    return shards


def _kv_scales(pieces: list[Piece], spec: ModelSpec, scheme: WeightScheme) -> tuple[str, ...]:
    """Return the names of the scales of K and V of a layer's cache, if the scheme has some and the layer caches both.
    Raises ConfigError for a cache whose scales no style has a name for."""
    layer, names = _place(pieces[0])[0], scheme.style.kv_scales
    if not scheme.kv_scales or names is None or not 0 <= layer < len(spec.layers):
        return ()
    mixer = spec.layers[layer].mixer
    if isinstance(mixer, RecurrentState):
        return ()
    fronts = [front for piece in pieces if (front := piece.name.partition(".self_attn.")[0]) != piece.name]
    if not isinstance(mixer, Attention) or mixer.norm_last or not fronts:
        raise ConfigError(f"--kv-cache-dtype fp8: no format has a name for scales of what layer {layer} caches")
    return tuple(f"{fronts[0]}.self_attn.{name}" for name in names)


def _place(piece: Piece) -> tuple[int, str]:
    """Return the number of the layer that a piece is in, -1 outside of all, and its name."""
    found = _NUMBER.match(piece.own)  # a file may call its layers `h.0`, and have others than those of text
    return (int(found[1]) if found else -1), piece.name


def _pieces(file: Path, config: ModelConfig, spec: ModelSpec, scheme: WeightScheme) -> Iterator[Piece]:
    linears = _linears(spec)
    stored = stored_tensors(file)
    ours = {one.within or one.name: one.name for one in text_tensors(stored, config, spec.names)[0]}
    for one in stored:
        name = ours.get(one.name, "")
        name = name if name in linears or name.startswith("model.") else f"model.{name}"
        piece = Piece(one.name, one, name, shape=one.shape)
        layer = _NUMBER.match(name)
        of_all = of_all_experts(one.name)
        if layer and of_all[1] == "weight" and len(one.shape) == 3 and one.dtype in WIDE_TYPES:
            yield from _each_expert(piece, spec.layers[int(layer[1])], of_all[0], scheme)
        elif len(one.shape) != 2:
            yield replace(piece, why=STACKED if of_all_experts(name.removesuffix(".weight"))[0] else "")
        elif name in linears and one.dtype in WIDE_TYPES and one.name.endswith(".weight"):
            why = "" if linears[name] == IN_TURN and scheme.by_output else linears[name]
            why = why or scheme.refusal(one.shape)
            yield replace(piece, rounded=not why, why=why)
        else:
            yield replace(piece, why=KEPT)


@functools.cache
def _linears(spec: ModelSpec) -> dict[str, str]:
    """Return the names of linears' weights -> why they keep their type, or "". Tools store the parts of a linear of
    ours as one, too."""
    linears: dict[str, str] = {}
    for number, layer in enumerate(spec.layers):
        for parameter in layer.parameters:
            if parameter.kind == "linear":
                name = f"model.layers.{number}.{parameter.name}"
                linears[name] = WIDENED if parameter.widened else ""
                if parameter.fused:
                    in_turn = isinstance(layer.mixer, Attention) and layer.mixer.by_kv_head
                    fused = f"{name.removesuffix('.weight').rpartition('.')[0]}.{parameter.fused}.weight"
                    linears[fused] = IN_TURN if in_turn and parameter.fused == "qkv_proj" else ""
    return linears


def _each_expert(piece: Piece, layer: LayerSpec, linear: str, scheme: WeightScheme) -> Iterator[Piece]:
    """Yield the linears of a tensor that holds those of all experts: the new checkpoint has a linear for each."""
    block, one = layer.feed_forward, piece.stored
    if not isinstance(block, Experts) or block.names.stacked:
        raise ConfigError(
            f"{one.name} is of experts whose gates and ups are in turn in one tensor, which no scheme takes apart; "
            "accepted: experts with tensors of their own, or with gates above ups"
        )
    front, _, name = linear.rpartition(".")
    names, wide, hidden = block.names, block.expert_intermediate_size, block.hidden_size
    parts = {names.gate: (0, wide), names.up: (wide, 2 * wide)} if name == "gate_up_proj" else {}
    parts = parts or {names.down: (0, hidden)}
    shape = (2 * wide, hidden) if name == "gate_up_proj" else (hidden, wide)
    transposed = one.shape[1:] == shape[::-1] and shape[0] != shape[1]
    layers = piece.own[: _NUMBER.match(piece.own).end()]  # pyrefly: ignore[missing-attribute]
    for expert in range(one.shape[0]):
        for part, rows in parts.items():
            own = (rows[1] - rows[0], shape[1])
            why = scheme.refusal(own)
            yield Piece(
                f"{front}.{expert}.{part}.weight", one, f"{layers}{names.block}.experts.{expert}.{part}.weight",
                not why, why, expert, rows, transposed, own,
            )  # fmt: skip


@functools.cache
def _written_bytes(shape: tuple[int, ...], dtype: str, rounded: bool, scheme: WeightScheme) -> int:
    if not rounded:
        return _size(shape, dtype)
    made = scheme.written(scheme.unfilled(shape, TYPES[dtype]))
    return sum(tensor.numel() * tensor.element_size() for tensor in made.values())


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return replace(_NOWHERE, shape=shape, dtype=dtype).num_bytes


_SCALE_BYTES = 4
_NOWHERE = StoredTensor("", Path(), (), "U8", 0)


def quantization_config(shards: list[Shard], scheme: WeightScheme) -> dict[str, object]:
    """Return config.json's quantization_config, which names every linear that keeps its type."""
    pieces = [piece for shard in shards for piece in shard.pieces]
    kept = [piece.linear for piece in pieces if piece.why and not _of_embedding(piece) and len(piece.shape) == 2]
    rounded = [piece.linear for piece in pieces if piece.rounded]
    return scheme.style.stated(scheme, [*dict.fromkeys(("lm_head", *kept))], rounded)


def _of_embedding(piece: Piece) -> bool:
    return "embed" in piece.own or not piece.name.endswith(".weight")


def index(shards: list[Shard], files: dict[str, list[str]]) -> str:
    """Return the text of the index of the new checkpoint; `files`: the names of the tensors in each file."""
    where = {name: file for file, names in files.items() for name in names}
    size = sum(shard.num_bytes for shard in shards)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}, indent=1) + "\n"
