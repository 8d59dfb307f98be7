"""Defines `Layer`, the base of all layers: built without memory, given memory, filled from a checkpoint, finalized.

For the whole model, in this order: constructor (parameters on the meta device), `create_weights`, filling of `slots`,
`finalize`. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace.quantization.scheme import Slot


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter on the meta device, which has no memory until `create_weights`."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Layer(nn.Module):
    """Extends torch's module by the tensors of a checkpoint that the layer wants."""

    opaque: tuple[str, ...] = ()
    """methods that mix tokens through a cache, which a recorded run (models/fusion.py) does not look into"""

    def __call__(self, *args: Any) -> Any:
        """Call `forward`. Module hooks are not supported: looking for them costs more than a small operation."""
        return self.forward(*args)

    def create_weights(self, device: torch.device) -> None:
        """Allocate the layer's own parameters (not its children's) on `device`, uninitialized."""
        for name, parameter in self.named_parameters(recurse=False):
            # not empty_like: of a meta tensor, that imports sympy
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(self, name, nn.Parameter(made, requires_grad=False))

    def slots(self, path: str) -> dict[str, Slot]:
        """Return where each of its tensors in the checkpoint goes, by name. `path`: the layer's name in the model."""
        return {f"{path}.{name}": whole_slot(tensor) for name, tensor in self.named_parameters(recurse=False)}

    def finalize(self) -> None:
        """Prepare for serving; called once, after loading. Children and parameters become plain attributes too, since
        nn.Module finds them through a Python function, some ten times a layer and step."""
        self.__dict__.update(self._modules)
        self.__dict__.update(self._parameters)


def whole_slot(tensor: Tensor) -> Slot:
    """Return the slot of a tensor that every rank holds whole."""
    shape = tuple(tensor.shape)
    return Slot(shape, tuple(slice(0, size) for size in shape), tensor)
