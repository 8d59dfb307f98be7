"""Keeps the adapters of one rank: those read from files on the host, and copies of some of them in the device's slots.

Which are read, kept and copied is decided by the engine core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.layers.adapters import Adapters, Loaded
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.models.adapters import read_adapter
from headrace.step import AdapterLoad


class AdapterStore:
    """Holds a rank's adapters. `read` may be called from one other thread; all else is the runner's."""

    def __init__(self, adapters: Adapters, model_config: ModelConfig) -> None:
        self.adapters = adapters
        self._model_config = model_config
        self._read: dict[int, Loaded] = {}
        """lora_int_id -> the adapter"""

    def read(self, request: LoRARequest, dropped: Sequence[int] = ()) -> None:
        """Read an adapter, after forgetting the `dropped` ones. Raises UserError for one that cannot be served."""
        for number in dropped:
            self._read.pop(number, None)
        file = read_adapter(Path(request.lora_path), self._model_config, self.adapters.max_rank)
        with safe_open(file.path, framework="pt") as opened:

            def tensor(name: str, rows: slice, columns: slice) -> Tensor:
                values: Tensor = opened.get_slice(name)[rows, columns]
                if values.numel() and not all(map(math.isfinite, map(float, values.aminmax()))):  # NaN survives
                    raise CheckpointError(f"{file.path}: tensor {name!r} holds NaN or Inf")
                return values

            self._read[request.lora_int_id] = self.adapters.read(file.changes, tensor)

    def put(self, loads: Sequence[AdapterLoad]) -> None:
        """Copy adapters into slots, behind all steps that were launched."""
        for load in loads:
            self.adapters.put(load.slot, self._read[load.adapter])

    def slots_of_tokens(self, slots: Tensor, rows: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
        """Return the slot of each token # [num_tokens] int32, given those of all rows, and the rows of requests and
        where their tokens begin."""
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
        return slots[rows[torch.searchsorted(query_start_loc[1:], tokens, right=True)]]
