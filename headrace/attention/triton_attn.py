"""TRITON_ATTN: our own kernels. The step's launches are planned once for each shape of layer."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import multiprocessor_count, paged_attention, tile_element_size
from headrace.kernels.attention_config import plan_attention, plan_decode
from headrace.kernels.decode import decode_attention


class TritonAttention:
    name = "TRITON_ATTN"

    def plan(self, metadata: AttentionMetadata) -> None:
        metadata.plan = {}

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        plan = metadata.plan.get(spec)
        if plan is None:
            decodes = metadata.num_reqs if metadata.max_query_len == 1 else metadata.num_decodes
            plan = metadata.plan[spec] = plan_attention(
                metadata.num_reqs,
                metadata.num_tokens,
                decodes,
                metadata.max_seq_len,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                tile_element_size(q, kv_cache),
                DEVICE_FAMILY,
                multiprocessor_count(q.device),
                spec.batch_invariant,
            )
        return paged_attention(
            q,
            kv_cache,
            metadata.block_table,
            metadata.rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            spec.scale,
            metadata.max_query_len,
            metadata.max_seq_len,
            spec.sliding_window,
            out,
            plan,
            kv_scale,
        )

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        planned = metadata.plan.get(("decode", spec))
        if planned is None:
            config, splits = plan_decode(
                metadata.num_reqs,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                tile_element_size(q, kv_cache),
                DEVICE_FAMILY,
                multiprocessor_count(q.device),
            )
            tickets = torch.zeros(metadata.num_reqs * spec.num_kv_heads, dtype=torch.int32, device=q.device)
            planned = metadata.plan["decode", spec] = (tickets, config, splits)
        tickets, config, splits = planned
        return decode_attention(
            q,
            k,
            v,
            cos_sin,
            kv_cache,
            metadata.block_table,
            metadata.rows,
            metadata.seq_lens,
            tickets,
            spec.scale,
            config,
            splits,
            spec.sliding_window,
            q_norm,
            k_norm,
            eps,
            kv_scale,
            out,
        )
