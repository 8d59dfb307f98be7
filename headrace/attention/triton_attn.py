"""Implements the backend TRITON_ATTN: our own kernels, planned once a step for each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels._triton import DEVICE_FAMILY
from headrace.kernels.attention import is_hopper, multiprocessor_count, paged_attention, tile_element_size
from headrace.kernels.attention_config import (
    COPY_ENGINE_PREFILL,
    MOST_GROUP,
    SMALLEST_BOX,
    UNPACKED_BLOCK,
    UNPACKED_BYTES,
    AttentionPlan,
    plan_attention,
    plan_decode,
    unpacked_block_bytes,
)
from headrace.kernels.decode import decode_attention
from headrace.kernels.fp8_cache import UnpackedCache
from headrace.kernels.latent import LatentHeads, latent_attention
from headrace.kernels.latent_config import EXPANDED_BYTES, LatentPlan, plan_latent
from headrace.kernels.latent_prompt import expanded_attention
from headrace.kernels.launch import Recording, recorded
from headrace.kernels.paged import Sequences


@dataclass
class Planned:
    """Holds what the layers with one spec have in common in a step."""

    plan: AttentionPlan
    sequences: Sequences
    unpacked: UnpackedCache | None = None
    recording: Recording | None = None
    """the first layer's launches, which the others repeat"""


class TritonAttention:
    """Serves layers on GPUs, as part of CUDA graphs too."""

    name = "TRITON_ATTN"

    def __init__(self) -> None:
        self.copy_engine = DEVICE_FAMILY == "cuda" and torch.cuda.is_available() and is_hopper(torch.device("cuda"))
        """Prompts may go to kernels/prefill.py."""
        self.unpacked: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """(KV heads, their size, type) -> memory into which an fp8 cache is unpacked"""
        self.expands = True
        """Prompts may be served with keys and values of each head."""
        self.expanded: Tensor | None = None
        """memory into which keys and values are projected out of latents"""

    def prefills_by_copy_engine(self, spec: AttentionSpec, dtype: torch.dtype, cache_dtype: torch.dtype) -> bool:
        """Tell whether kernels/prefill.py serves such layers' prompts, where they are long enough."""
        return (
            self.copy_engine
            and dtype.itemsize == 2
            and (dtype == cache_dtype or cache_dtype.itemsize == 1)
            and spec.head_dim in COPY_ENGINE_PREFILL
            and spec.num_heads // spec.num_kv_heads <= MOST_GROUP
            and spec.block_size >= SMALLEST_BOX
            and spec.sliding_window is None
            and spec.soft_cap is None
            and not spec.batch_invariant
        )

    def forward(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q) if out is None else out
        tensors = (out, q, kv_cache, kv_scale, sinks)
        planned = metadata.plan.get(spec)
        if planned is None:
            plan = plan_attention(
                metadata.num_reqs,
                metadata.num_tokens,
                metadata.num_reqs if metadata.max_query_len == 1 else metadata.num_decodes,
                metadata.max_seq_len,
                *_sizes(spec, q, kv_cache),
                spec.batch_invariant,
                self.prefills_by_copy_engine(spec, q.dtype, kv_cache.dtype),
                metadata.max_prompt_len,
                spec.sliding_window,
            )
            planned = metadata.plan[spec] = self.launches(plan, metadata, spec, q)
        if planned.recording is not None and planned.recording.again(tensors):
            return out
        with recorded() as made:
            paged_attention(
                q, kv_cache, planned.sequences, spec.scale, spec.sliding_window, kv_scale, out, sinks, spec.chunked,
                spec.soft_cap, plan=planned.plan, unpacked=planned.unpacked,
            )  # fmt: skip
        planned.recording = Recording.of(made, tensors)
        return out

    def launches(self, plan: AttentionPlan, metadata: AttentionMetadata, spec: AttentionSpec, q: Tensor) -> Planned:
        """Return what a step of `plan` shares, with the memory into which an fp8 cache is unpacked, if it is. That
        memory is allocated at the first such call, which the self-check makes."""
        planned = Planned(plan, metadata.sequences(spec.group))
        if plan.unpacked_blocks:
            key = spec.num_kv_heads, spec.head_dim, q.dtype
            if key not in self.unpacked:
                blocks = UNPACKED_BYTES // unpacked_block_bytes(spec.num_kv_heads, spec.head_dim)
                shape = (2, blocks, UNPACKED_BLOCK, spec.num_kv_heads, spec.head_dim)
                self.unpacked[key] = torch.empty(shape, dtype=q.dtype, device=q.device)
            planned.unpacked = UnpackedCache.within(self.unpacked[key], plan, metadata.num_reqs)
        return planned

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor | None,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        temperature: Tensor | None = None,
        q_weight: Tensor | None = None,
    ) -> Tensor:
        """Attend in one launch, for steps of one token a request: q # [R, Hq, D], k and v # [R, Hkv, D] as projected.

        q and k are normed and rotated, k and v written to the cache. Returns # [R, Hq, D] contiguous.
        """
        planned = metadata.plan.get(("decode", spec))
        if planned is None:
            tickets = torch.zeros(metadata.num_reqs * spec.num_kv_heads, dtype=torch.int32, device=q.device)
            config, splits = plan_decode(metadata.num_reqs, *_sizes(spec, q, kv_cache), spec.sliding_window)
            planned = metadata.plan["decode", spec] = (metadata.sequences(spec.group), tickets, config, splits)
        sequences, tickets, config, splits = planned
        return decode_attention(
            q, k, v, cos_sin, kv_cache, sequences, tickets, spec.scale, config, splits, spec.sliding_window, q_norm,
            k_norm, eps, kv_scale, out, sinks, spec.chunked, spec.soft_cap, spec.interleaved, temperature, q_weight,
        )  # fmt: skip

    def latent(
        self,
        q: Tensor,
        heads: LatentHeads,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        sequences = metadata.sequences(spec.group)
        plan, key_starts = self.planned_latents(q, heads, kv_cache, metadata, spec, chosen)
        if out is None:
            out = q.new_empty((*q.shape[:2], heads.sizes(q).v_head_dim))
        count = len(q) if plan.expanded is None else plan.num_decodes  # tokens in the absorbed form
        if count:
            absorbed, turned = heads.absorb(q[:count]), q[:count, :, heads.nope_dim :]
            attended = torch.empty_like(absorbed)
            behind = plan.chunk, plan.num_decodes, metadata.num_reqs
            for how, first, end in ((plan.decode, 0, plan.num_decodes), behind):
                if how is not None:
                    latent_attention(
                        absorbed, turned, kv_cache, sequences, spec.scale, how, kv_scale, chosen, first, end, attended
                    )
            heads.values(attended, out[:count])
        if plan.expanded is not None:
            memory = self.memory_for_heads(q)
            expanded_attention(
                q, heads, kv_cache, sequences, key_starts, spec.scale, plan.expanded, memory, kv_scale,
                plan.num_decodes, out,
            )  # fmt: skip
        return out

    def planned_latents(
        self,
        q: Tensor,
        heads: LatentHeads,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        chosen: Tensor | None = None,
    ) -> tuple[LatentPlan, Tensor]:
        """Return the step's launches, and where the keys of each prompt begin among those of all # [prompts + 1]
        int32."""
        num_chosen = None if chosen is None else chosen.shape[1]
        planned: tuple[LatentPlan, Tensor] | None = metadata.plan.get(("latent", spec, num_chosen))
        if planned is None:
            decodes = metadata.num_reqs if metadata.max_query_len == 1 else metadata.num_decodes
            plan = plan_latent(
                metadata.num_reqs, metadata.num_tokens, decodes, metadata.max_seq_len,
                metadata.prompt_keys if self.expands else 0, heads.sizes(q), tile_element_size(q, kv_cache),
                q.element_size(), DEVICE_FAMILY, multiprocessor_count(q.device), num_chosen,
            )  # fmt: skip
            key_starts = metadata.seq_lens[:0]
            if plan.expanded is not None:
                key_starts = metadata.seq_lens.new_zeros(metadata.num_reqs - decodes + 1)
                torch.cumsum(metadata.seq_lens[decodes:], 0, dtype=torch.int32, out=key_starts[1:])
            planned = metadata.plan["latent", spec, num_chosen] = plan, key_starts
        return planned

    def memory_for_heads(self, q: Tensor) -> Tensor:
        """Return the memory into which keys and values are projected. It is allocated at the first call, which the
        self-check makes."""
        if self.expanded is None or self.expanded.dtype != q.dtype:
            self.expanded = torch.empty(EXPANDED_BYTES // q.element_size(), dtype=q.dtype, device=q.device)
        return self.expanded


def _sizes(spec: AttentionSpec, q: Tensor, kv_cache: Tensor) -> tuple[int, int, int, int, str, int]:
    """Return the layer's sizes and the device's, as plans want them."""
    element_size, num_sms = tile_element_size(q, kv_cache), multiprocessor_count(q.device)
    return spec.num_heads, spec.num_kv_heads, spec.head_dim, element_size, DEVICE_FAMILY, num_sms
