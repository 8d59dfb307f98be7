"""Describes what layers of all kinds have within: norms, and how positions turn queries and keys.

These are facts of model_spec.py, and like it they import no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Norm:
    """Describes the norms of a model: RMS norm (arXiv 1910.07467) or layer norm (arXiv 1607.06450)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    weight: bool = True
    """False: there is no weight to multiply by"""
    bias: bool = False
    """a bias is added last; only layer norms have one"""
    plus_one: bool = False
    """checkpoints hold the weight less one; it is kept in float32, in which the sum is exact"""
    rounds_once: bool = False
    """The product with the weight alone is rounded to the model's type, not what is multiplied too."""

    @property
    def float32(self) -> bool:
        """Tells whether the weight is kept in float32, by which kernels know to round once."""
        return self.plus_one or self.rounds_once


@dataclass(frozen=True)
class Norms:
    """Says where a layer norms the hidden state. A text is the norm's name in a checkpoint; empty: there is none."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_block: str = "post_attention_layernorm"
    """before the feed-forward"""
    after_block: str = ""
    parallel: bool = False
    """the feed-forward reads what the mixer reads, or another norm (`before_block`) of the same sum, and both outputs
    are added to the residual"""
    of_sums: bool = False
    """`before_block` and `after_block` norm the sum with the residual, and what is normed is the residual from there on
    (as in "Attention Is All You Need", arXiv 1706.03762)"""
    of_each: tuple[str, ...] = ()
    """those of the outputs of shared experts and of experts that stand beside each other, before both are added"""
    norm: Norm = Norm()
    behind: Norm | None = None
    """those behind mixer and feed-forward; None: they are like the others"""

    @property
    def named(self) -> dict[str, Norm]:
        """The norms that there are, by name."""
        behind = self.behind or self.norm
        every = {self.before_mixer: self.norm, self.after_mixer: behind}
        every |= {self.before_block: self.norm, self.after_block: behind}
        every |= dict.fromkeys(self.of_each, behind)
        return {name: norm for name, norm in every.items() if name}


@dataclass(frozen=True)
class TextEmbedding:
    """Describes what is added to the embeddings of tokens, and the norm of the sum."""

    norm: Norm | None = None
    """None: the sum is not normed"""
    positions: int = 0
    """rows of a table with an embedding for each position; 0: there is none"""
    first_position: int = 0
    """the row of a text's first token"""
    types: int = 0
    """rows of a table with an embedding for each text of a pair; 0: there is none"""


@dataclass(frozen=True)
class Rope:
    """Describes rotary position embeddings (arXiv 2104.09864)."""

    theta: float = 10000.0
    share: float = 1.0
    """the part of a head that is rotated: its first numbers"""
    interleaved: bool = False
    """numbers 2 i and 2 i + 1 are turned together, not i and i + half of what is rotated"""
    kind: str = "default"
    """a key of layers/rotary.py's FREQUENCIES"""
    scaling: tuple[tuple[str, Any], ...] = ()
    """(field, value) of what its kind needs, as config.json has them; lists are tuples"""


@dataclass(frozen=True)
class Temperature:
    """Describes queries that grow with their position (Llama 4): by 1 + beta log(1 + floor((position + first) /
    length))."""

    beta: float
    length: int
    first: int = 0


@dataclass(frozen=True)
class Turns:
    """Says what positions do to a layer's queries and keys. Layers for which it is equal share one table."""

    rope: Rope | None
    rotary_dim: int
    """how many numbers of a head are rotated"""
    temperature: Temperature | None = None

    @property
    def numbers(self) -> int:
        """The numbers of its table for each position, in float32."""
        return self.rotary_dim + (self.temperature is not None)
