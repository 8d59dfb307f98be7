"""Finds the config.json that a model's name stands for: in the built-in catalogue, a folder, or the Hugging Face hub's
local cache. Nothing is downloaded.

The catalogue (catalogue.json) holds fields of public config files, each entry with its source and the total of
parameters that its publisher gives.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import ConfigError
from headrace.hub import is_file, local_model_folder, local_path
from headrace.model_config import read_config
from headrace.planner.shapes import ModelShape, shape_of

DATA = Path(__file__).with_name("catalogue.json")


class _Words(msgspec.Struct):
    formats: dict[str, str]
    variants: set[str]


_WORDS = msgspec.json.decode(Path(__file__).with_name("checkpoint_words.json").read_bytes(), type=_Words)
FORMAT_WORDS = _WORDS.formats
"""Words of a checkpoint's name that say in which format its linears are."""
VARIANT_WORDS = _WORDS.variants
"""Words of a checkpoint's name that do not change the model's shape."""


@dataclass(frozen=True)
class CatalogueEntry:
    """Describes one model of the catalogue."""

    name: str
    aliases: tuple[str, ...]
    source: str
    """address of config.json"""
    parameters: int
    """in all, as published"""
    parameters_source: str
    config: dict[str, Any]
    """the fields of config.json that are read here"""
    note: str = ""


@dataclass(frozen=True)
class CheckpointConfig:
    """Holds a checkpoint's config.json, and what the checkpoint's name says beside it."""

    name: str
    config: dict[str, Any]
    source: str
    """address or path of config.json"""
    weight_format: str | None = None
    """as the name says; None: it says nothing"""
    fp8_kv_cache: bool = False
    """whether the name says that the checkpoint brings scales for an fp8 cache"""

    @property
    def shape(self) -> ModelShape:
        shape = shape_of(self.config, self.name, self.source)
        own = shape.weight_format
        if self.fp8_kv_cache or self.weight_format not in (None, own):
            return shape.in_format(self.weight_format or own, self.fp8_kv_cache)
        return shape


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Read the entries of the catalogue, by name."""
    return {entry.name: entry for entry in msgspec.json.decode(DATA.read_bytes(), type=list[CatalogueEntry])}


def find_model(text: str) -> ModelShape:
    """Find the shape of the model that `text` names. Raises ConfigError, with similar names, where there is none."""
    return find_config(text).shape


def find_config(text: str) -> CheckpointConfig:
    """Find the config.json that `text` names: a file, a folder with one (`demo` is the embedded model), a hub id in the
    local cache, or else a name of the catalogue, whatever its case, owner or variant
    (`meta-llama/Llama-3.1-8B-Instruct`).

    Raises ConfigError, with similar names, where there is none.
    """
    path = _local(text) or _cached(text)
    if path is not None:
        return CheckpointConfig(text, read_config(path, ConfigError), str(path))
    key, words = _key(text)
    for entry in catalogue().values():
        if key in (_key(name)[0] for name in (entry.name, *entry.aliases)):
            weight_format = next((FORMAT_WORDS[word] for word in words if word in FORMAT_WORDS), None)
            fp8_kv_cache = "fp8" in words and "kv" in words
            return CheckpointConfig(entry.name, entry.config, entry.source, weight_format, fp8_kv_cache)
    near = difflib.get_close_matches(key, catalogue(), n=4, cutoff=0.5)
    raise ConfigError(
        f"model {text!r} is no folder with a config.json, no Hugging Face id in the local cache, and no name of the "
        f"catalogue; {'near names' if near else 'it has'}: {', '.join(near or catalogue())}"
    )


def _key(text: str) -> tuple[str, list[str]]:
    """The model, and what its name says of this checkpoint: (llama-3.1-8b, [instruct, fp8, kv]) of
    `amd/Llama-3.1-8B-Instruct-FP8-KV`."""
    words = text.rstrip("/").rpartition("/")[2].lower().replace("_", "-").replace(" ", "-").split("-")
    aside = FORMAT_WORDS.keys() | VARIANT_WORDS
    return "-".join(word for word in words if word not in aside), [word for word in words if word in aside]


def _local(text: str) -> Path | None:
    """config.json by the name of its folder, or by its own."""
    folder, path = local_model_folder(text), local_path(text)
    if folder is not None:
        return folder / "config.json"
    return path if path is not None and path.suffix == ".json" and is_file(path) else None


def _cached(model: str) -> Path | None:
    """config.json of a hub id that the hub's cache holds."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    try:
        path = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
    except (OSError, ValueError):
        return None
    return path if is_file(path) else None
