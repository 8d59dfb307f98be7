"""Refuses weights that are NaN or Inf, and scales below 0, as they are loaded: a damaged checkpoint is not served.

Each tensor takes one reduction on its device and no copy; the device is waited for once a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.models.checkpoint import StoredTensor

MOST_NAMED = 3
CHUNK = 1 << 22
"""Elements of an 8-bit tensor (fp8, e8m0) that are converted at once, since those have no such reduction"""


@dataclass
class FiniteCheck:
    """Collects the smallest and largest values of the tensors of one file."""

    _added: list[tuple[StoredTensor, tuple[slice, ...], bool]] = field(default_factory=list)
    _extremes: list[Tensor] = field(default_factory=list)
    """smallest and largest value of each tensor, both NaN where it holds a NaN"""

    def add(self, stored: StoredTensor, source: tuple[slice, ...], loaded: Tensor, is_scale: bool = False) -> None:
        """Reduce `loaded`, which is the part `source` of `stored` in the type in which the model computes with it."""
        if not loaded.numel() or not loaded.is_floating_point():
            return
        parts = (loaded,) if loaded.itemsize > 1 else (part.float() for part in loaded.flatten().split(CHUNK))
        for part in parts:
            self._added.append((stored, source, is_scale))
            self._extremes.extend(part.aminmax())

    def finish(self) -> None:
        """Raise CheckpointError naming file and tensors if any value is NaN or Inf, or any scale negative."""
        if not self._extremes:
            return
        extremes = torch.stack(self._extremes).view(-1, 2).cpu()
        for (stored, _, is_scale), (smallest, _) in zip(self._added, extremes.tolist(), strict=True):
            if is_scale and smallest < 0:
                raise CheckpointError(
                    f"tensor {stored.shown} in {stored.file.name} holds the scale {smallest:g}; accepted: none below 0"
                )
        finite = extremes.isfinite().all(1).tolist()
        pairs = zip(self._added, finite, strict=True)
        named = {stored.name: (stored, source) for (stored, source, _), is_finite in pairs if not is_finite}
        if not named:
            return
        bad = list(named.values())
        names = ", ".join(_diagnosis(stored, source) for stored, source in bad[:MOST_NAMED])
        more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        raise CheckpointError(f"{bad[0][0].file.name} holds weights that are not finite numbers: {names}{more}")


def _diagnosis(stored: StoredTensor, source: tuple[slice, ...]) -> str:
    """Read the tensor once more and say whether the file or the conversion is at fault."""
    with stored.file.open("rb") as file:  # which may hold it as a part of another tensor
        file.seek(stored.offset)
        values = torch.frombuffer(bytearray(file.read(stored.num_bytes)), dtype=stored.torch_dtype)
    values = values.view(stored.shape)[source]
    values = (values.view(torch.float8_e8m0fnu) if values.dtype == torch.uint8 else values).float()
    wrong = int((~values.isfinite()).sum())
    if wrong:
        return f"tensor {stored.shown} ({wrong} of {values.numel()} values are NaN or Inf; download the model again)"
    largest = float(values.abs().max())
    return (
        f"tensor {stored.shown} (values up to {largest:g} overflow the model's type; use --dtype bfloat16 or float32)"
    )
