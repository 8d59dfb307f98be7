"""What a layer asks of attention. Torch-free: the planner reads it too; who can serve it stands in table.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    dtype: str
    """float16, bfloat16 or float32: of activations"""
    sliding_window: int | None = None
    """Keys a query sees, itself included; None: all"""
    causal: bool = True
    """False: a query sees the keys that come later too, and nothing is cached"""
    chunked: bool = False
    """`sliding_window` is the size of a chunk: a query sees the keys of its own chunk alone"""
    sinks: bool = False
    """A learned logit for each head takes part in the softmax and adds no value"""
    rotary: bool = True
    """Queries and keys are rotated by their positions"""
    latent_dim: int | None = None
    """Values are the last so many numbers of their keys, and the cache holds the keys alone; None: it holds both"""
    device_type: str = "cuda"
    batch_invariant: bool = False
    """A query's result must not depend on what else is in the batch, nor on how its prompt was cut"""
    kv_cache_dtype: str = "auto"
    """of the cache: as `dtype` (auto), another of those, fp8_e4m3 or fp8_e5m2"""
    group: int = 0
    """of layers that keep alike, to which the layer belongs: which block table is its own"""

    @property
    def quantized_cache(self) -> bool:
        """The cache holds K and V divided by scales."""
        return self.kv_cache_dtype.startswith("fp8")
