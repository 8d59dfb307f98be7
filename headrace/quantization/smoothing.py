"""Reads what AWQ multiplies inputs by before a product, where a norm or linear in front does not do so (ModelOpt's
`pre_quant_scale`)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.quantization.scheme import LinearSpec, Part, Slot, Weights
from headrace.quantization.unquantized import rows_of

NAME = "pre_quant_scale"


def empty_smoothing(spec: LinearSpec, device: torch.device, experts: tuple[int, ...] = ()) -> Tensor:
    """Allocate `smoothing` [parts, in] fp32, all ones; `experts` as in Layout.create_weights."""
    return torch.ones(*experts, len(spec.parts), spec.in_features, device=device)


def smoothing_slot(part: Part, number: int, weights: Weights) -> Slot:
    """Return where the numbers of the part `number` go."""
    place = weights["smoothing"][number]
    return Slot(part.shape[1:], (part.columns,), place, True, partial(_store, place), torch.float32)


def why_not_common(weights: Weights) -> str:
    """Say why activations cannot be multiplied once for a whole linear, or for all experts; "" if they can."""
    smoothing = weights.get("smoothing")
    if smoothing is None or (smoothing.dim() == 2 and len(smoothing) == 1):
        return ""
    alike = smoothing == (1 if smoothing.dim() > 2 else smoothing[:1])
    return "" if bool(alike.all()) else "its inputs are multiplied by other numbers in each part, or in each expert"


def smoothed(spec: LinearSpec, weights: Weights, wide: Tensor) -> Tensor:
    """Return the weight [..., out, in] that takes activations as they are; `wide`, in fp32, is written over."""
    for number, part in enumerate(spec.parts):
        wide[..., rows_of(part), :] *= weights["smoothing"][..., number, None, :]
    return wide.to(spec.dtype)


def _store(place: Tensor, values: Tensor) -> None:
    if not bool(((values > 0) & values.isfinite()).all()):
        raise CheckpointError(
            f"{NAME} goes from {float(values.min())} to {float(values.max())}; accepted: positive numbers"
        )
    place.copy_(values)
