"""How much of a chip's published rates an engine reaches: the few fitted numbers behind predictions, with their origin.

Facts and fits only; how they enter a step's cost is cost.py's business, how they were found calibrate.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planner.chips import Chip


@dataclass(frozen=True)
class Efficiency:
    """Eleven numbers for one chip and engine. Shares are of the data sheet's rates."""

    bandwidth: float
    """share of the memory bandwidth that a long stream of weights reaches"""
    kv_bandwidth: float
    """share of it that decoding attention reaches on the KV cache"""
    gemm: float
    """share of the dense peak that large 16-bit products reach"""
    attention: float
    """share of the 16-bit peak that attention over prompts reaches"""
    overlap: float
    """how bytes and operations of one product overlap: 1 one after the other, infinity wholly at once"""
    kernel: float
    """seconds on the GPU that a kernel takes beside its bytes and operations: to start, fill and drain"""
    launch: float
    """seconds of the host to start an operation that is in no graph"""
    sequence: float
    """seconds of the host for each request of a step"""
    request: float
    """seconds that a request spends outside of steps before its first token is told"""
    link: float
    """share of the links that a large collective reaches"""
    collective: float
    """seconds that the smallest all-reduce over eight GPUs takes"""


@dataclass(frozen=True)
class EngineTraits:
    """What an engine launches for a layer, and which of its steps run from graphs. Read off its code, not fitted."""

    attention_kernels: int
    """norm, projections, rotary and cache, attention"""
    latent_kernels: int
    """more for a latent cache: down and up projections, their norms"""
    index_kernels: int
    """more where an index chooses the keys"""
    dense_kernels: int
    """norm, products, activation"""
    expert_kernels: int
    """norm, router, choice, sorting, products, activation, sum"""
    quantize_kernels: int
    """more in each half of a layer where activations are rounded"""
    graph_decodes: int
    """largest decode step that is one graph"""
    graph_tokens: int
    """largest step with prompts whose pieces between attention calls are graphs"""


TRAITS = {
    "headrace": EngineTraits(4, 6, 5, 3, 7, 1, graph_decodes=1 << 20, graph_tokens=512),
    "vllm": EngineTraits(6, 6, 6, 4, 8, 1, graph_decodes=512, graph_tokens=512),
}
NARROW = 0.89
"""Products of 8 bits and fewer reach so much less of their peak than 16-bit ones: the power limit binds, not the units.
H200, long runs: 1,240 of 1,979 TFLOP/s against 700 of 989."""

EFFICIENCIES: dict[tuple[str, str], Efficiency] = {
    ("h200", "vllm"): Efficiency(0.86, 0.75, 0.69, 0.40, 2.0, 4.0e-6, 30e-6, 35e-6, 4e-3, 0.7, 12e-6),
    ("h200", "headrace"): Efficiency(0.88, 0.8, 0.69, 0.35, 2.0, 2.0e-6, 10e-6, 10e-6, 0.5e-3, 0.7, 12e-6),
    ("mi300x", "vllm"): Efficiency(0.66, 0.6, 0.40, 0.3, 1.3, 5.0e-6, 30e-6, 35e-6, 4e-3, 0.6, 16e-6),
}


def find_efficiency(chip: Chip, engine: str) -> Efficiency:
    found = EFFICIENCIES.get((chip.name, engine))
    if found is not None:
        return found
    like = "mi300x" if chip.vendor == "amd" else "h200"
    return EFFICIENCIES.get((like, engine)) or EFFICIENCIES[(like, "vllm")]
