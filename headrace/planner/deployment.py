"""Describes a model on GPUs, run by an engine: what the times of steps and the map of memory both follow from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from headrace.planner.chips import Chip
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape
from headrace.planner.weights import layer_bytes
from headrace.stages import divide_layers


@dataclass(frozen=True)
class Deployment:
    """Holds what times and memory depend on beside a step and its limits: a model on GPUs, run by an engine."""

    shape: ModelShape
    chip: Chip
    parallel: Parallel
    weight_format: str
    """one of quantization/formats.py; `shape.part_format` says which parts are in it"""
    kv_dtype_bytes: float
    engine: str
    """headrace or vllm: whose efficiencies count"""
    draft: ModelShape | None = None
    """the model that guesses tokens beside it, if there is one"""

    @property
    def of_draft(self) -> Deployment | None:
        """Return the model that guesses tokens, alone on the same GPUs; None: there is none."""
        draft = self.draft
        return None if draft is None else replace(self, shape=draft, weight_format=draft.weight_format, draft=None)

    @property
    def holds_on(self) -> Chip | None:
        """Return the chip on which headrace holds weights as its kernels take them; None: they are as stored, which is
        what is known of vLLM."""
        return self.chip if self.engine == "headrace" else None

    @cached_property
    def partition(self) -> tuple[int, ...]:
        """Return the layers of each pipeline stage, as headrace divides them; empty: there is one stage."""
        spec, stages = self.shape.spec, self.parallel.pp
        return () if stages == 1 else divide_layers(spec.layers, spec.vocab_size * spec.hidden_size, stages)

    @cached_property
    def layer_bytes(self) -> tuple[dict[str, float], ...]:
        """Return the bytes that one GPU holds of a layer of each of the shape's groups, by part.

        A search maps the memory of a deployment for many limits, which change nothing in it.
        """
        return tuple(
            layer_bytes(self.shape, group, self.parallel, self.weight_format, self.holds_on)
            for group in self.shape.groups
        )
