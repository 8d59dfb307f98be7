"""Refuses weights that are NaN or Inf as they are loaded, so that a damaged checkpoint is not served.

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

    _added: list[tuple[StoredTensor, tuple[slice, ...]]] = field(default_factory=list)
    _extremes: list[Tensor] = field(default_factory=list)
    """smallest and largest value of each tensor, both NaN where it holds a NaN"""

    def add(self, stored: StoredTensor, source: tuple[slice, ...], loaded: Tensor) -> None:
        """Reduce `loaded`, which is the part `source` of `stored` in the type in which the model computes with it."""
        if not loaded.numel() or not loaded.is_floating_point():
            return
        parts = (loaded,) if loaded.itemsize > 1 else (part.float() for part in loaded.flatten().split(CHUNK))
        for part in parts:
            self._added.append((stored, source))
            self._extremes.extend(part.aminmax())

    def finish(self) -> None:
        """Raise CheckpointError naming file and tensors if any value is NaN or Inf."""
        if not self._extremes:
            return
        finite = torch.stack(self._extremes).isfinite().view(-1, 2).all(1).tolist()
        named = {added[0].name: added for added, is_finite in zip(self._added, finite, strict=True) if not is_finite}
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
