"""Computes a model one layer at a time: the hidden states of all texts travel through one layer before the next is
loaded. A layer is loaded as a pipeline stage of its own, from any folder that holds its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.attention.table import load_backend, select_backend
from headrace.distributed.mesh import Mesh
from headrace.errors import ConfigError
from headrace.kernels.table import KernelTable, select_kernels
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.model_spec import ModelSpec
from headrace.models.loader import build_model, load_model
from headrace.models.served import attention_specs, describe
from headrace.planner.decisions import activation_dtype
from headrace.runner.kv_cache import CacheShape, allocate_alone, cache_shape, without_index
from headrace.stages import Stage, check_partition

AT_ONCE = 4096
"""tokens that a layer computes at a time, but at least those of one text"""
BLOCK_SIZE = 16
"""tokens of a block of the cache"""


@dataclass(frozen=True)
class Layer:
    """Holds one loaded layer; the first one also embeds tokens, and the last one has norm and head."""

    model: Any
    shape: CacheShape
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def compute(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return two things: the hidden states behind the layer [texts, length, hidden_size], and the largest
        magnitudes of what it caches # [2] (K, V; latents have the first alone) fp32, zeros where it caches none.
        `texts`: tokens [texts, length] for the first layer, else the hidden states behind the one before."""
        length = texts.shape[1]
        step = max(1, AT_ONCE // length)
        largest = torch.zeros(2, device=self.device)
        if not len(texts):
            return texts, largest
        parts = []
        for part in texts.split(step):
            at_once = len(part)
            metadata = AttentionMetadata.of_prompts(
                at_once, length, BLOCK_SIZE, len(self.shape.layout.groups), self.device
            )
            cache = allocate_alone(self.shape, 0, at_once * -(-length // BLOCK_SIZE), self.device)
            inputs = part.flatten(0, 1).to(self.device, copy=True)  # residuals are summed up in it
            hidden = self.model(inputs, metadata.positions, metadata, [cache])
            parts.append(hidden.view(at_once, length, -1).to(texts.device))
            if cache is not None and self.shape.specs[0] is not None:
                found = without_index(cache).abs().amax(dim=(1, 2, 3, 4)).float()
                largest[: len(found)] = largest[: len(found)].maximum(found)
        return torch.cat(parts), largest

    @torch.inference_mode()
    def perplexity(self, hidden: Tensor, tokens: Tensor) -> float:
        """Return the perplexity of texts [texts, length], whose last hidden states these are."""
        total = 0.0
        for states, text in zip(hidden, tokens, strict=True):
            logits = self.model.compute_logits(states[:-1].to(self.device)).float()
            total += float(nn.functional.cross_entropy(logits, text[1:].to(self.device), reduction="sum"))
        return math.exp(min(total / (tokens.shape[0] * (tokens.shape[1] - 1)), 700.0))


@dataclass(frozen=True)
class Layers:
    """Loads the layers of a model, each by itself, on one device."""

    folder: Path
    config: ModelConfig
    device: torch.device

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description."""
        return describe(self.config)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of activations: that of serving or, on a CPU, that in which few of them are slow."""
        if self.device.type == "cpu":
            return torch.float32
        dtype: torch.dtype = getattr(torch, activation_dtype(self.config.dtype, self.device.type)[0])
        return dtype

    @cached_property
    def kernels(self) -> KernelTable:
        """The kernels that compute."""
        return select_kernels(self.device.type)

    @cached_property
    def attention(self) -> tuple[AttentionSpec | None, ...]:
        """The specs of what each layer asks of attention."""
        dtype = str(self.dtype).removeprefix("torch.")
        return attention_specs(self.config, tp_size=1, block_size=BLOCK_SIZE, dtype=dtype, device_type=self.device.type)

    @cached_property
    def backend(self) -> Any:
        """Attention's backend."""
        return load_backend(select_backend(self.attention).name)

    def check(self) -> None:
        """Raise ConfigError or UnsupportedModelError if a layer cannot be computed by itself."""
        check_partition(self._stage(0).partition, self.spec.layers)
        if self.config.pooling is not None or not self.spec.has_head:
            raise ConfigError(f"{self.config.architecture} does not generate; accepted: a model with a head")
        build_model(self.config, self._context(0)[0])

    def load(self, number: int, prepare: Callable[[Any], None] | None = None) -> Layer:
        """Load a layer; `prepare` is given its modules before they have weights."""
        context, shape = self._context(number)
        model = load_model(self.folder, self.config, context, prepare=prepare)
        return Layer(model, shape, self.dtype, self.device)

    def _stage(self, number: int) -> Stage:
        return Stage(number, (1,) * len(self.spec.layers))

    def _context(self, number: int) -> tuple[LayerContext, CacheShape]:
        """Return what a layer is built with, and what it caches. Its products are those that do not depend on what was
        measured, or on free memory: a run that goes on must compute the same bits."""
        stage = self._stage(number)
        specs = self.attention[stage.layers]
        shape = cache_shape(self.spec, specs, 1, BLOCK_SIZE, self.dtype, stage=stage)
        context = LayerContext(
            Mesh(), self.kernels, self.backend, specs, self.dtype, self.device, batch_invariant=True,
            groups=shape.layout.group_of, stage=stage,
        )  # fmt: skip
        return context, shape
