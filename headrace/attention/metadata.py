"""Defines what every layer's attention is told about a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.attention.batch import Batch
from headrace.kernels.paged import Sequences


@dataclass
class AttentionMetadata:
    """Describes a step of R requests with T tokens in all; tensors are on the device, integers on the host. Tables and
    mappings are those of each cache group; `AttentionSpec.group` says which one is a layer's."""

    rows: Tensor
    """[R] int32: the row of the tables that each request owns"""
    query_start_loc: Tensor
    """[R + 1] int32: where each request's tokens begin"""
    seq_lens: Tensor
    """[R] int32: known tokens, this step's included; 0 for padding"""
    positions: Tensor
    """[T] int64"""
    slot_mappings: tuple[Tensor, ...]
    """of each group, [T] int64: the cache slot of each token; negative: it has none"""
    block_tables: tuple[Tensor, ...]
    """of each group, [max_rows, max_blocks] int32"""
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """an upper bound of seq_lens; for a captured graph, one that holds for every later step: max_model_len"""
    num_decodes: int = 0
    """requests at the front that run one token each (all of them if max_query_len is 1)"""
    max_prompt_len: int = 0
    """an upper bound of seq_lens of the requests behind them; 0: max_seq_len"""
    prompt_keys: int = 0
    """an upper bound of the sum of seq_lens of the requests behind the decodes; 0: none is known"""
    plan: dict[Any, Any] = field(default_factory=dict)
    """what a backend prepares once a step for all layers of a spec"""
    cut: Callable[..., Tensor] | None = None
    """takes over attention's calls while a step is captured in pieces around them: layers call cut(attend, q, kv_cache,
    metadata, *rest, shape=the result's for one token) in place of attend(q, kv_cache, metadata, *rest)"""

    only_caches: bool = False
    """what layers write to their caches is wanted alone, so that they leave attention out"""
    tapped: Tensor | None = None
    """[T, ...]: takes the inputs of the layers that the model taps, side by side; None: they are not wanted"""

    @staticmethod
    def of(
        batch: Batch, positions: Tensor, slot_mappings: tuple[Tensor, ...], block_tables: tuple[Tensor, ...]
    ) -> AttentionMetadata:
        """Return what attention is told of a batch."""
        return AttentionMetadata(
            rows=batch.rows,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            positions=positions,
            slot_mappings=slot_mappings,
            block_tables=block_tables,
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            num_decodes=batch.num_decodes,
            max_prompt_len=batch.max_prompt_len,
            prompt_keys=batch.prompt_keys,
        )

    @staticmethod
    def of_prompts(
        count: int, length: int, block_size: int, num_groups: int, device: torch.device
    ) -> AttentionMetadata:
        """Return what attention is told of `count` new requests of `length` tokens each. Each has blocks of its own, as
        many as it needs, the first request the first ones, in the cache of every group."""
        blocks = -(-length // block_size)
        rows = torch.arange(count + 1, dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device).repeat(count)
        slots = (rows[:-1].long() * blocks * block_size).repeat_interleave(length) + positions
        table = torch.arange(count * blocks, dtype=torch.int32, device=device).view(count, blocks)
        return AttentionMetadata(
            rows=rows[:-1],
            query_start_loc=rows * length,
            seq_lens=torch.full_like(rows[:-1], length),
            positions=positions,
            slot_mappings=(slots,) * num_groups,
            block_tables=(table,) * num_groups,
            num_reqs=count,
            num_tokens=count * length,
            max_query_len=length,
            max_seq_len=length,
        )

    def sequences(self, group: int) -> Sequences:
        """Return the step as the kernels take it, with the block table of a cache group."""
        return Sequences(self.block_tables[group], self.rows, self.query_start_loc, self.seq_lens)
