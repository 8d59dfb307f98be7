"""Defines what a layer asks of attention. Imports no torch, since the planner reads it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Describes one layer's attention on one rank. table.py says which backend can serve it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    dtype: str
    """float16, bfloat16 or float32: of activations"""
    sliding_window: int | None = None
    """the last keys, its own included, that a query sees; None: all"""
    causal: bool = True
    """False: a query sees later keys too, and nothing is cached."""
    chunked: bool = False
    """`sliding_window` is the size of a chunk, and a query sees the keys of its own chunk alone, up to its own."""
    sinks: bool = False
    """A learned logit for each head takes part in the softmax and adds no value."""
    soft_cap: float | None = None
    """scores x become soft_cap * tanh(x / soft_cap); None: they stay"""
    interleaved: bool = False
    """Queries and keys are rotated number by number with the next, not with the one half of what is rotated away."""
    latent_dim: int | None = None
    """Values are the last so many numbers of their keys, and the cache holds the keys alone; None: it holds both."""
    sparse_top_k: int | None = None
    """A query sees at most so many keys, which an index chooses; None: all"""
    index_dim: int = 0
    """size of the layer's own index's key, which is cached beside the latent; 0: it has no index of its own"""
    device_type: str = "cuda"
    batch_invariant: bool = False
    """A query's result must not depend on what else is in the batch, nor on how its prompt was cut into chunks."""
    kv_cache_dtype: str = "auto"
    """that of the cache: auto (as `dtype`), another of those, fp8_e4m3 or fp8_e5m2"""
    group: int = 0
    """the cache group to which the layer belongs, and thus the block table that it uses"""

    @property
    def quantized_cache(self) -> bool:
        """Tell whether the cache holds K and V divided by scales."""
        return self.kv_cache_dtype.startswith("fp8")
