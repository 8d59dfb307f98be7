"""Defines a step's batch: whose tokens it has, and where those that sample are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Describes one step to kernels and attention. The tensors are views into the buffers of InputBatch, on the device
    and cut to the (padded) size; R is the number of requests, S the number of samples."""

    rows: Tensor
    """[R] int32"""
    num_computed: Tensor
    """[R] int32"""
    seq_lens: Tensor
    """[R] int32: num_computed + num_scheduled; 0 where padded"""
    query_start_loc: Tensor
    """[R + 1] int32"""
    sample_index: Tensor
    """[S] int64: where among the step's tokens each sampling request's last known token is; its drafts follow"""
    sample_rows: Tensor
    """[S] int64"""
    sample_positions: Tensor
    """[S] int64: number of tokens known before the sampled one, which is also its position"""
    sample_offsets: Tensor | None
    """[S] int64: how far each sample is behind the first of its request; None: there are no
    drafts, of this step or of earlier ones that are not accepted or rejected yet"""
    num_reqs: int
    """R; padding is included here and in the numbers below"""
    num_tokens: int
    num_samples: int
    num_decodes: int
    """requests at the front that run one token each"""
    max_query_len: int
    max_seq_len: int
    max_prompt_len: int
    """of the requests behind the decodes; 0 if there are none"""
    prompt_keys: int
    """known tokens of those requests in all"""
    decode_only: bool
    """every token samples, so that token i is sample i"""
    adapted: bool = False
    """requests have adapters"""
