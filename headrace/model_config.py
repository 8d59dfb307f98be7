"""The few facts the engine needs from a Hugging Face config.json. Pure Python: planner and server read it too.

What a family makes of its quirks is said in models/registry.py; this file only normalizes names that differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ModelNotFoundError, UnsupportedModelError


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    """Keys a query may look back on, itself included; None: all."""
    dtype: str
    """float16, bfloat16 or float32, as the checkpoint says"""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None = None
    generation: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """generation_config.json as it is."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """config.json as it is, for what only one family reads."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Raises ModelNotFoundError without config.json, UnsupportedModelError where a needed fact is missing."""
        path = folder / "config.json"
        if not path.is_file():
            raise ModelNotFoundError(f"model folder {str(folder)!r} has no config.json")
        try:
            raw = json.loads(path.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise ModelNotFoundError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ModelNotFoundError(f"{path} must hold a JSON object, got {type(raw).__name__}")
        generation: dict[str, Any] = {}
        generation_path = folder / "generation_config.json"
        if generation_path.is_file():
            try:
                generation = json.loads(generation_path.read_text())
            except ValueError as error:
                raise ModelNotFoundError(f"{generation_path} is not valid JSON: {error}") from None
            if not isinstance(generation, dict):
                raise ModelNotFoundError(f"{generation_path} must hold a JSON object, got {type(generation).__name__}")
        return cls.from_dict(raw, generation)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
        """`raw` is config.json, `generation` generation_config.json (its eos ids are added)."""
        architectures = raw.get("architectures") or []
        if not architectures:
            raise UnsupportedModelError("config.json names no architecture (field `architectures`)")

        def need(name: str) -> Any:
            if raw.get(name) is None:
                raise UnsupportedModelError(f"config.json of {architectures[0]} lacks `{name}`")
            return raw[name]

        num_heads = int(need("num_attention_heads"))
        rope_parameters = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or (
            rope_parameters if rope_parameters.get("rope_type", "default") != "default" else None
        )
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        return cls(
            architecture=architectures[0],
            vocab_size=int(need("vocab_size")),
            hidden_size=int(need("hidden_size")),
            intermediate_size=int(need("intermediate_size")),
            num_layers=int(need("num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=int(raw.get("head_dim") or need("hidden_size") // num_heads),
            max_position_embeddings=int(raw.get("max_position_embeddings") or 2048),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(raw.get("rope_theta") or rope_parameters.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            hidden_act=str(raw.get("hidden_act", "silu")),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            sliding_window=raw.get("sliding_window"),
            dtype=dtype,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_ids(raw.get("eos_token_id"), (generation or {}).get("eos_token_id")),
            quantization=raw.get("quantization_config"),
            generation=generation or {},
            raw=raw,
        )


def _ids(*values: int | list[int] | None) -> tuple[int, ...]:
    ids: list[int] = []
    for value in values:
        for token_id in [value] if isinstance(value, int) else value or []:
            if token_id not in ids:
                ids.append(token_id)
    return tuple(ids)
