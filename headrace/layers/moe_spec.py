"""What a sparse feed-forward layer is made of, in integers and names. Imports no torch: the registry builds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """How a checkpoint calls a layer's tensors: `<layer>.<block>.experts.3.<gate>.weight`."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class MoeSpec:
    num_experts: int
    top_k: int
    """experts of a token"""
    intermediate_size: int
    """of one expert, on all ranks together"""
    renormalize: bool
    """whether the weights of a token's experts are made to sum to one"""
    sparse: tuple[bool, ...]
    """by layer; the others are dense"""
    shared_intermediate_size: int = 0
    """of the expert that every token visits beside its own, behind a sigmoid gate; 0: there is none"""
    names: ExpertNames = ExpertNames()
