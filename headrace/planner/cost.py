"""What one step costs, part by part: bytes of weights and cache, operations, collectives, launches, host.

A roofline with named efficiencies (constants.py); knows shapes, rates and numbers of tokens, nothing of requests or time.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planner.chips import Chip
from headrace.planner.shapes import ModelShape

ENGINES = ("headrace", "vllm")


@dataclass(frozen=True)
class Parallel:
    """How a model is spread over `gpus` GPUs."""

    tp: int = 1
    """GPUs over which each layer is split"""
    pp: int = 1
    """GPUs over which the layers are dealt out"""
    dp: int = 1
    """independent replicas, or ranks that share the experts (`dp_attention`)"""
    ep: bool = False
    """a GPU holds whole experts, in place of a slice of each"""
    dp_attention: bool = False
    """each of the dp ranks computes the attention of its own requests; the experts are spread over tp * dp GPUs"""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def replicas(self) -> int:
        """that share nothing"""
        return 1 if self.dp_attention else self.dp

    @property
    def expert_gpus(self) -> int:
        """over which the experts of one layer are spread"""
        return self.tp * self.dp if self.dp_attention else self.tp


@dataclass(frozen=True)
class Deployment:
    shape: ModelShape
    chip: Chip
    parallel: Parallel
    weight_format: str
    """bf16, fp8, ptpc_fp8, mxfp4, int4 or int8: of what `shape.parts_in` names"""
    kv_dtype_bytes: float
    engine: str
    """headrace or vllm: whose efficiencies count"""


@dataclass(frozen=True)
class StepWork:
    """One step of the whole deployment; data-parallel ranks share it evenly."""

    decodes: int
    decode_context: float
    """keys that a decode reads, on average"""
    prefill_tokens: int = 0
    prefill_context: float = 0.0
    """keys that a prompt token sees, on average"""
    prompts: int = 0
    """that the prompt tokens belong to; 0: one, if there are any"""


@dataclass(frozen=True)
class StepCost:
    seconds: float
    parts: dict[str, float]
    """seconds that each would take alone: weights, kv, flops, activations, links, launches, host. They overlap in part, so they
    need not add up to `seconds`."""

    @property
    def bound(self) -> str:
        """the largest part"""
        return max(self.parts, key=lambda name: self.parts[name])


def step_cost(deployment: Deployment, work: StepWork) -> StepCost:
    raise NotImplementedError
