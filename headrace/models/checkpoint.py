"""Finds the tensors in a folder of safetensors files. Pickled weights are never read."""

from __future__ import annotations

import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.layers.attention import KV_SCALE_NAMES
from headrace.layers.stacked import InOne
from headrace.model_config import ModelConfig, read_object
from headrace.model_spec import HeadSpec
from headrace.models.names import OF_TEXT, text_name

TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""safetensors' types by their names in it"""
HEADER_LENGTH_BYTES = 8
"""At the start of a file, little-endian"""
DRAFTS = ("mtp.", "model.mtp_")
"""how names of layers that draft further tokens begin, where they are no layers of the model's own"""
_OF_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")
_OF_ALL_EXPERTS = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj)(?:[._](\w+))?")
_OF_WEIGHTS = ("scale", "scale_inv", "scale_2", "global_scale", "zero_point", "packed", "shape", "g_idx")
"""tensors of a linear whose names begin with `weight_` where each expert has tensors of its own"""
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Its other types, of which torch has no single element, and their bits"""


@dataclass(frozen=True)
class StoredTensor:
    """Stands for a tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """a key of TYPES or PACKED_BITS"""
    offset: int
    """of its first byte in the file"""
    within: str = ""
    """the name of the tensor in the file that it is a part of, if it is none itself"""
    transposed: bool = False
    """the file has its two dimensions in the other order"""

    @property
    def shown(self) -> str:
        """The name by which errors call it."""
        return f"{self.name!r} within {self.within!r}" if self.within else repr(self.name)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its elements."""
        return TYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The tensor's size in the file."""
        bits = PACKED_BITS.get(self.dtype) or TYPES[self.dtype].itemsize * 8
        return math.prod(self.shape) * bits // 8


def checkpoint_files(folder: Path) -> list[Path]:
    """Return model.safetensors, else the files that its index names, else every other .safetensors file in `folder`.

    Raises CheckpointError if there is none, or if the index cannot be read or names a file that does not exist.
    """
    single = folder / "model.safetensors"
    if os.path.lexists(single):
        return [single]
    index = folder / "model.safetensors.index.json"
    if os.path.lexists(index):
        return _indexed_files(index)
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        packed = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f" (found {pickled[0]}: pickled weights are not read; convert them to safetensors)" if pickled else ""
        hint = f" (found {packed[0]}: GGUF is not read; take the model's safetensors)" if packed else hint
        raise CheckpointError(f"{folder} holds no .safetensors file{hint}")
    return files


def _indexed_files(index: Path) -> list[Path]:
    names = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} is not a safetensors index: `weight_map` must name a file for each tensor")
    files = sorted({*names.values()})
    for name in files:
        if not os.path.lexists(index.parent / name):
            raise CheckpointError(f"{index.name} names {name}, which does not exist in {index.parent}")
    return [index.parent / name for name in files]


def total_bytes(files: list[Path]) -> int:
    """Return the size of all files. Raises CheckpointError naming the first that is no file, as are links in a hub
    cache whose contents are gone."""
    total = 0
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            link = f" (a link to {os.readlink(file)}; download the model again)" if file.is_symlink() else ""
            raise CheckpointError(f"{file} cannot be read: {error.strerror}{link}") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is no file")
        total += status.st_size
    return total


def text_tensors(
    tensors: list[StoredTensor],
    config: ModelConfig,
    names: Sequence[tuple[str, str]],
    transposed: tuple[str, ...] = (),
    head: HeadSpec | None = None,
) -> tuple[list[StoredTensor], Counter[str]]:
    """Return the tensors of a model's text part, or of its `head` instead, under the names that they have in a model of
    text alone, and how many others there are of each kind that text does not use. `names`, `transposed`:
    ModelSpec's."""
    kept, others = [], Counter[str]()
    last = config.num_layers + config.draft_layers
    for one in tensors:
        name = text_name(one.name, config.more_than_text, names)
        if transposed and one.name.endswith(transposed):
            one = replace(one, shape=one.shape[::-1], transposed=True)
        layer = _OF_LAYER.match(name)
        if head is not None and head.skips(name):
            others["of the model itself"] += 1
        elif head is not None:
            kept.append(one if name == one.name else replace(one, name=name, within=one.name))
        elif name.startswith(DRAFTS):
            others["of layers that draft further tokens"] += 1
        elif config.more_than_text and not OF_TEXT.match(name):
            others["of other parts than text"] += 1
        elif layer is not None and config.num_layers <= int(layer[1]) < last:
            others["of layers that draft further tokens"] += 1
        else:
            kept.append(one if name == one.name else replace(one, name=name, within=one.name))
    return kept, others


OF_CACHES = {name.removeprefix("qkv_proj.") for name in KV_SCALE_NAMES if name.startswith("qkv_proj.")}
"""tensors named below qkv_proj that attention takes as they are: they are no part of a linear, and make none"""


def of_all_experts(name: str) -> tuple[str, str]:
    """Return the name of a linear of all experts and that of its tensor (`weight_scale`, ...), given the tensor's name
    in a checkpoint that holds all experts of a layer in one tensor; two empty texts for another."""
    found = _OF_ALL_EXPERTS.fullmatch(name)
    if found is None:
        return "", ""
    tensor = found[2] or "weight"
    return found[1], f"weight_{tensor}" if tensor in _OF_WEIGHTS else tensor


def linear_of(name: str) -> tuple[str, str]:
    """Return the name of the linear that a tensor belongs to, and that of the tensor (`weight`, `weight_scale`)."""
    of_all = of_all_experts(name)
    linear, _, tensor = name.rpartition(".")
    return of_all if of_all[0] else (linear, tensor)


def unstacked(tensors: list[StoredTensor], names: Mapping[str, InOne]) -> Iterator[StoredTensor]:
    """Yield the tensors, with each expert's in place of one of all experts [experts, rows, ...], under the names of all
    linears that have rows in it. `names`: by the linear's name in the file. Raises CheckpointError where there are
    other numbers of experts."""
    for one in tensors:
        linear, tensor = linear_of(one.name)
        if tensor in OF_CACHES:
            yield one
            continue
        held = names.get(linear) or names.get(f"model.{linear}")
        if held is None:
            yield one
        elif not held.experts:
            yield from (
                replace(one, name=f"{linear}.{tensor}", within=one.name, shape=_in_groups(one.shape, held.groups))
                for linear in held.linears
            )
        elif tensor != "weight_shape":  # that of all experts together
            yield from _each_expert(one, tensor, held)


def _in_groups(shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return a tensor's shape with its rows in `groups`, where there are any and they divide them."""
    if not groups or math.prod(shape) == 1 or shape[0] % groups:
        return shape
    return (groups, shape[0] // groups, *shape[1:])


def _each_expert(one: StoredTensor, tensor: str, held: InOne) -> Iterator[StoredTensor]:
    """Yield each expert's tensor; a single number is every expert's."""
    shared = math.prod(one.shape) == 1 and len(one.shape) < 2
    if not shared and one.shape[0] != held.experts:
        raise CheckpointError(
            f"tensor {one.name!r} in {one.file.name} has shape {list(one.shape)}, config.json asks for {held.experts} "
            "experts in front"
        )
    shape, size = (one.shape, 0) if shared else (one.shape[1:], one.num_bytes // held.experts)
    transposed = held.transposed and len(shape) == 2
    shape = shape[::-1] if transposed else shape
    for expert in range(held.experts):
        for linear in held.linears:
            name = f"{linear.format(expert)}.{tensor}"
            offset = one.offset + expert * size
            yield replace(one, name=name, shape=shape, offset=offset, within=one.name, transposed=transposed)


def stored_tensors(file: Path) -> list[StoredTensor]:
    """Return the tensors of one file in their order in it; reads the header alone. Raises CheckpointError if the file
    is truncated or not safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            heads = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            described = [(name, tuple(head.get_shape()), head.get_dtype()) for name, head in heads]
        with file.open("rb") as raw:
            offset = HEADER_LENGTH_BYTES + int.from_bytes(raw.read(HEADER_LENGTH_BYTES), "little")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read (truncated or not safetensors?): {error}") from None
    tensors = []
    for name, shape, dtype in described:
        if dtype not in TYPES and dtype not in PACKED_BITS:
            raise CheckpointError(f"tensor {name!r} in {file.name} is of type {dtype}, which is not known")
        tensors.append(StoredTensor(name, file, shape, dtype, offset))
        offset += tensors[-1].num_bytes  # safetensors refuses a file with gaps or overlaps
    return tensors
