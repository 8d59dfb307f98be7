"""Finds factors for the inputs of linears, so that the columns which matter most are rounded finely (AWQ, arXiv
2306.00978).

The columns of a weight are multiplied by them before it is rounded, and what makes the inputs is divided by them. They
are powers of the inputs' typical size. That power is taken whose rounding changes the outputs on calibration text the
least, which follows from the sum of x.T @ x alone. The power 0 is among them: it is never worse than not scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.convert.folding import Fold, folds_of
from headrace.convert.pieces import Piece
from headrace.convert.rounding import spread
from headrace.convert.watch import Watch
from headrace.convert.weight_scheme import WeightScheme
from headrace.model_spec import LayerSpec

POWERS = 20
"""powers that are tried: 0, 1/20, ... 19/20"""
LEAST = 1e-4
"""of an input's typical size, over the largest"""


@dataclass(frozen=True)
class Scaling:
    """Says what a tensor is multiplied by before it is rounded or written."""

    columns: Tensor | None = None
    """[in] fp32"""
    outputs: Tensor | None = None
    """[out] fp32"""
    plus_one: bool = False
    """of a norm's weight that is stored less one"""

    def applied(self, values: Tensor) -> Tensor:
        """Return a weight [out, in], or a bias or norm [out], scaled."""
        shift = 1.0 if self.plus_one else 0.0
        wide = values.float() + shift
        if self.columns is not None:
            wide = wide * self.columns
        if self.outputs is not None:
            wide = wide * (self.outputs[:, None] if wide.dim() == 2 else self.outputs)
        return (wide - shift).to(values.dtype)


def find_scalings(
    layer: LayerSpec, prefix: str, pieces: Mapping[str, Piece], watch: Watch, scheme: WeightScheme, device: torch.device
) -> dict[str, Scaling]:
    """Return how each tensor of a layer is scaled, by its name here. `prefix`: the layer's name, `model.layers.3.`;
    `pieces`: its tensors by their names here. A fold of which the checkpoint has a part in another form is left out."""
    found: dict[str, Scaling] = {}
    fused = {one.name: one.name.rpartition(".")[0].rpartition(".")[0] + f".{one.fused}" for one in layer.parameters}
    for fold in folds_of(layer):
        makers = [name for end in ("weight", "bias") if (name := f"{prefix}{fold.maker}.{end}") in pieces]
        readers: dict[str, Piece] = {}
        for reader in fold.readers:
            names = (f"{prefix}{reader}", f"{prefix}{fused[f'{reader}.weight']}")
            readers |= {name: pieces[f"{name}.weight"] for name in names if f"{name}.weight" in pieces}
            if not any(name in readers for name in names):
                readers, makers = {}, []
                break
        if not makers:
            continue
        factors = _search(fold, readers, watch, scheme, device)
        if factors is None:
            continue
        of_maker, of_readers = factors
        for name in makers:
            one = found.get(name, Scaling())
            found[name] = replace(one, outputs=1 / of_maker, plus_one=fold.plus_one and name.endswith("weight"))
        for name in readers:
            one = found.get(f"{name}.weight", Scaling())
            found[f"{name}.weight"] = replace(one, columns=of_readers)
    return found


def _search(
    fold: Fold, readers: Mapping[str, Piece], watch: Watch, scheme: WeightScheme, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return two things: the best factors of what the maker makes, and the same for the readers' columns; None where
    nothing is rounded, calibration never came, or not scaling is best."""
    rounded = {name: piece for name, piece in readers.items() if piece.rounded}
    squares = _common_inputs(fold, readers, watch)
    if not rounded or squares is None:
        return None
    heads, times = fold.heads
    typical = squares.diagonal().sqrt().view(heads, times, -1).mean(1)
    typical = (typical / typical.max().clamp_min(1e-30)).clamp_min(LEAST)
    tried = [typical ** (step / POWERS) for step in range(POWERS)]
    tried = [one / (one.max() * one.min()).sqrt() for one in tried]
    spreads = [one[:, None].expand(heads, times, -1).flatten() for one in tried]
    losses = torch.zeros(POWERS, dtype=torch.float64)
    for name, piece in rounded.items():
        own, weight = watch.of(name).squares, piece.read().to(device)
        if own is None:
            continue
        for step, factors in enumerate(spreads):
            made = scheme.round((weight.float() * factors).to(weight.dtype))
            steps = spread(made.scales, *scheme.blocks(weight.shape), range(len(weight)), weight.shape[1])
            change = scheme.grid.values(made.codes) * steps / factors - weight.float()
            losses[step] += float(((change @ own) * change).sum())
    best = int(losses.argmin())
    return (tried[best].flatten(), spreads[best]) if best else None


def _common_inputs(fold: Fold, readers: Mapping[str, Piece], watch: Watch) -> Tensor | None:
    """Return the sum of x.T @ x over all that the maker made; None where calibration never came."""
    for name in readers:
        layer, of_expert, _ = name.partition(".experts.")
        squares = watch.of(layer if of_expert and fold.of_norm else name).squares
        if squares is not None:
            return squares
    return None
