"""Describes tensors of a checkpoint: their names and shapes, and how ranks divide them. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.layer_parts import Norm

Kind = Literal["linear", "plain", "router"]
"""A linear may be held in a weight format; plain tensors (norms, biases, sinks) and routers keep the model's dtype"""
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
    tensors = [Parameter(f"{name}.weight", sizes, "plain", split, wide=of.float32)] if of.weight else []
    return tensors + ([Parameter(f"{name}.bias", sizes, "plain", split)] if of.bias else [])


def total(parameters: tuple[Parameter, ...], *kinds: Kind, split: Split | None = None) -> int:
    """Return how many elements `parameters` have; `kinds` and `split` leave out others."""
    return sum(p.size for p in parameters if (not kinds or p.kind in kinds) and (split is None or p.split == split))
