"""Describes a model layer by layer, in integers and names, for every part of the engine.

A `LayerSpec` pairs a token mixer (mixers.py) with a feed-forward (feed_forwards.py). Each lists its tensors as a
checkpoint holds them and how they are split over ranks, what it caches for a token, and what it computes. Families are
described in models/descriptions.py. This file imports no torch, so that planner and command line can read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from headrace.feed_forwards import FeedForward
from headrace.layer_parts import Norm, Norms, TextEmbedding, Turns
from headrace.mixers import Attention, Mixer, RecurrentState
from headrace.parameters import Parameter, norm, total


@dataclass(frozen=True)
class LayerSpec:
    """Describes one layer."""

    mixer: Mixer
    feed_forward: FeedForward
    norms: Norms = Norms()
    scaled: bool = False
    """the sum behind the layer is multiplied by a number that the checkpoint has (`layer_scalar`)"""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All of the layer's tensors, those of each expert too."""
        block = self.feed_forward
        return (*self.norm_parameters, *self.mixer.parameters, *block.parameters, *block.all_expert_parameters)

    @cached_property
    def adapted(self) -> tuple[Parameter, ...]:
        """The weights that low-rank adapters may change: not those of routed experts, nor what attention applies by
        itself, nor keys that are values too."""
        both = isinstance(self.mixer, Attention) and self.mixer.values_are_keys
        return tuple(
            one
            for one in (*self.mixer.parameters, *self.feed_forward.parameters)
            if one.kind == "linear" and not one.widened and not (both and one.split == "kv_heads")
        )

    @cached_property
    def norm_parameters(self) -> tuple[Parameter, ...]:
        """The tensors of the norms of the whole hidden state, and of its scale."""
        named = self.norms.named.items()
        tensors = [tensor for name, one in named for tensor in norm(name, self.mixer.hidden_size, of=one)]
        return (*tensors, *([Parameter("layer_scalar", (1,), "plain", "whole")] if self.scaled else []))

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
    """(part of a tensor's name in published files, what it is here); ^ in front: at the beginning alone"""

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
    """(part of a tensor's name in published files, what it is here); ^ in front: at the beginning alone"""
    transposed: tuple[str, ...] = ()
    """ends of the names, in published files, of weights that are there [in, out]"""
    first_layer: int = 0
    """the number of the first of `layers`, where they are those of one pipeline stage"""
    has_embedding: bool = True
    """False: hidden states come in, of the stage before"""
    has_end: bool = True
    """False: the sum of the residual goes out, for the stage behind, without norm and head"""

    def keeping(self, states: int) -> ModelSpec:
        """Return the same model, of whose recurrent states requests keep so many."""
        layers = (
            replace(layer, mixer=replace(layer.mixer, slots=states))
            if isinstance(layer.mixer, RecurrentState)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

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
            tensors += norm("embeddings.norm", hidden, of=added.norm) if added.norm is not None else []
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
