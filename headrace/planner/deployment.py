"""Describes a model on GPUs, run by an engine: what the times of steps and the map of memory both follow from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from headrace.planner.chips import Chip
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape
from headrace.planner.weights import layer_bytes


@dataclass(frozen=True)
class Deployment:
    """Holds what times and memory depend on beside a step and its limits: a model on GPUs, run by an engine."""

    shape: ModelShape
    chip: Chip
    parallel: Parallel
    weight_format: str
    """one of quantization/formats.py, for what `shape.parts_in` names"""
    kv_dtype_bytes: float
    engine: str
    """headrace or vllm: whose efficiencies count"""
    draft: ModelShape | None = None
    """the model that guesses tokens beside it, if there is one"""

    @property
    def holds_on(self) -> Chip | None:
        """Return the chip on which headrace holds weights as its kernels take them; None: they are as stored, which is
        what is known of vLLM."""
        return self.chip if self.engine == "headrace" else None

    @cached_property
    def layer_bytes(self) -> tuple[dict[str, float], ...]:
        """Return the bytes that one GPU holds of a layer of each of the shape's groups, by part.

        A search maps the memory of a deployment for many limits, which change nothing in it.
        """
        return tuple(
            layer_bytes(self.shape, group, self.parallel, self.weight_format, self.holds_on)
            for group in self.shape.groups
        )
