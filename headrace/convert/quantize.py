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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace import __version__
from headrace.convert.awq import Scaling, find_scalings
from headrace.convert.calibration import Calibration
from headrace.convert.gptq import round_by_gptq
from headrace.convert.pieces import Piece, Shard, index, plan_shards, quantization_config
from headrace.convert.rounding import FP8_MAX, Rounded
from headrace.convert.texts import Texts
from headrace.convert.watch import Watch
from headrace.convert.weight_scheme import WeightScheme
from headrace.errors import CheckpointError, ConfigError, UnsupportedModelError
from headrace.model_config import ModelConfig, read_object
from headrace.model_spec import ModelSpec
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
    moved: dict[int, float]
    """how far hidden states of held-out text are from the old model's behind each layer; empty: not measured"""
    perplexity: tuple[float, ...]
    """of held-out text, before and after; empty: not measured"""
    nearest: tuple[str, ...]
    """linears that GPTQ could do nothing for, which were rounded to nearest"""
    unreached: tuple[str, ...]
    """experts that no calibration text went to"""
    notes: tuple[str, ...]
    """what the user should know besides"""


def quantize(
    folder: Path, output: Path, scheme: WeightScheme, device: torch.device, texts: Texts | None = None
) -> Outcome:
    """Write the model in `folder` to `output` in the scheme's format. `texts`: to calibrate with, and to measure with;
    None: nothing is measured. Raises ConfigError for a model that is quantized already, a folder that holds something
    else, a disk that is too small, and a scheme that needs text, before anything is written."""
    config = read_served_config(folder)
    if config.quantization:
        method = config.quantization.get("quant_method", "its own format")
        raise ConfigError(f"{folder} is quantized already ({method}); accepted: a checkpoint of 16 or 32 bits")
    if scheme.calibrated and (texts is None or not len(texts.calibration)):
        raise ConfigError(f"{scheme.name} needs calibration text: --num-calib-data must be above 0")
    spec = describe(config)
    shards = plan_shards(folder, config, spec, scheme)
    calibration, notes = _calibration(folder, output, config, shards, scheme, device, texts)
    record = _begin(output, _identity(folder, scheme, device, texts))
    done: dict[str, Any] = record["files"]
    waiting = [shard for shard in shards if shard.file not in done]
    _check_room(output, sum(shard.num_bytes for shard in waiting))
    if not done:  # before any file that would make the folder look like another's
        _write_text(output / RECORD, json.dumps(record, indent=1) + "\n")
    if calibration is not None and not ("perplexity" in record and not waiting):
        progress = _Progress(sum(shard.source_bytes for shard in shards), len(shards))
    else:
        calibration, progress = None, _Progress(sum(shard.source_bytes for shard in waiting), len(shards))
    run = _Run(output, scheme, device, spec, calibration)
    # the embedding, which is of no layer, is what the first layer begins with
    for shard in sorted(shards, key=lambda shard: run.walks(shard)):
        if shard.file in done and calibration is None:
            continue
        made = run.make(shard, done.get(shard.file))
        if shard.file not in done:
            done[shard.file] = made
            _write_text(output / RECORD, json.dumps(record, indent=1) + "\n")
        progress.reached(shard, len(done))
    if calibration is not None:
        record["perplexity"] = [_short(value) for value in calibration.perplexity]
        _write_text(output / RECORD, json.dumps(record, indent=1) + "\n")
    if not (output / "config.json").exists():
        _finish(folder, output, shards, scheme)
    shutil.rmtree(output / PARTIAL, ignore_errors=True)
    return _outcome(shards, record, len(waiting), notes)


def _outcome(shards: list[Shard], record: dict[str, Any], made: int, notes: list[str]) -> Outcome:
    files = [(shard, record["files"][shard.file]) for shard in shards]
    return Outcome(
        errors={name: error for _, file in files for name, error in file["errors"].items()},
        kept={piece.linear: piece.why for shard in shards for piece in shard.pieces if piece.why},
        bytes_before=sum(shard.source_bytes for shard in shards),
        bytes_after=sum(shard.num_bytes for shard in shards),
        made=made,
        moved={shard.layer: file["moved"] for shard, file in files if "moved" in file},
        perplexity=tuple(record.get("perplexity", ())),
        nearest=tuple(name for _, file in files for name in file.get("nearest", ())),
        unreached=tuple(name for _, file in files for name in file.get("unreached", ())),
        notes=tuple(notes),
    )


def _calibration(
    folder: Path, output: Path, config: ModelConfig, shards: list[Shard], scheme: WeightScheme, device: torch.device,
    texts: Texts | None,
) -> tuple[Calibration | None, list[str]]:  # fmt: skip
    """Return what takes texts through the layers, if there are any, and what the user should know."""
    if texts is None:
        return None, []
    if not scheme.calibrated:
        texts = Texts(texts.calibration[:0], texts.held_out)
    try:
        return Calibration(folder, output, config, quantization_config(shards, scheme), texts, device), []
    except (ConfigError, UnsupportedModelError) as error:
        if scheme.calibrated:
            raise ConfigError(f"{scheme.name} takes text through one layer at a time, and cannot: {error}") from None
        return None, [f"Hidden states and perplexity were not measured: {error}"]


def _identity(folder: Path, scheme: WeightScheme, device: torch.device, texts: Texts | None) -> dict[str, Any]:
    """Return what a run that goes on must have in common with the one that began."""
    files = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in checkpoint_files(folder)}
    identity = {"headrace": __version__, "scheme": scheme.identity(), "device": device.type, "source": files}
    if texts is not None:  # sums depend on the number of threads
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        identity |= {"texts": texts.digest, "device": f"{device.type}, {name}"}
    return identity


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


@dataclass(frozen=True)
class _Run:
    """Makes the files of a checkpoint."""

    output: Path
    scheme: WeightScheme
    device: torch.device
    spec: ModelSpec
    calibration: Calibration | None

    def walks(self, shard: Shard) -> int:
        """Return the number of the layer whose file it is, if texts go through it; else -1."""
        return shard.layer if self.calibration is not None and shard.layer < len(self.spec.layers) else -1

    def make(self, shard: Shard, done: dict[str, Any] | None) -> dict[str, Any]:
        """Write one file of the checkpoint, unless it is `done`, and take texts through its layer; return what the
        record says of it."""
        number, watch, largest = self.walks(shard), None, [0.0, 0.0]
        if number >= 0 and self.calibration is not None:
            watch = Watch(self.scheme.act_order) if done is None and self.scheme.calibrated else None
            largest = self.calibration.watch(number, watch)
        made = self._write(shard, watch, largest) if done is None else done
        del watch  # before another layer is loaded
        if number >= 0 and self.calibration is not None:
            moved = self.calibration.follow(number)
            made = made if moved is None else {**made, "moved": _short(moved)}
        return made

    def _write(self, shard: Shard, watch: Watch | None, largest: list[float]) -> dict[str, Any]:
        tensors: dict[str, Tensor] = {}
        made: dict[str, Any] = {"bytes": shard.num_bytes, "errors": {}}
        scalings: dict[str, Scaling] = {}
        if self.scheme.algorithm == "awq" and watch is not None:
            pieces = {piece.own: piece for piece in shard.pieces}
            layer, prefix = self.spec.layers[shard.layer], f"model.layers.{shard.layer}."
            scalings = find_scalings(layer, prefix, pieces, watch, self.scheme, self.device)
        for piece in shard.pieces:
            with _named(piece):
                values = piece.read()
                if piece.own in scalings:
                    values = scalings[piece.own].applied(values.to(self.device))
                if not piece.rounded:
                    tensors[piece.name] = values.cpu().contiguous()
                    continue
                found, by_algorithm = self._rounded(piece, values.to(self.device), watch)
            of_linear = self.scheme.written(found)
            tensors |= {f"{piece.linear}.{name}": tensor.cpu().contiguous() for name, tensor in of_linear.items()}
            made["errors"][piece.linear] = _short(float((found.lost / found.total.clamp_min(1e-300)).sqrt()))
            if not by_algorithm:
                made.setdefault("nearest", []).append(piece.linear)
        for name, value in zip(shard.kv_scales, largest, strict=False):
            tensors[name] = torch.tensor([value / FP8_MAX or 1.0])
        if watch is not None and (unreached := watch.unreached()):
            made["unreached"] = unreached

        def save(file: Path) -> None:
            save_file(tensors, file, metadata={"format": "pt"})

        _replace(self.output / shard.file, save)
        return made

    def _rounded(self, piece: Piece, weight: Tensor, watch: Watch | None) -> tuple[Rounded, bool]:
        """Return two things: what a weight is rounded to, and whether that is what the scheme's algorithm makes of
        it."""
        if self.scheme.algorithm != "gptq":
            return self.scheme.round(weight), True
        factor = None if watch is None else watch.of(piece.own.removesuffix(".weight")).factor
        if factor is None:
            return self.scheme.round(weight), False
        return round_by_gptq(weight, factor, *self.scheme.blocks(tuple(weight.shape)), self.scheme.grid), True


@contextmanager
def _named(piece: Piece) -> Iterator[None]:
    """Put the name of a tensor in front of what is wrong with it."""
    try:
        yield
    except (CheckpointError, SafetensorError, OSError) as problem:
        raise CheckpointError(f"{piece.name} in {piece.stored.file.name}: {problem}") from None


def _short(value: float) -> float:
    """Return a measured number with as many digits as all runs agree on."""
    return float(f"{value:.4g}")  # the order of sums depends on the number of threads


def _replace(path: Path, write: Callable[[Path], object]) -> None:
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
            _replace(output / file.name, lambda place, file=file: shutil.copyfile(file, place))
    names = {}
    for shard in shards:
        with safe_open(output / shard.file, framework="pt") as opened:
            names[shard.file] = [*opened.keys()]
    _write_text(output / INDEX, index(shards, names))
    config = read_object(folder / "config.json") | {"quantization_config": quantization_config(shards, scheme)}
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
