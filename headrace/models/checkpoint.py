"""Reads the tensors of a folder of safetensors files, whole or in slices. Pickled weights are never read.

Knows the files; not what their tensors are for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError

READABLE_DTYPES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
"""and their bytes"""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in an open file; `data[slices]` reads a part of it into memory."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    data: Any

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * READABLE_DTYPES.get(self.dtype, 1)


def checkpoint_files(folder: Path) -> list[Path]:
    """model.safetensors, else the files its index names, else every other .safetensors file there.

    Raises CheckpointError if there is none, or if the index cannot be read or names a file that does not exist.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        found = f" (found {pickled[0]}: pickled weights are not read; convert them to safetensors)" if pickled else ""
        raise CheckpointError(f"{folder} holds no .safetensors file{found}")
    return files


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from None
    for name in names:
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index.name} names {name}, which does not exist in {index.parent}")
    return [index.parent / name for name in names]


def stored_tensors(file: Path) -> Iterator[StoredTensor]:
    """The tensors of one file, in their order in it. Raises CheckpointError on a file cut short or no safetensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                data = opened.get_slice(name)
                yield StoredTensor(name, file, tuple(data.get_shape()), data.get_dtype(), data)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read (truncated or not safetensors?): {error}") from None
