"""What every layer can do: be built without memory, get it, say which tensors of a checkpoint fill it, settle down.

The order, for the whole model: constructor (parameters on the meta device), `create_weights`, filling of `slots`,
`finalize`. Knows nothing of files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headrace.quantization.scheme import Slot


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory, until `create_weights`."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Layer(nn.Module):
    opaque: tuple[str, ...] = ()
    """Methods that mix tokens by way of a cache: a recorded run (models/fusion.py) does not look into them"""

    def __call__(self, *args: Any) -> Any:
        """Straight to `forward`: module hooks are not supported, and looking for them costs more than a small op."""
        return self.forward(*args)

    def create_weights(self, device: torch.device) -> None:
        """Give the layer's own parameters (not those of its children) uninitialized memory on `device`."""
        for name, parameter in self.named_parameters(recurse=False):
            # not empty_like: of a meta tensor, that imports sympy
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(self, name, nn.Parameter(made, requires_grad=False))

    def slots(self, path: str) -> dict[str, Slot]:
        """Checkpoint name -> where it goes. `path` is the layer's own name in the model."""
        return {f"{path}.{name}": whole_slot(tensor) for name, tensor in self.named_parameters(recurse=False)}

    def finalize(self) -> None:
        """After loading. Children and parameters become plain attributes too: nn.Module finds them through a Python
        function, some ten times a layer and step."""
        self.__dict__.update(self._modules)
        self.__dict__.update(self._parameters)


def whole_slot(tensor: Tensor) -> Slot:
    shape = tuple(tensor.shape)
    return Slot(shape, tuple(slice(0, size) for size in shape), tensor)
