"""Reads the facts that the engine needs from a Hugging Face config.json, and checks each value as it is read.

Names that differ between families are normalized here; what only one family reads is left to models/descriptions.py.
Planner and server read this too, so it imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import ModelNotFoundError, UnsupportedModelError, UserError
from headrace.pooling import Pooling

MOST = 2**31 - 1
"""The largest size: what a 32-bit index reaches, so that products of a few sizes stay finite"""
TIED = "tie_word_embeddings"
OTHER_PARTS = ("text_config", "vision_config", "audio_config", "vision_tower", "visual")
"""Fields of which a model of more than text has at least one"""
RENAMED = {
    "hidden_size": ("n_embd", "n_embed"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "hidden_act": ("activation_function",),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
"""Fields by the names that most families give them -> what GPT-2's kin, OPT and Falcon call them"""
LARGEST = sys.float_info.max
MOST_LAYERS = 10_000
"""Bounds the loops over layers, which a wild number must not reach"""

BESIDE = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files beside a config.json that says nothing of quantization -> the `quant_method` of their tool (ModelOpt,
AutoGPTQ, AutoAWQ)"""
BLOCKS = b'_proj_blocks"'
"""what names of tensors end in that hold experts in MXFP4 as gpt-oss has them"""


@dataclass(frozen=True)
class Fields:
    """Holds a JSON object of config.json. Its methods raise UnsupportedModelError, which names the field, its value and
    what is accepted; a field that is null counts as absent."""

    values: dict[str, Any]
    where: str
    """`config.json of LlamaForCausalLM`"""
    inside: str = ""
    """prefix of each name in errors: `rope_scaling.`"""

    def __bool__(self) -> bool:
        return bool(self.values)

    def changed(self, changes: dict[str, Any]) -> Fields:
        """Return the object with other values for some names."""
        return replace(self, values={**self.values, **changes})

    def refusal(self, name: str, accepted: str) -> UnsupportedModelError:
        """Return the error for a field, such as: config.json of X: `vocab_size` is "abc"; must be an integer."""
        if name not in self.values:
            return UnsupportedModelError(f"{self.where} lacks `{self.inside}{name}`")
        shown = json.dumps(self.values[name], default=str)
        said = f"{self.where}: `{self.inside}{name}` is {shown:.80}; must be {accepted}"
        return UnsupportedModelError(said, field=f"{self.inside}{name}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MOST) -> int:
        """Return an integer; a whole number may be written as a float."""
        value = self._value(name, default)
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if not _is_integer(whole) or not minimum <= whole <= maximum:
            raise self.refusal(name, f"an integer from {minimum} to {maximum}")
        return int(whole)

    def optional(self, name: str) -> int | None:
        """Return an integer of at least 1, or None where there is none."""
        return None if self.values.get(name) is None else self.integer(name)

    def number(
        self, name: str, default: float | None = None, above: float = -LARGEST, maximum: float = LARGEST
    ) -> float:
        """Return a finite number."""
        value = self._value(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= maximum:
            low = "" if above == -LARGEST else f" above {above:g}"
            raise self.refusal(name, f"a finite number{low}{'' if maximum == LARGEST else f', at most {maximum:g}'}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.refusal(name, "a text")
        return value

    def object(self, name: str) -> Fields:
        """Return an object, empty where there is none."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return Fields(value, self.where, f"{self.inside}{name}.")

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty where there is none."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refusal(name, "a list of texts")
        return value

    def integers(self, name: str, least: int = 0) -> list[int]:
        """Return a list of at least `least` integers; it is empty where there is none and `least` is 0."""
        value = self._value(name, [] if least == 0 else None)
        if not isinstance(value, list) or not all(map(_is_integer, value)) or len(value) < least:
            raise self.refusal(name, f"a list of at least {least} integers" if least else "a list of integers")
        return value

    def token_ids(self, name: str) -> list[int]:
        """Return token ids, which may be given as one or as a list."""
        value = self._value(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(map(_is_integer, ids)):
            raise self.refusal(name, "a token id or a list of them")
        return ids

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with those of RENAMED under their usual names too, where these have no value."""
    found = dict(values)
    for usual, others in RENAMED.items():
        given = next((values[name] for name in others if values.get(name) is not None), None)
        if given is not None and values.get(usual) is None:
            found[usual] = given
    return found


def is_more_than_text(raw: Mapping[str, Any]) -> bool:
    """Tell whether a config.json is of a model that takes more than text."""
    return any(name in raw for name in OTHER_PARTS)


def text_part(fields: Fields) -> Fields:
    """Return the fields of a model's text part, under their usual names too: those of `text_config`, if there is one,
    before those around it."""
    inner = {name: value for name, value in fields.object("text_config").values.items() if value is not None}
    if not inner:
        return replace(fields, values=_renamed(fields.values))
    outer = {name: value for name, value in fields.values.items() if name != "text_config"}
    own: dict[str, Any] = {"architectures": outer.get("architectures")}
    if True in (outer.get(TIED), inner.get(TIED)):  # tools write it in either place
        own[TIED] = True
    return replace(fields, values=_renamed({**outer, **inner, **own}))


def num_layers(fields: Fields) -> int:
    """Return the number of layers."""
    return fields.integer("num_hidden_layers", maximum=MOST_LAYERS)


def head_dim(fields: Fields) -> int:
    """Return `head_dim`, which is the hidden size divided by the heads where it is not given."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if fields.values.get("head_dim") is None and heads > hidden:
        raise fields.refusal("num_attention_heads", f"at most hidden_size ({hidden}) where `head_dim` is not given")
    return fields.integer("head_dim", hidden // heads)


def read_object(path: Path, error_class: type[UserError] = ModelNotFoundError) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `error_class`, whose message is one line that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_class(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise error_class(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise error_class(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_config(path: Path, error_class: type[UserError] = ModelNotFoundError) -> dict[str, Any]:
    """Return config.json. Older exports keep the quantization in a file beside it, one of BESIDE, which is then its
    `quantization_config`; newer ones of ModelOpt keep there what config.json does not repeat. Where nothing is said,
    tensors' names may tell. Raises `error_class` as `read_object` does."""
    raw = read_object(path, error_class)
    if held := quantization_of(Fields(raw, "config.json")):
        beside = path.with_name("hf_quant_config.json")
        if "quant_algo" not in held or "quantization" in held or not os.path.lexists(beside):
            return raw
        more = Fields(read_object(beside, error_class), beside.name).object("quantization").values
        if more.get("quant_algo") != held["quant_algo"] or "group_size" not in more:
            return raw
        return {**raw, "quantization_config": {"group_size": more["group_size"], **held}}
    for name, method in BESIDE.items():
        if os.path.lexists(beside := path.with_name(name)):
            return {**raw, "quantization_config": {"quant_method": method, **read_object(beside, error_class)}}
    return {**raw, "quantization_config": {"quant_method": "mxfp4"}} if _holds_blocks(path.parent) else raw


def _holds_blocks(folder: Path) -> bool:
    """Tell whether the names of a folder's tensors say MXFP4, whose exports may leave that out of config.json."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    try:
        if not single.exists():
            return BLOCKS in index.read_bytes()
        with single.open("rb") as file:
            return BLOCKS in file.read(int.from_bytes(file.read(8), "little") & MOST)
    except OSError:  # the loader says what is wrong with it
        return False


def quantization_of(fields: Fields) -> dict[str, Any]:
    """Return the object of config.json that says how weights are quantized, under its old name too; empty: none."""
    return fields.object("quantization_config").values or fields.object("compression_config").values


@dataclass(frozen=True)
class ModelConfig:
    """Holds what the engine reads of a model's config.json and generation_config.json."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str
    """float16, bfloat16 or float32, as the checkpoint says"""
    bos_token_id: int | None
    """None also where it lies outside the vocabulary"""
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None = None
    more_than_text: bool = False
    """The model has other parts, such as an image encoder, which text does not use"""
    draft_layers: int = 0
    """layers behind the others that a checkpoint may hold to draft further tokens"""
    pooling: Pooling | None = None
    """how it makes vectors or scores; None: it generates text"""
    length_field: str = "max_position_embeddings"
    """the field that says how many positions there are; another one where training had shorter texts"""
    generation: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """generation_config.json as it is"""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json, with what it says of the text part in front"""

    @property
    def fields(self) -> Fields:
        """config.json, whose values are checked as they are read."""
        return Fields(self.raw, f"config.json of {self.architecture}")

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        defaults: Mapping[str, Any] = MappingProxyType({}),
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelConfig:
        """Read the config of a model's folder; `defaults`: values of fields that it may leave out; `overrides`: values
        that replace its own. Raises ModelNotFoundError where a file is missing or cannot be read,
        UnsupportedModelError where a field is missing or has no valid value."""
        generation = folder / "generation_config.json"
        raw = {**read_config(folder / "config.json"), **overrides}
        return cls.from_dict(raw, read_object(generation) if os.path.lexists(generation) else {}, defaults)

    @classmethod
    def from_dict(
        cls,
        raw: dict[str, Any],
        generation: dict[str, Any] | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> ModelConfig:
        """Read the config from the contents of config.json and generation_config.json, whose eos ids are added."""
        generation = generation or {}
        more_than_text = is_more_than_text(raw)
        raw = {**defaults, **text_part(Fields(raw, "config.json")).values}
        architectures = Fields(raw, "config.json").texts("architectures")
        if not architectures:
            raise UnsupportedModelError("config.json names no architecture (field `architectures`)")
        fields = Fields(raw, f"config.json of {architectures[0]}")
        num_heads, vocab_size = fields.integer("num_attention_heads"), fields.integer("vocab_size")
        eos = [
            token_id
            for source in (fields, Fields(generation, "generation_config.json"))
            for token_id in source.token_ids("eos_token_id")
        ]
        return cls(
            architecture=architectures[0],
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            num_layers=num_layers(fields),
            num_heads=num_heads,
            num_kv_heads=fields.integer("num_key_value_heads", num_heads),
            head_dim=head_dim(fields),
            max_position_embeddings=fields.integer("max_position_embeddings", 2048),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            dtype=fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch."),
            bos_token_id=next((i for i in fields.token_ids("bos_token_id") if 0 <= i < vocab_size), None),
            eos_token_ids=tuple(dict.fromkeys(eos)),
            quantization=quantization_of(fields) or None,
            more_than_text=more_than_text,
            draft_layers=fields.integer("num_nextn_predict_layers", 0, 0),
            generation=generation,
            raw=raw,
        )
