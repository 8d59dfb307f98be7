"""Describes how a model is spread over GPUs; which spreads are allowed is the business of layouts.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parallel:
    """Describes a layout: how a model is spread over `gpus` GPUs."""

    tp: int = 1
    """tensor parallelism: GPUs over which each layer is split"""
    pp: int = 1
    """pipeline parallelism: stages, each with a part of the layers"""
    dp: int = 1
    """independent replicas, or with `dp_attention` ranks that share the experts"""
    ep: bool = False
    """expert parallelism: a GPU holds whole experts instead of a slice of each"""
    dp_attention: bool = False
    """each of the dp ranks computes the attention of its own requests; the experts are spread over tp * dp GPUs"""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """Copies of the model that share nothing."""
        return 1 if self.dp_attention else self.dp

    @property
    def expert_gpus(self) -> int:
        """GPUs over which the experts of one layer are spread."""
        return self.tp * self.dp if self.dp_attention else self.tp
