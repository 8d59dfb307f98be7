"""Every tensor of public checkpoints is taken, or skipped and counted: layouts.json holds the names and shapes of their
index files, of which those of experts go up to sixteen.

`total_size` is what the index file says of all tensors, where that is known. In a name, {0-3,7} stands for numbers and
{a,b} for words. A shape may begin with a type; without one it is BF16.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import make_context

from headrace.layers.layer import Layer
from headrace.model_config import ModelConfig
from headrace.models import filling, loader
from headrace.models.checkpoint import checkpoint_files
from headrace.models.registry import served_entry
from headrace.models.schemes import linears_in_files
from headrace.planner.catalogue import catalogue

LAYOUTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("layouts.json").read_text())
LARGEST = 1 << 32
"""Bytes of a file, which is mapped into memory to read its header"""
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def names(pattern: str) -> Iterator[str]:
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = [[part] if place % 2 == 0 else list(listed(part)) for place, part in enumerate(parts)]
    yield from map("".join, itertools.product(*choices))


def listed(choices: str) -> Iterator[str]:
    for choice in choices.split(","):
        numbers = re.fullmatch(r"(\d+)-(\d+)", choice)
        yield from map(str, range(int(numbers[1]), int(numbers[2]) + 1)) if numbers else (choice,)


def write_headers(tensors: dict[str, list[Any]], folder: Path) -> tuple[int, int]:
    """Write files of safetensors that hold nothing but their headers, and an index; return how many tensors there
    are, and their bytes."""
    files: list[tuple[dict[str, Any], int]] = [({}, 0)]
    for pattern, shape in tensors.items():
        dtype, sizes = (shape[0], shape[1:]) if isinstance(shape[0], str) else ("BF16", shape)
        for name in names(pattern):
            header, offset = files.pop()
            end = offset + math.prod(sizes) * BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [offset, end]}
            files.append((header, end))
            if end > LARGEST:
                files.append(({}, 0))
    weight_map = {}
    for number, (header, size) in enumerate(files):
        encoded, path = json.dumps(header).encode(), folder / f"model-{number}.safetensors"
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + size)
        weight_map |= dict.fromkeys(header, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return len(weight_map), sum(size for _, size in files)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_tensor_is_taken_or_skipped(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    fields = layout["config"] if isinstance(layout["config"], dict) else catalogue()[layout["config"]].config
    count, size = write_headers(layout["tensors"], tmp_path)
    assert size == layout.get("total_size", size)
    entry = served_entry(fields["architectures"][0])
    assert entry is not None
    config = ModelConfig.from_dict({**fields, **layout.get("changes", {})}, defaults=entry.defaults)
    context = make_context(config, dtype=torch.bfloat16)
    model = loader.build_model(config, context)
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Layer)]
    headers, others = loader._text_headers(config)
    loader._read_as_stored(tmp_path, layers, headers)
    tensors_of = loader._headers(layers, headers)
    in_files = linears_in_files(tmp_path, tensors_of) if config.quantization else None
    loader.attach_schemes(config, layers, context, None, in_files)
    slots = loader.slots_of(layers, torch.device("meta"))
    found = filling.match_checkpoint(slots, tmp_path, loader.tensors_not_needed(config), tensors_of)
    assert dict(others) == layout.get("skipped", {})
    taken = {one.stored.within or one.stored.name for one in found.values()}
    of_old = sum("rotary_emb" in one.name for file in checkpoint_files(tmp_path) for one in headers(file))
    assert len(taken) + others.total() + of_old == count
