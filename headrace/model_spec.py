"""What a model is made of, layer by layer, in integers and names: one description that every part of the engine reads.

A `LayerSpec` pairs a token mixer with a feed-forward; each lists its tensors as a checkpoint holds them, how they are
split over ranks, what it caches for a token and what it computes. Imports no torch, and knows no family: descriptions
are made in models/descriptions.py.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Kind = Literal["linear", "plain", "router"]
"""linear: a weight format may hold it; plain (norms, biases, sinks) and router: in the model's dtype, always"""
Split = Literal["heads", "kv_heads", "width", "whole"]
"""Over which of its sizes the ranks of a tensor-parallel group divide a tensor; whole: each rank holds all of it.
Where there are fewer KV heads than ranks, neighbouring ranks hold the same one."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of a checkpoint."""

    name: str
    """below the layer: `self_attn.q_proj.weight`"""
    shape: tuple[int, ...]
    kind: Kind
    split: Split

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def linear(name: str, outputs: int, inputs: int, split: Split, bias: Split | None = None) -> list[Parameter]:
    """The weight of a linear, [outputs, inputs], and its bias, split as `bias` says; None: it has none."""
    found = [Parameter(f"{name}.weight", (outputs, inputs), "linear", split)]
    return found if bias is None else [*found, Parameter(f"{name}.bias", (outputs,), "plain", bias)]


def norm(name: str, size: int, split: Split = "whole") -> Parameter:
    return Parameter(f"{name}.weight", (size,), "plain", split)


def total(parameters: tuple[Parameter, ...], *kinds: Kind, split: Split | None = None) -> int:
    """How many numbers those of `kinds` (none named: of any) hold, all or those that are split as `split`."""
    return sum(p.size for p in parameters if (not kinds or p.kind in kinds) and (split is None or p.split == split))


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: keys and values of `num_kv_heads` heads are cached for each token."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """keys a query sees at most, itself included; None: all"""
    chunked: bool = False
    """`window` is the size of a chunk: a query sees the keys of its own chunk alone"""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "wide"] = "none"
    """RMS norm of queries and keys before they are rotated: of each head, or of all heads as one vector"""
    sinks: bool = False
    """a learned logit for each head takes part in the softmax and adds no value"""
    causal: bool = True
    """False: a query sees the keys that come later too (an encoder), so nothing is cached"""
    rotary: bool = True
    """queries and keys are rotated by their positions"""

    kind = "gqa"
    sparse_top_k = None
    state_values = flops_per_token = 0

    @property
    def v_head_dim(self) -> int:
        return self.head_dim

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        hidden, dim = self.hidden_size, self.head_dim
        q, kv = self.num_heads * dim, self.num_kv_heads * dim
        found = linear("self_attn.q_proj", q, hidden, "heads", "heads" if self.qkv_bias else None)
        for name in ("k_proj", "v_proj"):
            found += linear(f"self_attn.{name}", kv, hidden, "kv_heads", "kv_heads" if self.qkv_bias else None)
        found += linear("self_attn.o_proj", hidden, q, "heads", "whole" if self.o_bias else None)
        if self.qk_norm == "head":
            found += [norm("self_attn.q_norm", dim), norm("self_attn.k_norm", dim)]
        elif self.qk_norm == "wide":
            found += [norm("self_attn.q_norm", q, "heads"), norm("self_attn.k_norm", kv, "kv_heads")]
        if self.sinks:
            found.append(Parameter("self_attn.sinks", (self.num_heads,), "plain", "heads"))
        return tuple(found)

    @property
    def cached_values(self) -> int:
        """Numbers cached for a token: K and V."""
        return 2 * self.num_kv_heads * self.head_dim if self.causal else 0

    def cache_share(self, ranks: int) -> float:
        """What one of `ranks` holds of the cache."""
        return math.ceil(self.num_kv_heads / ranks) / self.num_kv_heads

    @property
    def flops_per_pair(self) -> int:
        """Operations for one query and one key, of all heads."""
        return 4 * self.num_heads * self.head_dim

    decode_flops_per_pair = flops_per_pair


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the keys and values of all heads are projected from
    one latent, and the latent is what is cached. With `index_top_k`, an indexer chooses the keys (DeepSeek-V3.2)."""

    hidden_size: int
    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_head_dim: int
    q_rank: int | None = None
    """of queries' own latent; None: they are projected at once"""
    sparse_top_k: int | None = None
    """keys that a query attends to after the index has chosen them; None: all"""
    index_heads: int = 0
    index_dim: int = 0

    kind = "mla"
    num_kv_heads = 1
    window = None
    causal = True
    state_values = flops_per_token = 0

    @property
    def head_dim(self) -> int:
        """of queries and keys"""
        return self.nope_dim + self.rope_dim

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        hidden, heads, latent, q_rank = self.hidden_size, self.num_heads, self.latent_dim, self.q_rank
        q = heads * self.head_dim
        if q_rank is None:
            found = linear("self_attn.q_proj", q, hidden, "heads")
        else:
            found = linear("self_attn.q_a_proj", q_rank, hidden, "whole")
            found.append(norm("self_attn.q_a_layernorm", q_rank))
            found += linear("self_attn.q_b_proj", q, q_rank, "heads")
        found += linear("self_attn.kv_a_proj_with_mqa", latent + self.rope_dim, hidden, "whole")
        found.append(norm("self_attn.kv_a_layernorm", latent))
        found += linear("self_attn.kv_b_proj", heads * (self.nope_dim + self.v_head_dim), latent, "heads")
        found += linear("self_attn.o_proj", hidden, heads * self.v_head_dim, "heads")
        if self.sparse_top_k is not None:
            keys, indexer = self.index_dim, "self_attn.indexer"
            found += linear(f"{indexer}.wq_b", self.index_heads * keys, q_rank or hidden, "whole")
            found += linear(f"{indexer}.wk", keys, hidden, "whole")
            found += [norm(f"{indexer}.k_norm", keys), Parameter(f"{indexer}.k_norm.bias", (keys,), "plain", "whole")]
            found.append(Parameter(f"{indexer}.weights_proj.weight", (self.index_heads, hidden), "plain", "whole"))
        return tuple(found)

    @property
    def cached_values(self) -> int:
        """Numbers cached for a token: the latent, the rotated part of the key, and the index's key."""
        return self.latent_dim + self.rope_dim + self.index_dim

    def cache_share(self, ranks: int) -> float:
        """All of it on each of `ranks`: a latent has no heads."""
        return 1.0

    @property
    def flops_per_pair(self) -> int:
        """For one query and one key of a prompt, whose keys and values are projected from the latent first."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        """A decode meets the latent itself."""
        return 4 * self.num_heads * self.cached_values


@dataclass(frozen=True)
class RecurrentState:
    """Linear attention, delta rules, Mamba: all tokens so far are summed up in a matrix a head, which each further one
    changes. Nothing is cached for a token; what a request keeps is one state, in fp32, however long it is."""

    hidden_size: int
    num_heads: int
    head_dim: int
    """of keys and queries: rows of a head's matrix"""
    v_head_dim: int
    """of values: its columns"""
    parameters: tuple[Parameter, ...]
    """listed by the family's description: hardly two families have the same ones"""
    window_values: int = 0
    """numbers of the latest tokens that a short convolution before it keeps, of all heads"""

    kind = "state"
    window = sparse_top_k = None
    causal = True
    cached_values = flops_per_pair = decode_flops_per_pair = 0

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def state_values(self) -> int:
        """Numbers kept for a request, of all heads."""
        return self.num_heads * self.head_dim * self.v_head_dim + self.window_values

    def cache_share(self, ranks: int) -> float:
        """What one of `ranks` holds of the state."""
        return math.ceil(self.num_heads / ranks) / self.num_heads

    @property
    def flops_per_token(self) -> int:
        """Operations that each token costs beside products with weights: the state decays, takes it up and is read."""
        return 5 * self.num_heads * self.head_dim * self.v_head_dim


@dataclass(frozen=True)
class DenseMLP:
    """down(silu(gate(x)) * up(x)), of which every token uses all."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False

    num_experts = experts_per_token = expert_intermediate_size = 0
    expert_parameters: tuple[Parameter, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those that every token uses."""
        return gated("mlp", self.hidden_size, self.intermediate_size, self.bias)


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint calls the tensors of experts: `<block>.experts.3.<gate>.weight`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_expert"


@dataclass(frozen=True)
class Experts:
    """A router picks each token's experts, whose weighted outputs are summed, beside those of shared experts."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    """of one expert, on all ranks together"""
    renormalize: bool = True
    """whether the weights of a token's experts are made to sum to one"""
    sigmoid: bool = False
    """a router's logits become weights one by one, not by a softmax"""
    selection_bias: bool = False
    """each expert has a number that is added to its weight where the best are chosen, and nowhere else"""
    scaling: float = 1.0
    """what the weights of a token's experts are multiplied by, last"""
    intermediate_size: int = 0
    """of all shared experts together, which every token visits; 0: there are none"""
    shared_gate: bool = False
    """the shared experts stand behind a sigmoid gate"""
    bias: bool = False
    """of router and experts"""
    names: ExpertNames = ExpertNames()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Those that every token uses: router and shared experts."""
        hidden, names, block = self.hidden_size, self.names, self.names.block
        found = [Parameter(f"{block}.{names.router}.weight", (self.num_experts, hidden), "router", "whole")]
        if self.bias:
            found.append(Parameter(f"{block}.{names.router}.bias", (self.num_experts,), "router", "whole"))
        if self.selection_bias:
            name = f"{block}.{names.router}.e_score_correction_bias"
            found.append(Parameter(name, (self.num_experts,), "router", "whole"))
        if self.shared_gate:
            found.append(Parameter(f"{block}.shared_expert_gate.weight", (1, hidden), "router", "whole"))
        if self.intermediate_size:
            found += gated(f"{block}.{names.shared}", hidden, self.intermediate_size)
        return tuple(found)

    @cached_property
    def expert_parameters(self) -> tuple[Parameter, ...]:
        """Those of one expert."""
        names = self.names
        parts = (names.gate, names.up, names.down)
        return gated(f"{names.block}.experts.*", self.hidden_size, self.expert_intermediate_size, self.bias, parts)


def gated(
    block: str,
    hidden: int,
    width: int,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Parameter, ...]:
    """The three linears of a gated feed-forward."""
    gate, up, down = names
    split: Split | None = "width" if bias else None
    found = linear(f"{block}.{gate}", width, hidden, "width", split) + linear(
        f"{block}.{up}", width, hidden, "width", split
    )
    return (*found, *linear(f"{block}.{down}", hidden, width, "width", "whole" if bias else None))


Mixer = Attention | LatentAttention | RecurrentState
FeedForward = DenseMLP | Experts
STATE_BYTES = 4
"""of a number of a state: rounding would add up from token to token"""


@dataclass(frozen=True)
class LayerSpec:
    mixer: Mixer
    feed_forward: FeedForward
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """RMS norms of the whole hidden state around the two, by name"""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of the layer, those of each expert too."""
        norms = tuple(norm(name, self.mixer.hidden_size) for name in self.norms)
        block = self.feed_forward
        each = (
            replace(parameter, name=parameter.name.replace("*", str(expert)))
            for expert in range(block.num_experts)
            for parameter in block.expert_parameters
        )
        return (*norms, *self.mixer.parameters, *block.parameters, *each)

    @property
    def norm_weights(self) -> int:
        return len(self.norms) * self.mixer.hidden_size

    @cached_property
    def weights(self) -> int:
        """Parameters, all in all."""
        return self.shared_weights + self.feed_forward.num_experts * self.expert_weights

    @cached_property
    def active_weights(self) -> int:
        """Parameters that one token uses."""
        return self.shared_weights + self.feed_forward.experts_per_token * self.expert_weights

    @cached_property
    def shared_weights(self) -> int:
        """Parameters that every token uses."""
        return total(self.mixer.parameters) + total(self.feed_forward.parameters) + self.norm_weights

    @cached_property
    def expert_weights(self) -> int:
        """Parameters of one expert; 0 where there are none."""
        return total(self.feed_forward.expert_parameters)


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. Layers that are alike are equal, and can be counted."""

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool = False
    """the embedding serves as head"""
    vision_weights: int = 0
    """parameters of an encoder of images, which a step of text does not read"""
    draft_weights: int = 0
    """parameters of layers that predict further tokens, loaded for speculation alone"""

    @cached_property
    def groups(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Layers that are alike and how many there are of each, in the order in which they first come."""
        return tuple(Counter(self.layers).items())

    @property
    def is_moe(self) -> bool:
        return any(layer.feed_forward.num_experts for layer in self.layers)
