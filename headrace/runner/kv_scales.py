"""Settles the scales of an fp8 KV cache once before serving: the checkpoint's own, or scales that fit what made-up
prompts leave in a cache of the model's own type.

The prompts follow from the vocabulary alone, so the scales follow from the weights. The same prompts then run over the
fp8 cache, which tells how far the format moves this model's hidden states; the planner decides whether that is near
enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headrace.attention.metadata import AttentionMetadata
from headrace.distributed.mesh import Group
from headrace.kernels._triton import fp8_dtype
from headrace.layers.attention import Attention
from headrace.layers.latent_attention import LatentAttention
from headrace.model_config import ModelConfig
from headrace.runner.kv_cache import CacheShape, allocate_alone, without_index
from headrace.runner.pipeline import Pipeline

NUM_PROMPTS, PROMPT_LENGTH = 4, 128
HEADROOM = {torch.float8_e5m2: 32.0}
"""How far the format's range reaches above the largest number of the made-up prompts; beyond that, numbers of real text
are clamped. It costs no precision, since small numbers of fp8 are as precise as large ones (the demo model moves by
5.3% whether it is 2 or 64). e5m2 has a wider range than the others, for which it is 16.0."""
BOUND = 0.3
"""The most that hidden states may move where fp8 was asked for, as ||difference|| / ||hidden||. Measured: 0.05 with
e4m3 and 0.10 with e5m2 on the demo model, up to 0.11 and 0.21 on tiny random ones; with biases on K of 10, 30 and 100
standard deviations of its other channels 0.22, 0.49, 0.86 and 0.42, 0.74, 1.0: by then the tokens are others."""


@dataclass(frozen=True)
class SettledScales:
    """Says what became of the scales, and how good they are."""

    note: str
    """a line for the start-up log"""
    error: float
    """||difference|| / ||hidden states|| that the fp8 cache makes"""
    remedy: str
    """the cache types with which this model still works, where the error is beyond BOUND"""


@dataclass(frozen=True)
class Calibration:
    """Runs the made-up prompts through a loaded model."""

    model: nn.Module
    """a CausalModel of the runner"""
    config: ModelConfig
    shape: CacheShape
    """of the cache that will serve"""
    dtype: torch.dtype
    """the model's own"""
    group: Group
    device: torch.device
    pipeline: Pipeline = Pipeline()
    """to the stages that hold the other layers, which calibrate their own by the same prompts"""

    def scales(self) -> list[Tensor]:
        """Return each layer's scales # [2] (K, V; latents have the first alone) float32, where the kernels read
        them."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, Attention | LatentAttention)]
        return [layer.kv_scale for layer in layers if layer.kv_scale is not None]

    @torch.inference_mode()
    def run(self, cache_dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states # [tokens, hidden_size] and the caches of the layers with attention."""
        length = min(PROMPT_LENGTH, self.config.max_position_embeddings)
        per_prompt = -(-length // self.shape.block_size)
        shape = replace(self.shape, dtype=cache_dtype)
        num_blocks, num_groups = NUM_PROMPTS * per_prompt, len(shape.layout.groups)
        caches = [allocate_alone(shape, layer, num_blocks, self.device) for layer in range(shape.num_layers)]
        ids = torch.randint(self.config.vocab_size, (NUM_PROMPTS, length), generator=torch.Generator().manual_seed(0))
        if self.config.bos_token_id is not None:
            ids[:, 0] = self.config.bos_token_id
        metadata = AttentionMetadata.of_prompts(NUM_PROMPTS, length, shape.block_size, num_groups, self.device)
        hidden = self.pipeline.through(
            lambda inputs: self.model(inputs, metadata.positions, metadata, caches),
            ids.view(-1).to(self.device),
            metadata.num_tokens,
            torch.empty(0, dtype=self.dtype, device=self.device),
        )
        attended = zip(caches, shape.specs, strict=True)
        return hidden, [without_index(cache) for cache, spec in attended if cache is not None and spec is not None]

    def fitting_scales(self, caches: list[Tensor]) -> Tensor:
        """Return scales # [layers, 2] float32 that put the largest number of each cache, over all ranks, HEADROOM below
        the format's largest; 1.0 where a cache is all zeros or not finite."""
        largest = self.pairs([cache.abs().amax(dim=(1, 2, 3, 4)).float().expand(2) for cache in caches])
        largest = self.group.all_gather(largest.view(-1, 1)).amax(dim=-1).view(-1, 2)
        scales = largest * (HEADROOM.get(self.shape.dtype, 16.0) / torch.finfo(self.shape.dtype).max)
        return torch.where((scales > 0) & scales.isfinite(), scales, torch.ones_like(scales))

    def error(self, hidden: Tensor, scales: Tensor) -> float:
        """Set the layers' scales to `scales` [layers, 2] and return how far `hidden` moves over an fp8 cache with them,
        on the rank where it moves most: what the ranks run next depends on it."""
        for place, values in zip(self.scales(), scales, strict=True):
            place.copy_(values)
        moved, _ = self.run(self.shape.dtype)
        own = float((moved.float() - hidden.float()).norm() / hidden.float().norm())
        return self.pipeline.group.largest(self.group.largest(own, self.device), self.device)

    def pairs(self, scales: list[Tensor]) -> Tensor:
        """Return `scales` [2] as one tensor # [layers, 2] float32; a pipeline stage may have no layer with any."""
        return torch.stack(scales) if scales else torch.empty(0, 2, device=self.device)


def settle_kv_scales(calibration: Calibration, calculate: bool) -> SettledScales:
    """Fill in the scales that the checkpoint lacks, calculated or 1.0."""
    brought = calibration.pairs(calibration.scales())
    missing = brought.isnan()
    if calibration.shape.dtype == torch.float8_e4m3fnuz:
        brought = brought * 2  # they are for e4m3fn: 448 where this type has 240
    hidden, caches = calibration.run(calibration.dtype)
    fitting = calibration.fitting_scales(caches)
    scales = torch.where(missing, fitting if calculate else torch.ones_like(brought), brought)
    error = calibration.error(hidden, scales)
    made = f"calculated from {len(hidden)} made-up tokens" if calculate else "1.0"
    origin = "the checkpoint's" if not bool(missing.any()) else made
    if bool(missing.any()) and not bool(missing.all()):
        origin = f"the checkpoint's, and {made} where it has none"
    name = "fp8_e5m2" if calibration.shape.dtype == torch.float8_e5m2 else "fp8_e4m3"
    note = f"With scales {origin}, the KV cache in {name} moves hidden states by {error:.1%}."
    bearable = error <= BOUND
    return SettledScales(note, error, "" if bearable else _remedy(calibration, hidden, caches))


def fill_missing_scales(model: nn.Module | None) -> None:
    """Fill in 1.0 where the checkpoint of a model that guesses tokens brings no scales: they change no answer."""
    for layer in () if model is None else model.modules():
        if isinstance(layer, Attention) and layer.kv_scale is not None:
            layer.kv_scale.nan_to_num_(1.0)


def _remedy(calibration: Calibration, hidden: Tensor, caches: list[Tensor]) -> str:
    """Return the cache types with which this model still works."""
    dtype = str(calibration.dtype).removeprefix("torch.")
    if calibration.shape.dtype != torch.float8_e5m2:
        return dtype
    finer = replace(calibration, shape=replace(calibration.shape, dtype=fp8_dtype(calibration.device)))
    error = finer.error(hidden, finer.fitting_scales(caches))
    return dtype if not error <= BOUND else f"fp8_e4m3 ({error:.1%}) or {dtype}"
