"""Layers without weights get them without what a start would wait for."""

from __future__ import annotations

import subprocess
import sys

MAKES_WEIGHTS = """
import sys
import torch
from headrace.layers.layer import Layer, empty_parameter

class Two(Layer):
    def __init__(self):
        super().__init__()
        self.weight = empty_parameter(3, 4, dtype=torch.bfloat16)

layer = Two()
layer.create_weights(torch.device("cpu"))
print(layer.weight.device, layer.weight.dtype, tuple(layer.weight.shape), layer.weight.requires_grad)
print("sympy" in sys.modules)
"""


def test_weights_are_as_declared_and_import_no_sympy() -> None:
    done = subprocess.run([sys.executable, "-c", MAKES_WEIGHTS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["cpu torch.bfloat16 (3, 4) False", "False"]
