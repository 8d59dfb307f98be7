"""Which layers of a model are computed together, found out from one recorded run of its forward.

Leaf layers (norms, linears, experts, embedding) are replaced by stand-ins that write down who reads whose output; the
code in between is the model's own. A norm with one reader is left to that reader's pass, and the layer whose output it
adds to the residual computes straight into it. No layer knows its neighbours: it is told here, once, before it settles.
"""

from __future__ import annotations

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
from headrace.layers.norm import RMSNorm


@dataclass(eq=False)
class Recorded:
    """Stands for a tensor [1, 1] in the recorded run. Whatever else is done with it than handing it to a leaf counts as
    a reader that wants it whole."""

    maker: nn.Module | None
    readers: list[nn.Module | None] = field(default_factory=list)
    shape = (1, 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.readers.append(None)
        return lambda *arguments, **options: Recorded(None)

    def __getitem__(self, index: Any) -> Recorded:
        self.readers.append(None)
        return Recorded(None)

    def __add__(self, other: Any) -> Recorded:
        return _reads_whole(self, other)

    __radd__ = __mul__ = __rmul__ = __add__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Recorded:
        """torch.cat and the like"""
        return _reads_whole(args, kwargs)


@dataclass(frozen=True)
class Norm:
    """One norm of the run: what it added to the residual, and what it gave."""

    norm: RMSNorm
    hidden: Recorded
    adds: bool
    """False: there was no residual yet"""
    out: Recorded

    def reader(self) -> Linear | SparseMoE | None:
        """The one layer that reads the norm and can norm by itself; None: there is none, or there are others."""
        readers = self.out.readers
        reader = readers[0] if len(readers) == 1 else None
        return reader if isinstance(reader, Linear | SparseMoE) else None

    def source(self) -> RowParallelLinear | SparseMoE | None:
        """The layer whose output is added here and read nowhere else."""
        maker = self.hidden.maker if self.adds and len(self.hidden.readers) == 1 else None
        return maker if isinstance(maker, RowParallelLinear | SparseMoE) else None


def fuse(model: Any, num_layers: int, device: torch.device) -> str:
    """Tell each layer of `model`, which has weights and is not settled, what it computes beside its own. Returns the
    line for the log."""
    try:
        norms = record(model, num_layers, device)
    except Exception as error:  # a family's own code may do with a stand-in what only a tensor can
        why = f"{type(error).__name__}: {error}"
        return f"No norm is fused: a run of {type(model).__name__} cannot be recorded ({why})."
    fused = summed = 0
    for found in norms:
        reader, source = found.reader(), found.source()
        if reader is not None:
            found.norm.deferred = True
            reader.fuse_norm(found.norm)
            fused += 1
        if source is not None:
            source.pending = True
            summed += 1
            if isinstance(reader, Linear):
                source.fuse_next_norm(found.norm)
    return (
        f"Fused: {fused} of {len(norms)} norms into the layers that read them, {summed} sums with the residual into "
        "the layers before."
    )


def record(model: Any, num_layers: int, device: torch.device) -> list[Norm]:
    """The norms of one run over a token, in its order."""
    norms: list[Norm] = []
    token = torch.zeros(1, dtype=torch.int64, device=device)
    with _stand_ins(model, norms):
        model(token, token, SimpleNamespace(cut=None), [None] * num_layers)
    return norms


@contextmanager
def _stand_ins(model: nn.Module, norms: list[Norm]) -> Iterator[None]:
    """Within, leaf layers write down who reads whom and compute nothing."""
    replaced: list[tuple[nn.Module, str]] = []
    try:
        for layer in model.modules():
            stand_ins: dict[str, Callable[..., Any]] = {}
            if isinstance(layer, RMSNorm):
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


def _reads_whole(*arguments: Any, **options: Any) -> Recorded:
    for value in tree_flatten((arguments, options))[0]:
        if isinstance(value, Recorded):
            value.readers.append(None)
    return Recorded(None)


def _norms(norms: list[Norm], layer: RMSNorm, hidden: Any, residual: Any = None) -> tuple[Recorded, Recorded]:
    read = hidden if isinstance(hidden, Recorded) else Recorded(None)
    read.readers.append(layer)
    norms.append(Norm(layer, read, residual is not None, Recorded(layer)))
    return norms[-1].out, Recorded(None)


def _reads(layer: nn.Module, x: Any) -> Recorded:
    if isinstance(x, Recorded):
        x.readers.append(layer)
    return Recorded(layer)
