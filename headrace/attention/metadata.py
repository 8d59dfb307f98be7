"""What every layer's attention is told about a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class AttentionMetadata:
    """R requests with T tokens in all; tensors on the device, integers on the host. `AttentionSpec.group` says which of
    the tables and mappings are a layer's."""

    rows: Tensor
    """[R] int32: row of the tables that each request owns"""
    query_start_loc: Tensor
    """[R + 1] int32"""
    seq_lens: Tensor
    """[R] int32: known tokens, this step's included; 0 for padding"""
    positions: Tensor
    """[T] int64"""
    slot_mappings: tuple[Tensor, ...]
    """of each group of layers, [T] int64: cache slot of each token; negative: none"""
    block_tables: tuple[Tensor, ...]
    """of each group, [max_rows, max_blocks] int32"""
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    """Upper bound of seq_lens; inside a graph of what any step may be, max_model_len"""
    num_decodes: int = 0
    """Requests at the front known to run one token each (all of them if max_query_len is 1)"""
    max_prompt_len: int = 0
    """Upper bound of seq_lens of the requests behind them; 0: max_seq_len"""
    plan: dict[Any, Any] = field(default_factory=dict)
    """What a backend works out once a step for all layers of a spec"""
    cut: Callable[..., Tensor] | None = None
    """Takes attention's calls where the step is captured in pieces around them: cut(attend, q, kv_cache, metadata,
    *rest, shape=what it gives for a token) in place of attend(q, kv_cache, metadata, *rest)"""
