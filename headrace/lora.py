"""Defines how low-rank adapters (LoRA, arXiv 2106.09685) are named, and what one adds to a weight."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class LoRARequest(msgspec.Struct, frozen=True):
    """Names the adapter of a request. The names are vLLM's."""

    lora_name: str
    lora_int_id: int
    """its own, at least 1: cached blocks are shared among requests with the same one"""
    lora_path: str
    """folder with adapter_config.json and adapter_model.safetensors, on the machine of the engine"""


@dataclass
class LowRank:
    """Describes what an adapter adds to one weight: `scale` times the product of the tensors `b` and `a` of its
    file."""

    scale: float
    rank: int
    a: str = ""
    b: str = ""
    experts: int = 0
    """the tensors are of so many experts: `a` has the rows of one behind another's, `b` their columns in turn; 0: they
    are of one linear"""
    turned: bool = False
    """`a` has the outputs of those experts, and `b` their inputs: the product is the change's transpose"""
