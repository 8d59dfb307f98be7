"""Writes a quantized checkpoint file by file, so that a run that was killed goes on where it was.

A file of the new checkpoint is made in a folder of its own, brought to the disk, and moved; then the record names it,
with the errors of its weights. The record (`quantization.json`) is written first, says of what and how the checkpoint
is made, and stays when all is done, as its report. config.json, without which no engine takes a folder for a model,
comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headrace import __version__
from headrace.convert.pieces import Shard, index, plan_shards, stated
from headrace.convert.schemes import WeightScheme
from headrace.errors import CheckpointError, ConfigError
from headrace.model_config import read_object
from headrace.models.checkpoint import checkpoint_files
from headrace.models.served import describe, read_served_config

RECORD = "quantization.json"
PARTIAL = ".partial"
"""the folder in which files are made"""
INDEX = "model.safetensors.index.json"
BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")
"""files that a checkpoint keeps beside its weights"""
EVERY_SECONDS = 5.0
"""between lines about progress, where nobody watches"""


@dataclass(frozen=True)
class Outcome:
    """Holds what the command reports."""

    errors: dict[str, float]
    """of each weight that was rounded, by its linear: the norm of what changed over the norm of all"""
    kept: dict[str, str]
    """the linears that keep their type, and why"""
    bytes_before: int
    bytes_after: int
    made: int
    """files of weights that this run made; the others were there"""


def quantize(folder: Path, output: Path, scheme: WeightScheme, device: torch.device) -> Outcome:
    """Write the model in `folder` to `output` in the scheme's format. Raises ConfigError for a model that is quantized
    already, a folder that holds something else, and a disk that is too small, before anything is written."""
    config = read_served_config(folder)
    if config.quantization:
        method = config.quantization.get("quant_method", "its own format")
        raise ConfigError(f"{folder} is quantized already ({method}); accepted: a checkpoint of 16 or 32 bits")
    shards = plan_shards(folder, config, describe(config), scheme)
    record = _begin(output, _identity(folder, scheme, device))
    done: dict[str, Any] = record["files"]
    waiting = [shard for shard in shards if shard.file not in done]
    _check_room(output, sum(shard.num_bytes for shard in waiting))
    if not done:  # before any file that would make the folder look like another's
        _write_text(output / RECORD, json.dumps(record, indent=1) + "\n")
    progress = _Progress(sum(shard.source_bytes for shard in waiting), len(shards))
    for shard in waiting:
        done[shard.file] = _write_shard(shard, output, scheme, device)
        _write_text(output / RECORD, json.dumps(record, indent=1) + "\n")
        progress.reached(shard, len(done))
    if not (output / "config.json").exists():
        _finish(folder, output, shards, scheme)
    shutil.rmtree(output / PARTIAL, ignore_errors=True)
    return Outcome(
        errors={name: error for file in done.values() for name, error in file["errors"].items()},
        kept={piece.linear: piece.why for shard in shards for piece in shard.pieces if piece.why},
        bytes_before=sum(shard.source_bytes for shard in shards),
        bytes_after=sum(shard.num_bytes for shard in shards),
        made=len(waiting),
    )


def _identity(folder: Path, scheme: WeightScheme, device: torch.device) -> dict[str, Any]:
    """Return what a run that goes on must have in common with the one that began."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in checkpoint_files(folder)}
    return {"headrace": __version__, "scheme": scheme.described(), "device": device.type, "source": files}


def _begin(output: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the record of `output`, a new one if the folder is empty. Raises ConfigError if it holds anything else."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output-dir {output} is a file; accepted: a folder that is new or empty")
    path = output / RECORD
    if path.exists():
        record = read_object(path, ConfigError)
        if not isinstance(record.get("files"), dict) or not isinstance(record.get("made_of"), dict):
            raise ConfigError(f"{path} is no record of `headrace quantize`; accepted: a folder that is new or empty")
        differing = [name for name, value in identity.items() if record["made_of"].get(name) != value]
        if differing:
            raise ConfigError(
                f"--output-dir {output} was begun with another {' and '.join(differing)}; accepted: the same again, "
                "or a folder that is new or empty"
            )
        return record
    if output.exists() and any(file.name != PARTIAL for file in output.iterdir()):
        raise ConfigError(f"--output-dir {output} holds other files; accepted: a folder that is new or empty")
    return {"made_of": identity, "files": {}}


def _check_room(output: Path, needed: int) -> None:
    """Raise ConfigError if the disk has less room than what is still to be written."""
    place = next(place for place in (output, *output.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ConfigError(
            f"--output-dir {output} needs {needed / 1e9:.1f} GB, and its disk has {free / 1e9:.1f} GB left; "
            "nothing was written"
        )
    output.mkdir(parents=True, exist_ok=True)


def _write_shard(shard: Shard, output: Path, scheme: WeightScheme, device: torch.device) -> dict[str, Any]:
    """Write one file of the checkpoint; return what the record says of it."""
    tensors: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    for piece in shard.pieces:
        try:
            values = piece.read()
            made, error = piece.written(values.to(device) if piece.rounded else values, scheme)
        except (CheckpointError, SafetensorError, OSError) as problem:
            raise CheckpointError(f"{piece.name} in {piece.stored.file.name}: {problem}") from None
        tensors |= {name: tensor.cpu().contiguous() for name, tensor in made.items()}
        if error is not None:
            errors[piece.linear] = float(f"{error:.4g}")  # the order of sums depends on the number of threads

    def save(file: Path) -> None:
        save_file(tensors, file, metadata={"format": "pt"})

    _replace(output / shard.file, save)
    return {"bytes": shard.num_bytes, "errors": errors}


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Make a file that is whole or not there, also after the power fails."""
    partial = path.parent / PARTIAL / path.name
    try:
        partial.parent.mkdir(exist_ok=True)
        write(partial)
        partial.chmod(0o644)  # safetensors lets nobody else read it
        _to_disk(partial)
        os.replace(partial, path)
        _to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written: {error}; the same command goes on from here") from None


def _to_disk(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_text(path: Path, text: str) -> None:
    def write(file: Path) -> None:
        file.write_text(text, encoding="utf-8")

    _replace(path, write)


def _finish(folder: Path, output: Path, shards: list[Shard], scheme: WeightScheme) -> None:
    """Write what is beside the weights: tokenizer and templates as they are, the index, and last config.json."""
    for file in sorted({file for pattern in BESIDE for file in folder.glob(pattern)}):
        if file.is_file() and file.name not in ("config.json", RECORD) and not file.name.endswith(".index.json"):
            _replace(output / file.name, lambda place, file=file: shutil.copyfile(file, place))  # type: ignore[misc]
    names = {}
    for shard in shards:
        with safe_open(output / shard.file, framework="pt") as opened:
            names[shard.file] = [*opened.keys()]
    _write_text(output / INDEX, index(shards, names))
    config = read_object(folder / "config.json") | {"quantization_config": stated(shards, scheme)}
    _write_text(output / "config.json", json.dumps(config, indent=2) + "\n")


class _Progress:
    """Tells on stderr how far a run is, and how long it will take."""

    def __init__(self, total: int, files: int) -> None:
        self.total, self.files, self.read = total, files, 0
        self.start = self.told = time.monotonic()

    def reached(self, shard: Shard, done: int) -> None:
        """Take note of a file that is written."""
        self.read += shard.source_bytes
        now = time.monotonic()
        if now - self.told < EVERY_SECONDS and not sys.stderr.isatty():
            return
        self.told = now
        left = (now - self.start) * (self.total - self.read) / max(1, self.read)
        print(f"{done} of {self.files} files, {self.read / max(1, self.total):.0%}, {left:.0f} s left", file=sys.stderr)
