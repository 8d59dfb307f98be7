"""Keeps the adapters of one rank: those read from files on the host, and copies of some of them in the device's slots.

Which are read, kept and copied is decided by the engine core.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock

import torch
from safetensors import safe_open
from torch import Tensor

from headrace.errors import CheckpointError
from headrace.layers.adapters import Adapters
from headrace.lora import LoRARequest
from headrace.model_config import ModelConfig
from headrace.models.adapters import read_adapter
from headrace.step import AdapterLoad

SWITCH_SECONDS = 0.0002
"""after which a thread gives Python's lock to one that waits for it"""


@dataclass(frozen=True)
class Kept:
    """Says where an adapter is on the host, and which seats it changes."""

    place: int
    seats: frozenset[int]


class AdapterStore:
    """Holds a rank's adapters. `read` may be called from one other thread; all else is the runner's."""

    def __init__(self, adapters: Adapters, model_config: ModelConfig, experts: bool = False) -> None:
        """`experts`: adapters may change those."""
        self.adapters = adapters
        self._model_config, self._experts = model_config, experts
        self._kept: dict[int, Kept] = {}
        """lora_int_id -> the adapter"""
        self._free: list[int] = []
        """places on the host"""
        self._ahead = 0
        """lora_int_id of the adapter that has been copied to the device ahead of its use; 0: none"""
        self._copied: torch.cuda.Event | None = None
        """recorded behind the last copy into a slot"""
        self._stream: torch.cuda.Stream | None = None
        """of `read`; torch hands its streams out in turn, so that a new one each time would once be that of captures"""
        self._lock = Lock()
        """of the two above"""

    def allocate(self, kept: int) -> Adapters:
        """Take the memory of all slots, and of `kept` adapters on the host, once the model is built."""
        self.adapters.allocate(kept)
        self._free = [*range(kept)]
        if self.adapters.device.type == "cuda":
            # who launches steps beside `read`, and waits for Python's lock, is not to wait for 5 ms each time
            sys.setswitchinterval(SWITCH_SECONDS)
            self._stream = torch.cuda.Stream(self.adapters.device)
        return self.adapters

    def read(self, request: LoRARequest, dropped: Sequence[int] = ()) -> None:
        """Read an adapter, after forgetting the `dropped` ones. Raises UserError for one that cannot be served."""
        self._free += [self._kept.pop(number).place for number in dropped if number in self._kept]
        path, most = Path(request.lora_path), self.adapters.max_rank
        file = read_adapter(path, self._model_config, most, self._experts)
        with self._lock:
            self._ahead, copied = 0, self._copied
        if copied is not None:
            copied.synchronize()  # it may read the place of one that was dropped, or what was copied ahead
        place = self._free[-1]
        values, ranks = self.adapters.host[place], self.adapters.host_ranks[place]
        with safe_open(file.path, framework="pt") as opened:

            def tensor(name: str, rows: slice, columns: slice) -> Tensor:
                if rows.step or columns.step:  # of every so many, which come one after the other
                    return whole(name)[rows, columns]
                found: Tensor = opened.get_slice(name)[rows, columns]
                if found.numel() and not all(map(math.isfinite, map(float, found.aminmax()))):  # NaN survives
                    raise CheckpointError(f"{file.path}: tensor {name!r} holds NaN or Inf")
                return found

            @lru_cache(maxsize=1)
            def whole(name: str) -> Tensor:
                return tensor(name, slice(None), slice(None))

            seats = self.adapters.read(file.changes, tensor, values, ranks)
        self._kept[request.lora_int_id] = Kept(self._free.pop(), seats)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self.adapters.memory[-1].copy_(values, non_blocking=True)
            self._stream.synchronize()
            with self._lock:
                self._ahead = request.lora_int_id

    def put(self, loads: Sequence[AdapterLoad]) -> None:
        """Copy adapters into slots, behind all steps that were launched."""
        held = self.adapters
        with self._lock:
            for load in loads:
                kept = self._kept[load.adapter]
                values = held.memory[-1] if load.adapter == self._ahead else held.host[kept.place]
                held.put(load.slot, values, held.host_ranks[kept.place], kept.seats)
            if held.device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()

    def slots_of_tokens(self, slots: Tensor, rows: Tensor, query_start_loc: Tensor, num_tokens: int) -> Tensor:
        """Return the slot of each token # [num_tokens] int32, given those of all rows, and the rows of requests and
        where their tokens begin."""
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
        return slots[rows[torch.searchsorted(query_start_loc[1:], tokens, right=True)]]
