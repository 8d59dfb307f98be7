"""Describes token mixers: attention, attention over latents, and recurrent states. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.layer_parts import Norm, Rope, Temperature, Turns
from headrace.parameters import Parameter, Split, linear, norm

STATE_BYTES = 4
"""Bytes of a value of a state, whose rounding errors would add up from token to token"""


@dataclass(frozen=True)
class Attention:
    """Describes grouped-query attention, which caches keys and values of `num_kv_heads` heads for each token."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """the most keys that a query sees, its own included; None: all"""
    chunked: bool = False
    """`window` is the size of a chunk, and a query sees the keys of its own chunk alone"""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "heads", "wide"] = "none"
    """norm of queries and keys before they are rotated: of each head by the same weights or by its own, or of all heads
    as one vector. (A norm without weights may as well follow: rotating changes no length.)"""
    norm: Norm = Norm()
    """what `qk_norm` is"""
    v_norm: bool = False
    """the values of each head are RMS-normed, without weights"""
    values_are_keys: bool = False
    """values are projected by the weights of keys, which alone a checkpoint has"""
    sinks: bool = False
    """a learned logit of each head takes part in the softmax and adds no value"""
    causal: bool = True
    """False: a query sees later keys too (an encoder), so nothing is cached"""
    rope: Rope | None = Rope()
    """how queries and keys are rotated by their positions; None: they are not"""
    temperature: Temperature | None = None
    """queries grow with their positions"""
    scale: float | None = None
    """factor of scores; None: 1 / sqrt(head_dim)"""
    soft_cap: float | None = None
    """scores x become soft_cap * tanh(x / soft_cap)"""
    clip: float | None = None
    """queries, keys and values as projected are held within +-clip"""
    norm_last: bool = False
    """weights of the norms of heads multiply what is rotated, not what is projected"""
    output_gate: bool = False
    """each head's output is multiplied with the sigmoid of as many numbers"""
    gate_linear: str = ""
    """the linear that projects them; empty: `q_proj` does, each head's behind its query"""
    by_kv_head: bool = False
    """in a checkpoint that has queries, keys and values in one linear, each KV head's key and value are behind the
    queries that use them"""
    input_size: int | None = None
    """of what queries, keys and values are projected from; None: hidden_size"""

    kind = "gqa"
    sparse_top_k = None
    index_dim = index_flops_per_pair = state_values = flops_per_token = 0

    @property
    def v_head_dim(self) -> int:
        """The size of a value."""
        return self.head_dim

    @property
    def inputs(self) -> int:
        """The size of what queries, keys and values are projected from."""
        return self.input_size or self.hidden_size

    @cached_property
    def turns(self) -> Turns | None:
        """Say what positions do to queries and keys; None: nothing."""
        if self.rope is None and self.temperature is None:
            return None
        rotated = 0 if self.rope is None else int(self.head_dim * self.rope.share)
        return Turns(self.rope, rotated, self.temperature)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's tensors."""
        hidden, dim, inputs = self.hidden_size, self.head_dim, self.inputs
        q, kv = self.num_heads * dim, self.num_kv_heads * dim
        q_bias: Split | None = "heads" if self.qkv_bias else None
        beside = self.output_gate and not self.gate_linear
        tensors = linear("self_attn.q_proj", q * (1 + beside), inputs, "heads", q_bias, fused="qkv_proj")
        if self.gate_linear:
            tensors += linear(f"self_attn.{self.gate_linear}", q, inputs, "heads", fused="qkv_proj")
        kv_bias: Split | None = "kv_heads" if self.qkv_bias else None
        for name in ("k_proj", "v_proj"):
            tensors += linear(f"self_attn.{name}", kv, inputs, "kv_heads", kv_bias, fused="qkv_proj")
        tensors += linear("self_attn.o_proj", hidden, q, "heads", "whole" if self.o_bias else None, axis=1)
        shapes: dict[str, tuple[tuple[int, ...], Split, tuple[int, ...], Split]] = {
            "head": ((dim,), "whole", (dim,), "whole"),
            "heads": ((self.num_heads, dim), "heads", (self.num_kv_heads, dim), "kv_heads"),
            "wide": ((q,), "heads", (kv,), "kv_heads"),
        }
        if self.qk_norm in shapes:
            of_q, q_split, of_k, k_split = shapes[self.qk_norm]
            tensors += norm("self_attn.q_norm", of_q, q_split, self.norm)
            tensors += norm("self_attn.k_norm", of_k, k_split, self.norm)
        if self.sinks:
            tensors.append(Parameter("self_attn.sinks", (self.num_heads,), "plain", "heads"))
        return tuple(tensors)

    @property
    def cached_values(self) -> int:
        """The number of values cached for a token, in K and V."""
        return 2 * self.num_kv_heads * self.head_dim if self.causal else 0

    def cache_share(self, ranks: int) -> float:
        """Return the share of the cache that one of `ranks` holds."""
        return math.ceil(self.num_kv_heads / ranks) / self.num_kv_heads

    @property
    def flops_per_pair(self) -> int:
        """The operations for one query and one key, of all heads."""
        return 4 * self.num_heads * self.head_dim

    decode_flops_per_pair = flops_per_pair


@dataclass(frozen=True)
class LatentAttention:
    """Describes multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    The keys and values of all heads are projected from one latent, and the latent is what is cached. With
    `sparse_top_k`, an index chooses the keys (DeepSeek-V3.2, arXiv 2512.02556).
    """

    hidden_size: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    q_rank: int | None = None
    """size of the latent of queries; None: they are projected from the hidden state directly"""
    sparse_top_k: int | None = None
    """how many keys the index chooses for a query; None: all keys are read"""
    index_heads: int = 0
    """heads of the layer's own index; 0 beside `sparse_top_k`: the keys are those that the last layer with one chose"""
    index_dim: int = 0
    """size of the index's queries and of its keys, one of which is cached for each token"""
    index_interleaved: bool = False
    """the index rotates number by number with the next, not with the one half of `rope_dim` away"""
    bias: bool = False
    """the projections into latents, and out of attention, have biases"""
    temperature: Temperature | None = None
    """queries grow with their positions"""
    rope: Rope = Rope()
    scale: float | None = None
    """factor of scores; None: 1 / sqrt(head_dim)"""
    norm: Norm = Norm()
    """of the latents of queries and of keys and values"""

    kind = "mla"
    num_kv_heads = 1
    window = None
    causal = True
    state_values = flops_per_token = 0

    @property
    def head_dim(self) -> int:
        """The size of a query and of a key."""
        return self.nope_dim + self.rope_dim

    @cached_property
    def turns(self) -> Turns | None:
        """Say what positions do to queries and keys."""
        return Turns(self.rope, self.rope_dim, self.temperature)

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's tensors."""
        hidden, heads, latent, q_rank = self.hidden_size, self.num_heads, self.latent_dim, self.q_rank
        q, fused = heads * self.head_dim, "qkv_a_proj"
        bias: Split | None = "whole" if self.bias else None
        if q_rank is None:
            tensors = linear("self_attn.q_proj", q, hidden, "heads", fused=fused)
        else:
            tensors = linear("self_attn.q_a_proj", q_rank, hidden, "whole", bias, fused=fused)
            tensors += norm("self_attn.q_a_layernorm", q_rank, of=self.norm)
            tensors += linear("self_attn.q_b_proj", q, q_rank, "heads")
        tensors += linear("self_attn.kv_a_proj_with_mqa", self.latent_values, hidden, "whole", bias, fused=fused)
        tensors += norm("self_attn.kv_a_layernorm", latent, of=self.norm)
        kv_b = linear("self_attn.kv_b_proj", heads * (self.nope_dim + self.v_head_dim), latent, "heads")
        tensors += [replace(one, widened=True) for one in kv_b]  # attention multiplies with each head's part alone
        tensors += linear("self_attn.o_proj", hidden, heads * self.v_head_dim, "heads", bias, axis=1)
        if self.index_heads:
            keys, indexer = self.index_dim, "self_attn.indexer"
            tensors += linear(f"{indexer}.wq_b", self.index_heads * keys, q_rank or hidden, "whole")
            tensors += linear(f"{indexer}.wk", keys, hidden, "whole", fused=fused)
            tensors += norm(f"{indexer}.k_norm", keys, of=Norm("layer", bias=True))
            tensors += linear(f"{indexer}.weights_proj", self.index_heads, hidden, "whole", fused=fused)
        return tuple(tensors)

    @property
    def latent_values(self) -> int:
        """The number of values that attention reads of a token: the latent, and the rotated part of the key."""
        return self.latent_dim + self.rope_dim

    @property
    def cached_values(self) -> int:
        """The number of values cached for a token: those that attention reads, and the index's key."""
        return self.latent_values + self.index_dim

    def cache_share(self, ranks: int) -> float:
        """Return 1: each of `ranks` holds the whole cache, since a latent has no heads."""
        return 1.0

    @property
    def flops_per_pair(self) -> int:
        """The operations for one query and one key of a prompt, whose keys and values are projected from the latent
        first."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        """The operations for a decode and one key; a decode multiplies with the latent itself."""
        return 2 * self.num_heads * (self.latent_values + self.latent_dim)

    @property
    def index_flops_per_pair(self) -> int:
        """The operations with which the layer's own index scores one key for one query."""
        return 2 * self.index_heads * self.index_dim


@dataclass(frozen=True)
class RecurrentState:
    """Describes linear attention, delta rules and Mamba, which sum up all tokens so far in one matrix a head.

    Nothing is cached for a token; a request keeps one state in fp32, however long it is.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    """size of keys and queries: rows of a head's matrix"""
    v_head_dim: int
    """size of values: columns of a head's matrix"""
    parameters: tuple[Parameter, ...]
    """listed by the family's description, since hardly two families have the same"""
    key_heads: int = 0
    """heads of keys and queries, each of which neighbouring heads share; 0: as many as there are heads"""
    taps: int = 0
    """tokens that a short convolution over queries, keys and values sees, all of which are kept; 0: there is none"""
    by_key_head: bool = False
    """one projection gives what belongs to one key head side by side, not all queries, then all keys, and so on"""
    eps: float = 1e-6
    """of the norm behind the state"""
    slots: int = 1
    """states that a request keeps, one for each token of its decodes, so that guesses can be taken back"""

    kind = "state"
    window = sparse_top_k = turns = None
    causal = True
    cached_values = index_dim = flops_per_pair = decode_flops_per_pair = index_flops_per_pair = 0

    @property
    def num_kv_heads(self) -> int:
        """The number of heads, each of which keeps a state."""
        return self.num_heads

    @property
    def channels(self) -> int:
        """The number of queries, keys and values of a token, of all heads."""
        return 2 * (self.key_heads or self.num_heads) * self.head_dim + self.num_heads * self.v_head_dim

    @property
    def state_values(self) -> int:
        """The number of values kept for a request, of all heads."""
        window = (self.taps + self.slots - 1) * self.channels if self.taps else 0
        return self.slots * self.num_heads * self.head_dim * self.v_head_dim + window

    def cache_share(self, ranks: int) -> float:
        """Return the share of the state that one of `ranks` holds."""
        return math.ceil(self.num_heads / ranks) / self.num_heads

    @property
    def flops_per_token(self) -> int:
        """The operations of a token beside products with weights: the state decays, is updated and is read."""
        return 5 * self.num_heads * self.head_dim * self.v_head_dim


Mixer = Attention | LatentAttention | RecurrentState
