"""Decides which layers of a model are computed together, from one recorded run of its forward.

In that run leaf layers (norms, linears, experts, embedding) only record which layer reads which output; the code in
between is the model's own. An RMS norm is fused into the layer that reads it, or into several linears that do, and the
sum with the residual in front of any norm into the layer whose output it adds, which may be a norm too. Layers do not
know their neighbours; this module tells them, before `finalize`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from headrace.layers.embedding import VocabParallelEmbedding
from headrace.layers.layer import Layer
from headrace.layers.linear import Linear, RowParallelLinear
from headrace.layers.moe import SparseMoE
from headrace.layers.norm import LayerNorm, RMSNorm, Sum


@dataclass(eq=False)
class Placeholder:
    """Stands for a tensor [1, 1] in the recorded run. Any operation on it outside a leaf layer counts as a reader
    (None) that needs the tensor's final value."""

    maker: nn.Module | None
    """the leaf layer whose output it is; None: another operation's"""
    readers: list[nn.Module | None] = field(default_factory=list)
    shape = (1, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.readers.append(None)
        return lambda *arguments, **options: Placeholder(None)

    def __getitem__(self, index: Any) -> Placeholder:
        self.readers.append(None)
        return Placeholder(None)

    def __add__(self, other: Any) -> Placeholder:
        return _reads_whole(self, other)

    __radd__ = __mul__ = __rmul__ = __add__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Placeholder:
        """Record torch.cat and the like."""
        return _reads_whole(args, kwargs)


@dataclass(frozen=True)
class Norm:
    """Describes a norm of the run, or a sum that is not normed."""

    norm: RMSNorm | LayerNorm | Sum
    hidden: Placeholder
    """its input, which it adds to the residual"""
    adds: bool
    """False: there was no residual yet"""
    out: Placeholder

    def readers(self) -> list[Linear | SparseMoE]:
        """Return the layers that read the norm, if they can compute the norm themselves: linears, or experts alone;
        else none."""
        found = [one for one in self.out.readers if isinstance(one, Linear | SparseMoE)]
        able = isinstance(self.norm, RMSNorm) and len(found) == len(self.out.readers)
        return found if able and (len(found) == 1 or all(isinstance(one, Linear) for one in found)) else []

    def source(self) -> RowParallelLinear | SparseMoE | RMSNorm | None:
        """Return the layer whose output is added to the residual here and read nowhere else, if it can add it
        itself."""
        maker = self.hidden.maker if self.adds and len(self.hidden.readers) == 1 else None
        return maker if isinstance(maker, RowParallelLinear | SparseMoE | RMSNorm) else None


def fuse(model: Any, num_layers: int, device: torch.device, embeds: bool = True, reads_hidden: bool = False) -> str:
    """Tell each layer of `model`, which has weights and is not finalized, what else it is to compute. Return the line
    for the log. `embeds`: False for a pipeline stage that hidden states come into; `reads_hidden`: hidden states of
    another model come into it beside tokens."""
    try:
        norms = record(model, num_layers, device, embeds, reads_hidden)
    except Exception as error:  # a family's own code may do with a placeholder what only a tensor can
        why = f"{type(error).__name__}: {error}"
        return f"No norm is fused: a run of {type(model).__name__} cannot be recorded ({why})."
    fused = summed = 0
    uses = Counter(recorded.norm for recorded in norms)
    for recorded in norms:
        norm, readers, source = recorded.norm, recorded.readers(), recorded.source()
        if isinstance(source, RMSNorm) and uses[source] > 1:
            source = None
        if readers and isinstance(norm, RMSNorm):
            norm.deferred, norm.half_is_left = True, isinstance(readers[0], Linear)
            norm.sum_is_left = norm.half_is_left and len(readers) == 1
            for reader in readers:
                reader.fuse_norm(norm)
            fused += 1
        if source is not None:
            source.pending = True
            summed += 1
        if isinstance(source, RMSNorm):
            source.next_makes_sum = isinstance(norm, RMSNorm) and (norm.sum_is_left or not norm.deferred)
        elif source is not None and isinstance(norm, RMSNorm) and norm.half_is_left:
            source.fuse_next_norm(norm)
    return (
        f"Fused: {fused} of {len(norms)} norms into the layers that read them, {summed} sums with the residual into "
        "the layers before."
    )


def record(
    model: Any, num_layers: int, device: torch.device, embeds: bool = True, reads_hidden: bool = False
) -> list[Norm]:
    """Run the model over one token and return its norms in order."""
    norms: list[Norm] = []
    token = torch.zeros(1, dtype=torch.int64, device=device)
    more = (Placeholder(None),) if reads_hidden else ()
    with _recording(model, norms):
        step = SimpleNamespace(cut=None, tapped=None)
        model(token if embeds else Placeholder(None), token, step, [None] * num_layers, *more)
    return norms


@contextmanager
def _recording(model: nn.Module, norms: list[Norm]) -> Iterator[None]:
    """Let leaf layers record which outputs they read, and compute nothing."""
    replaced: list[tuple[nn.Module, str]] = []
    try:
        for layer in model.modules():
            stand_ins: dict[str, Callable[..., Any]] = {}
            if isinstance(layer, RMSNorm | LayerNorm | Sum):
                stand_ins["forward"] = partial(_norms, norms, layer)
            elif isinstance(layer, Linear | SparseMoE | VocabParallelEmbedding):
                stand_ins["forward"] = partial(_reads, layer)
            elif isinstance(layer, Layer):
                stand_ins = dict.fromkeys(layer.opaque, _reads_whole)
            for name, stand_in in stand_ins.items():
                setattr(layer, name, stand_in)
                replaced.append((layer, name))
        yield
    finally:
        for layer, name in replaced:
            delattr(layer, name)


def _reads_whole(*arguments: Any, **options: Any) -> Placeholder:
    for value in tree_flatten((arguments, options))[0]:
        if isinstance(value, Placeholder):
            value.readers.append(None)
    return Placeholder(None)


def _norms(
    norms: list[Norm], layer: RMSNorm | LayerNorm | Sum, hidden: Any, residual: Any = None
) -> tuple[Placeholder, Placeholder]:
    read = hidden if isinstance(hidden, Placeholder) else Placeholder(None)
    read.readers.append(layer)
    adds = residual is not None
    norms.append(Norm(layer, read, adds, Placeholder(None if adds else layer)))
    return norms[-1].out, Placeholder(None)


def _reads(layer: nn.Module, x: Any) -> Placeholder:
    if isinstance(x, Placeholder):
        x.readers.append(layer)
    return Placeholder(layer)
