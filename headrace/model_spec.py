"""Describes a model layer by layer, in integers and names, for every part of the engine.

A `LayerSpec` pairs a token mixer with a feed-forward. Each lists its tensors as a checkpoint holds them and how they
are split over ranks, what it caches for a token, and what it computes. Families are described in
models/descriptions.py. This file imports no torch, so that planner and command line can read it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.layer_parts import Norm, Norms, Rope, Temperature, TextEmbedding, Turns

Kind = Literal["linear", "plain", "router"]
"""A linear may be held in a weight format; plain tensors (norms, biases, sinks) and routers keep the model's dtype"""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
"""what is done to the gate of a feed-forward; gelu_tanh: GELU (arXiv 1606.08415) as approximated with a tanh; relu2:
the square of what is above zero"""
Split = Literal["heads", "kv_heads", "width", "whole"]
"""The size of a tensor that tensor-parallel ranks divide among them; whole: each rank holds all of it. Where there are
fewer KV heads than ranks, neighbouring ranks hold the same one."""


@dataclass(frozen=True)
class Parameter:
    """Describes one tensor of a checkpoint."""

    name: str
    """below the layer: `self_attn.q_proj.weight`"""
    shape: tuple[int, ...]
    kind: Kind
    split: Split
    axis: int = 0
    """the dimension that ranks divide"""
    fused: str = ""
    """the linear of ours that it is a part of, beside others over the same inputs; empty: none"""
    wide: bool = False
    """kept in float32, whatever the model's type"""
    widened: bool = False
    """a linear that is kept in the model's type, whatever format the checkpoint holds it in"""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def plain_bytes(self, itemsize: int) -> int:
        """Return the bytes that it takes unquantized in a model whose type has `itemsize` of them."""
        return self.size * (WIDE_BYTES if self.wide else itemsize)


WIDE_BYTES = 4
"""Bytes of a number in float32"""


def linear(
    name: str, outputs: int, inputs: int, split: Split, bias: Split | None = None, axis: int = 0, fused: str = ""
) -> list[Parameter]:
    """Return the weight of a linear, [outputs, inputs], and its bias, split as `bias` says; None: it has no bias."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), "linear", split, axis, fused)
    return [weight] if bias is None else [weight, Parameter(f"{name}.bias", (outputs,), "plain", bias)]


def norm(name: str, shape: int | tuple[int, ...], split: Split = "whole", of: Norm | None = None) -> list[Parameter]:
    """Return the tensors of a norm like `of`; None: like the usual one."""
    of, sizes = of or Norm(), (shape,) if isinstance(shape, int) else shape
    tensors = [Parameter(f"{name}.weight", sizes, "plain", split, wide=of.plus_one)] if of.weight else []
    return tensors + ([Parameter(f"{name}.bias", sizes, "plain", split)] if of.bias else [])


def total(parameters: tuple[Parameter, ...], *kinds: Kind, split: Split | None = None) -> int:
    """Return how many elements `parameters` have; `kinds` and `split` leave out others."""
    return sum(p.size for p in parameters if (not kinds or p.kind in kinds) and (split is None or p.split == split))


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
    """each head's output is multiplied with the sigmoid of as many numbers, which are projected beside its query"""
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
        tensors = linear("self_attn.q_proj", q * (1 + self.output_gate), inputs, "heads", q_bias, fused="qkv_proj")
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
        return self.num_heads * self.head_dim * self.v_head_dim + self.taps * self.channels

    def cache_share(self, ranks: int) -> float:
        """Return the share of the state that one of `ranks` holds."""
        return math.ceil(self.num_heads / ranks) / self.num_heads

    @property
    def flops_per_token(self) -> int:
        """The operations of a token beside products with weights: the state decays, is updated and is read."""
        return 5 * self.num_heads * self.head_dim * self.v_head_dim


@dataclass(frozen=True)
class DenseMLP:
    """Describes a dense feed-forward, down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    names: tuple[str, str] = ("up_proj", "down_proj")
    """of the linears of one without a gate"""
    block: str = "mlp"
    """its name in a checkpoint"""

    num_experts = experts_per_token = expert_intermediate_size = 0
    expert_parameters: tuple[Parameter, ...] = ()
    all_expert_parameters: tuple[Parameter, ...] = ()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The layer's tensors."""
        hidden, width, (up, down) = self.hidden_size, self.intermediate_size, self.names
        if self.gated:
            return gated(self.block, hidden, width, self.bias)
        biases: tuple[Split | None, Split | None] = ("width", "whole") if self.bias else (None, None)
        first = linear(f"{self.block}.{up}", width, hidden, "width", biases[0])
        return (*first, *linear(f"{self.block}.{down}", hidden, width, "width", biases[1], axis=1))


@dataclass(frozen=True)
class ExpertNames:
    """Holds the names of a checkpoint's tensors of experts: `<block>.experts.3.<gate>.weight`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared: str = "shared_expert"
    selection: str = "gate.e_score_correction_bias"
    """the biases with which experts are chosen"""
    stacked: str = ""
    """name of one tensor for all experts' gates and ups, [experts, in, out] with gate and up in turn, beside a tensor
    `down`: `<block>.experts.<stacked>`; empty: each expert has tensors of its own"""


@dataclass(frozen=True)
class Experts:
    """Describes a mixture of experts: a router picks each token's experts, whose weighted outputs are added to those of
    shared experts."""

    hidden_size: int
    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    """of one expert, over all ranks"""
    renormalize: bool = True
    """the weights of a token's experts are scaled to sum to one"""
    sigmoid: bool = False
    """the router's logits become weights by a sigmoid, not by a softmax"""
    selection_bias: bool = False
    """each expert has a bias that is added to its weight when experts are chosen, and only then"""
    scaling: float = 1.0
    """factor of the weights of a token's experts, applied last"""
    groups: int = 1
    """experts are in so many groups of equal size"""
    used_groups: int = 1
    """a token's experts come from so many groups: those with the best expert, or with a sigmoid with the best two"""
    intermediate_size: int = 0
    """of all shared experts together, which every token uses; 0: there are none"""
    shared_gate: bool = False
    """the output of the shared experts is multiplied with a sigmoid gate"""
    bias: bool = False
    """router and experts have biases"""
    scales_input: bool = False
    """a token's weight of an expert is a factor of what the expert is given, not of its output"""
    halves_shared: bool = False
    """the shared experts' output is halved: by a gate of zeros, which a checkpoint need not hold"""
    clamp: tuple[float, float] | None = None
    """(alpha, limit): the activation is gate * sigmoid(alpha * gate) * (up + 1), gate being at most `limit` and up
    within +-limit; None: silu(gate) * up"""
    names: ExpertNames = ExpertNames()

    @property
    def block(self) -> str:
        """Its name in a checkpoint."""
        return self.names.block

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The tensors that every token uses: router and shared experts."""
        hidden, names, block = self.hidden_size, self.names, self.names.block
        tensors = [Parameter(f"{block}.{names.router}.weight", (self.num_experts, hidden), "router", "whole")]
        if self.bias:
            tensors.append(Parameter(f"{block}.{names.router}.bias", (self.num_experts,), "router", "whole"))
        if self.selection_bias:
            name = f"{block}.{names.selection}"
            tensors.append(Parameter(name, (self.num_experts,), "router", "whole", wide=True))
        if self.shared_gate or self.halves_shared:
            tensors.append(Parameter(f"{block}.shared_expert_gate.weight", (1, hidden), "router", "whole"))
        if self.intermediate_size:
            tensors += gated(f"{block}.{names.shared}", hidden, self.intermediate_size)
        return tuple(tensors)

    @cached_property
    def expert_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of one expert."""
        names = self.names
        parts = (names.gate, names.up, names.down)
        return gated(f"{names.block}.experts.*", self.hidden_size, self.expert_intermediate_size, self.bias, parts)

    @cached_property
    def all_expert_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of all experts, as a checkpoint names them."""
        names, number = self.names, self.num_experts
        if not names.stacked:
            return tuple(
                replace(parameter, name=parameter.name.replace("*", str(expert)))
                for expert in range(number)
                for parameter in self.expert_parameters
            )
        hidden, wide, block = self.hidden_size, self.expert_intermediate_size, f"{names.block}.experts"
        tensors = [
            Parameter(f"{block}.{names.stacked}", (number, hidden, 2 * wide), "linear", "width"),
            Parameter(f"{block}.{names.down}", (number, wide, hidden), "linear", "width"),
        ]
        if self.bias:
            tensors.append(Parameter(f"{block}.{names.stacked}_bias", (number, 2 * wide), "plain", "width"))
            tensors.append(Parameter(f"{block}.{names.down}_bias", (number, hidden), "plain", "whole"))
        return tuple(tensors)


def gated(
    block: str,
    hidden: int,
    width: int,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Parameter, ...]:
    """Return the tensors of a gated feed-forward, named `names` (gate, up, down) below `block`."""
    gate, up, down = names
    split: Split | None = "width" if bias else None
    return (
        *linear(f"{block}.{gate}", width, hidden, "width", split, fused="gate_up_proj"),
        *linear(f"{block}.{up}", width, hidden, "width", split, fused="gate_up_proj"),
        *linear(f"{block}.{down}", hidden, width, "width", "whole" if bias else None, axis=1),
    )


Mixer = Attention | LatentAttention | RecurrentState
FeedForward = DenseMLP | Experts
STATE_BYTES = 4
"""Bytes of a value of a state, whose rounding errors would add up from token to token"""


@dataclass(frozen=True)
class LayerSpec:
    """Describes one layer."""

    mixer: Mixer
    feed_forward: FeedForward
    norms: Norms = Norms()

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of the layer's tensors, those of each expert too."""
        block = self.feed_forward
        return (*self.norm_parameters, *self.mixer.parameters, *block.parameters, *block.all_expert_parameters)

    @cached_property
    def norm_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of the norms of the whole hidden state."""
        named = self.norms.named.items()
        return tuple(tensor for name, one in named for tensor in norm(name, self.mixer.hidden_size, of=one))

    @cached_property
    def weights(self) -> int:
        """The number of all parameters."""
        return self.shared_weights + self.feed_forward.num_experts * self.expert_weights

    @cached_property
    def active_weights(self) -> int:
        """The number of parameters that one token uses."""
        return self.shared_weights + self.feed_forward.experts_per_token * self.expert_weights

    @cached_property
    def shared_weights(self) -> int:
        """The number of parameters that every token uses."""
        return total(self.mixer.parameters) + total(self.feed_forward.parameters) + total(self.norm_parameters)

    @cached_property
    def expert_weights(self) -> int:
        """The number of parameters of one expert; 0 where there are no experts."""
        return total(self.feed_forward.expert_parameters)


@dataclass(frozen=True)
class HeadSpec:
    """Describes a head: one layer that guesses the next token from a hidden state of the model and the embedding of the
    token behind it (EAGLE, arXiv 2401.15077 and 2503.01840; multi-token prediction, arXiv 2412.19437)."""

    layer: LayerSpec
    max_position_embeddings: int
    joins: Literal["embedding_first", "hidden_first", "in_attention"] = "embedding_first"
    """A linear makes the layer's input of embedding and hidden state, in this order or the other; in_attention: both
    are what queries, keys and values are projected from, and the hidden state is the residual."""
    taps: tuple[int, ...] = ()
    """layers of the model of whose inputs a linear makes the hidden state; empty: it is what the model's logits are
    computed from"""
    vocab_size: int = 0
    """tokens of its own logits, each of which stands for one of the model's; 0: the model's head computes them"""
    input_norm: Norm | None = None
    """of embedding and hidden state, each; None: they are not normed"""
    last_norm: Norm | None = None
    """before its logits"""
    hands_on_normed: bool = False
    """the hidden state for its next guess is the last norm's output, not its input"""
    paths: tuple[tuple[str, str], ...] = ()
    """(one of its parts, that part's name in a checkpoint)"""
    shared: tuple[str, ...] = ()
    """how names begin of tensors that its checkpoint may hold beside it and that are the model's own, or not needed"""
    in_model: bool = False
    """its tensors are in the checkpoint of the model"""
    names: tuple[tuple[str, str], ...] = ()
    """(part of a tensor's name in published files, what it is here)"""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers that cache something."""
        return (self.layer,)

    @property
    def hidden_size(self) -> int:
        """The size of its hidden states, which is the model's."""
        return self.layer.mixer.hidden_size

    @property
    def joined(self) -> int:
        """The number of hidden states, or embeddings, that its linear joins."""
        return len(self.taps) or 2

    @property
    def weights(self) -> int:
        """The number of all parameters."""
        norms = 2 * (self.input_norm is not None) + (self.last_norm is not None)
        return self.layer.weights + (self.joined * self.hidden_size + norms + self.vocab_size) * self.hidden_size

    def path(self, path: str) -> str:
        """Return the name in a checkpoint of a module of the head."""
        part, dot, rest = path.partition(".")
        return f"{dict(self.paths).get(part, part)}{dot}{rest}"

    def skips(self, name: str) -> bool:
        """Tell whether a tensor of its checkpoint is none of the head's."""
        own = tuple(f"{theirs}." for _, theirs in self.paths)
        return name.startswith(self.shared) or (self.in_model and not name.startswith(own))


@dataclass(frozen=True)
class ModelSpec:
    """Describes a whole model. Layers that are alike compare equal, so that they can be counted."""

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool = False
    """the embedding also serves as the head"""
    has_head: bool = True
    """False: there is no head over the vocabulary, since the model does not generate"""
    vision_weights: int = 0
    """parameters of an image encoder, which text does not use"""
    head: HeadSpec | None = None
    """what a checkpoint may hold to guess further tokens, loaded for that alone"""
    taps: tuple[int, ...] = ()
    """layers whose inputs are kept for a head"""
    norm: Norm = Norm()
    """the last one"""
    ends_normed: bool = False
    """the last layer norms its output, so that there is no last norm"""
    text_embedding: TextEmbedding | None = None
    """what is added to embeddings; None: nothing"""
    embedding_scale: float = 1.0
    """factor of embeddings"""
    rounds_embedding_scale: bool = False
    """the factor is rounded to the model's type"""
    logit_scale: float = 1.0
    """factor of logits"""
    head_bias: bool = False
    """the head has a bias for each token"""
    logit_cap: float | None = None
    """logits x then become logit_cap * tanh(x / logit_cap)"""
    names: tuple[tuple[str, str], ...] = ()
    """(part of a tensor's name in published files, what it is here)"""
    first_layer: int = 0
    """the number of the first of `layers`, where they are those of one pipeline stage"""
    has_embedding: bool = True
    """False: hidden states come in, of the stage before"""
    has_end: bool = True
    """False: the sum of the residual goes out, for the stage behind, without norm and head"""

    @property
    def draft_weights(self) -> int:
        """The parameters of its own head, if there is one."""
        return 0 if self.head is None else self.head.weights

    @cached_property
    def norm_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of the last norm, and of what is added to embeddings."""
        hidden, added = self.hidden_size, self.text_embedding
        tensors = [] if self.ends_normed else norm("norm", hidden, of=self.norm)
        if added is not None:
            tensors += norm("embeddings.norm", hidden, of=added.norm)
            for name, rows in (("positions", added.positions), ("types", added.types)):
                tensors += [Parameter(f"embeddings.{name}", (rows, hidden), "plain", "whole")] if rows else []
        return tuple(tensors)

    @cached_property
    def turns(self) -> tuple[Turns, ...]:
        """The different ways in which positions turn queries and keys, in the order of the layers."""
        found = dict.fromkeys(layer.mixer.turns for layer in self.layers)
        return tuple(turns for turns in found if turns is not None)

    @cached_property
    def groups(self) -> tuple[tuple[LayerSpec, int], ...]:
        """The different layers and how many there are of each, in the order of their first appearance."""
        return tuple(Counter(self.layers).items())

    @property
    def is_moe(self) -> bool:
        """True if any layer has experts."""
        return any(layer.feed_forward.num_experts for layer in self.layers)
