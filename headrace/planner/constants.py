"""Says how much of a chip's published rates an engine reaches: the few fitted numbers behind predictions.

They stand in efficiencies.json. How they enter a step's cost is said in cost.py, how they were fitted in
bench/calibrate_planner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.planner.chips import CHIPS, Chip


@dataclass(frozen=True)
class Efficiency:
    """Holds the eleven constants of one chip and engine. Shares are of the data sheet's rates."""

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
    """seconds that a request spends outside of steps before its first token is sent"""
    link: float
    """share of the links that a large collective reaches"""
    collective: float
    """seconds that the smallest all-reduce over eight GPUs takes"""


@dataclass(frozen=True)
class EngineTraits:
    """Says what an engine launches for a layer, and which steps run from graphs; read off its code, not fitted."""

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
    graph_decodes: int
    """largest decode step that is one graph"""
    graph_tokens: int
    """largest step with prompts whose pieces between attention calls are graphs; 0: as graph_sizes.py says"""
    expert_operations: int
    """what the host starts for a layer's experts where there is no graph: kernels, buffers, Python around them"""


GROUPED = 0.72
"""Rate of the experts' products, as a share of one large product's. H200: 2,048 tokens over 128 experts of 2048 x 768
take 485 us a layer in our kernels, of which bytes alone explain 280."""
NARROW = 0.89
"""Share of their peak that products of 8 bits and fewer reach, relative to 16-bit ones: power limits them, not the
units. H200, long runs: 1,240 of 1,979 TFLOP/s against 700 of 989."""

TILED, TILED_EXPERTS, TILED_READS = 0.5, 0.8, 0.6
"""What our kernels for weights in tiles (kernels/tiled.py) reach: of the rate of 16-bit products in linears and in
experts, and of the bandwidth of plain weights. H200, fitted on decode steps of Llama-3.1-8B AWQ, Qwen3-30B-A3B with
experts in 4 bits and gpt-oss-20b, at 1, 8, 32 and 128 tokens (docs/performance.md): half of these within 10%, the worst
23% off."""


@dataclass(frozen=True)
class Fitted:
    """Holds constants, with how far they can be trusted and where they come from."""

    constants: Efficiency
    band: float
    """nine measured figures in ten are expected within this share of the prediction, on models that were not fitted"""
    origin: str
    gpus: int = 1
    """over how many the rows ran on which sums depend"""


class _Data(msgspec.Struct):
    traits: dict[str, EngineTraits]
    """by engine"""
    fitted: dict[str, dict[str, Fitted]]
    """by chip and engine"""


_DATA = msgspec.json.decode(Path(__file__).with_name("efficiencies.json").read_bytes(), type=_Data)
TRAITS, EFFICIENCIES = _DATA.traits, _DATA.fitted
SAME_ARCHITECTURE, SAME_VENDOR = 0.25, 0.35
"""Narrowest bands where the constants come from another chip."""


def host_overlap(chip: Chip, engine: str) -> float:
    """Say how far the host's work for the next step hides behind this one's on the GPU, as `Efficiency.overlap`.

    What was measured of vLLM on AMD's GPUs is 0.9.1 and 0.10.0, which schedule between steps.
    """
    return 1.0 if (engine, chip.vendor) == ("vllm", "amd") else 3.0


def find_efficiency(chip: Chip, engine: str) -> Efficiency:
    return find_fitted(chip, engine).constants


def find_fitted(chip: Chip, engine: str) -> Fitted:
    """Find the constants of the chip and engine, or those of the vendor's measured chip with a wider band."""
    near = {"amd": "mi300x", "nvidia": "h200"}.get(chip.vendor, "cpu")
    near = chip.name if engine in EFFICIENCIES.get(chip.name, {}) else near
    fitted = EFFICIENCIES[near].get(engine) or EFFICIENCIES[near]["headrace"]
    if chip.name == near:
        return fitted
    band = max(fitted.band, SAME_ARCHITECTURE if chip.arch == CHIPS[near].arch else SAME_VENDOR)
    return Fitted(fitted.constants, band, f"those of {CHIPS[near].title}: {fitted.origin}", fitted.gpus)
