"""The least that runs a model over a paged cache: ragged prefill, then decode, blocks in no particular order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.table import load_backend, select_backend
from headrace.cache_groups import cache_layout
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import select_kernels
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from headrace.models.served import attention_specs, describe
from headrace.runner.kv_cache import allocate_alone, cache_shape


def make_context(
    config: ModelConfig, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32, block_size: int = 16
) -> LayerContext:
    mesh = mesh or Mesh()
    specs = attention_specs(
        config,
        tp_size=mesh.tp.size,
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        device_type="cpu",
    )
    backend = load_backend(select_backend(specs).name)
    groups = cache_layout(describe(config), mesh.tp.size, dtype.itemsize, block_size).group_of
    return LayerContext(mesh, select_kernels("cpu"), backend, specs, dtype, torch.device("cpu"), groups=groups)


class Driver:
    def __init__(
        self, folder: Path, mesh: Mesh | None = None, load_format: str = "auto", max_len: int = 128,
        quantization: str | None = None, whole_experts: bool = False,
    ) -> None:  # fmt: skip
        self.config = ModelConfig.from_folder(folder)
        self.context = replace(make_context(self.config, mesh), whole_experts=whole_experts)
        self.model: Any = load_model(folder, self.config, self.context, load_format, 0, quantization)
        self.max_len = max_len

    def start(self, num_requests: int) -> None:
        spec = next(spec for spec in self.context.specs if spec is not None)
        self.block_size = spec.block_size
        blocks = (self.max_len + spec.block_size - 1) // spec.block_size
        order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(0))
        self.block_table = order.view(num_requests, blocks).to(torch.int32)
        ranks, dtype = self.context.mesh.tp.size, self.context.dtype
        shape = cache_shape(describe(self.config), self.context.specs, ranks, spec.block_size, dtype)
        self.num_groups = len(shape.layout.groups)
        self.kv_caches = [
            allocate_alone(shape, layer, num_requests * blocks, torch.device("cpu"))
            for layer in range(shape.num_layers)
        ]
        self.computed = [0] * num_requests

    @torch.inference_mode()
    def step(self, tokens: list[list[int]]) -> Tensor:
        """Append `tokens[i]` to request i; returns the logits of all these tokens, in order."""
        block_size, counts = self.block_size, [len(chunk) for chunk in tokens]
        lengths = [done + count for done, count in zip(self.computed, counts, strict=True)]
        positions = torch.cat([torch.arange(done, length) for done, length in zip(self.computed, lengths, strict=True)])
        owner = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(counts))
        slots = self.block_table[owner, positions // block_size].long() * block_size + positions % block_size
        metadata = AttentionMetadata(
            rows=torch.arange(len(tokens), dtype=torch.int32),
            query_start_loc=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            positions=positions,
            slot_mappings=(slots,) * self.num_groups,
            block_tables=(self.block_table,) * self.num_groups,
            num_reqs=len(tokens),
            num_tokens=len(positions),
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        )
        input_ids = torch.tensor([token for chunk in tokens for token in chunk])
        hidden = self.model(input_ids, positions, metadata, self.kv_caches)
        self.computed = lengths
        return self.model.compute_logits(hidden)

    def logits(self, prompt: list[int]) -> Tensor:
        """Those of a prompt by itself # [num_tokens, vocab_size]"""
        self.start(1)
        return self.step([prompt])

    def greedy(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Prompts must be sorted by length (requests of one token come first)."""
        self.start(len(prompts))
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        latest = self.step(prompts)[ends].argmax(-1).tolist()
        generated = [[token] for token in latest]
        for _ in range(new_tokens - 1):
            latest = self.step([[token] for token in latest]).argmax(-1).tolist()
            for row, token in zip(generated, latest, strict=True):
                row.append(token)
        return generated
