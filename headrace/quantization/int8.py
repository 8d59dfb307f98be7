"""Serves weights that a checkpoint holds in int8, with a scale a tensor or an output, over int8 activations (W8A8)."""

from __future__ import annotations

import torch

from headrace.quantization.formats import WeightFormat
from headrace.quantization.fp8 import RoundingProduct
from headrace.quantization.scheme import Scheme
from headrace.quantization.stored import StoredLayout


def int8(
    format: WeightFormat,
    scale: str = "channel",
    activations: str = "token",
    symmetric: bool = True,
    scale_name: str = "weight_scale",
) -> Scheme:
    """Return a new scheme, whose tensors are named as StoredLayout says; `symmetric` False: activations have zero
    points."""
    layout = StoredLayout(torch.int8, scale, scale_name, activations, symmetric=symmetric)
    return Scheme(format, layout, RoundingProduct(layout))
