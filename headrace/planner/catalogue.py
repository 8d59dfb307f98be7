"""Finds the config.json that a model's name stands for, and counts it: the built-in catalogue, a folder or file, or the
Hugging Face hub's local cache. Nothing is downloaded.

The catalogue (catalogue.json) holds fields of public config files, each entry with its source and the total of
parameters that its publisher gives.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.hub import is_file, local_model_folder, local_path
from headrace.model_config import read_object
from headrace.planner.shapes import ModelShape, in_format, shape_of

DATA = Path(__file__).with_name("catalogue.json")
FORMAT_WORDS = {
    "fp8": "fp8",
    "mxfp4": "mxfp4",
    "int8": "int8",
    "w8a8": "int8",
    "quantized.w8a8": "int8",
    "int4": "int4",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "quantized.w4a16": "int4",
    "bf16": "bf16",
}
"""Words of a checkpoint's name that say in which format its linears are"""
VARIANT_WORDS = {"meta", "base", "instruct", "it", "chat", "hf", "preview", "kv", "dynamic", "quark"}
RELEASE_WORDS = {"v0.1", "v0.3", "0324", "0528"}
"""Releases of the same shape as the catalogue's"""


@dataclass(frozen=True)
class CatalogueEntry:
    name: str
    aliases: tuple[str, ...]
    source: str
    """where config.json stands"""
    parameters: int
    """in all, as published"""
    parameters_source: str
    config: dict[str, Any]
    """the fields of config.json that are read here"""
    note: str = ""


@dataclass(frozen=True)
class FoundConfig:
    name: str
    config: dict[str, Any]
    source: str
    """address or path of config.json"""
    weight_format: str | None = None
    """what the name says of it, beside config.json; None: nothing"""
    fp8_kv_cache: bool = False
    """the name says that scales for an fp8 cache come with it"""


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """name -> entry"""
    entries = [CatalogueEntry(**{**raw, "aliases": tuple(raw["aliases"])}) for raw in json.loads(DATA.read_text())]
    return {entry.name: entry for entry in entries}


def find_model(text: str) -> ModelShape:
    """The shape of what `text` names. Raises ConfigError, with near names, where it names nothing we have."""
    found = find_config(text)
    shape = shape_of(found.config, found.name, found.source)
    if found.weight_format not in (None, shape.weight_format):
        assert found.weight_format is not None
        shape = in_format(shape, found.weight_format)
    return in_format(shape, shape.weight_format, fp8_kv_cache=True) if found.fp8_kv_cache else shape


def find_config(text: str) -> FoundConfig:
    """In this order: a config.json or a folder with one (`demo` is the embedded model), a hub id in the local cache, a
    name of the catalogue, whatever its case, owner or variant (`meta-llama/Llama-3.1-8B-Instruct`).

    Raises ConfigError, with near names, where there is none.
    """
    local = _local(text) or _cached(text)
    if local is not None:
        return FoundConfig(text, read_object(local, ConfigError), str(local))
    key, words = _key(text)
    for entry in catalogue().values():
        if key in (_key(name)[0] for name in (entry.name, *entry.aliases)):
            formats = [FORMAT_WORDS[word] for word in words if word in FORMAT_WORDS]
            return FoundConfig(
                entry.name, entry.config, entry.source, next(iter(formats), None), "fp8" in words and "kv" in words
            )
    near = difflib.get_close_matches(key, catalogue(), n=4, cutoff=0.5)
    raise ConfigError(
        f"model {text!r} is no folder with a config.json, no Hugging Face id in the local cache, and no name of the "
        f"catalogue; {'near names' if near else 'it has'}: {', '.join(near or catalogue())}"
    )


def _key(text: str) -> tuple[str, list[str]]:
    """`amd/Llama-3.1-8B-Instruct-FP8-KV` -> (llama-3.1-8b, [fp8, kv]): the model, and words about this checkpoint of
    it."""
    words = text.rstrip("/").rpartition("/")[2].lower().replace("_", "-").replace(" ", "-").split("-")
    aside = FORMAT_WORDS.keys() | VARIANT_WORDS | RELEASE_WORDS
    return "-".join(word for word in words if word not in aside), [word for word in words if word in aside]


def _local(text: str) -> Path | None:
    """config.json by the name of its folder, or by its own."""
    folder, path = local_model_folder(text), local_path(text)
    if folder is not None:
        return folder / "config.json"
    return path if path is not None and path.suffix == ".json" and is_file(path) else None


def _cached(model: str) -> Path | None:
    """config.json of a hub id where the hub's cache holds it."""
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    try:
        path = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
    except (OSError, ValueError):
        return None
    return path if is_file(path) else None
