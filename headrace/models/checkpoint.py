"""Reads the tensors of a folder of safetensors files, whole or in slices. Pickled weights are never read."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.model_config import read_object

ITEM_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I16": 2, "I32": 4, "I64": 8}
"""Bytes of an element, for safetensors' types with more than one"""


@dataclass(frozen=True)
class StoredTensor:
    """Stands for a tensor in an open file; `data[slices]` reads a part of it into memory."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    data: Any

    @property
    def num_bytes(self) -> int:
        """The tensor's size in the file."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 1)


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
        hint = f" (found {pickled[0]}: pickled weights are not read; convert them to safetensors)" if pickled else ""
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


def stored_tensors(file: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of one file in their order in it. Raises CheckpointError if the file is truncated or not
    safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                data = opened.get_slice(name)
                yield StoredTensor(name, file, tuple(data.get_shape()), data.get_dtype(), data)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read (truncated or not safetensors?): {error}") from None
