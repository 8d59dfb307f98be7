"""Weight formats in a plan: what may be asked for on which chip and engine, and what becomes of the model's shape.

Knows what chips have units for and what engines make at load; bytes and rates are other files' business.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.planner.checkpoint_format import MADE_AT_LOAD
from headrace.planner.chips import Chip
from headrace.planner.cost import UNITS
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape, in_format


def format_problem(request: PlanRequest, shape: ModelShape, chip: Chip) -> str | None:
    """Why the pinned weight format cannot be had; None: it can."""
    wanted, own = request.weight_format, shape.weight_format
    if wanted is None or _same(wanted, own):
        return None
    if own != "bf16":
        return f"quantization {request.quantization}: the checkpoint holds {own} already and keeps it"
    units = UNITS.get(wanted)
    if units is not None and units not in chip.flops:
        return f"quantization {request.quantization}: {chip.title} has no {units} units ({', '.join(chip.flops)})"
    if wanted == "ptpc_fp8" and request.engine == "vllm" and chip.vendor != "amd":
        return "quantization ptpc_fp8: vLLM has it for AMD GPUs only; fp8 runs here"
    return None


def cache_problem(kv_dtype: str, chip: Chip) -> str | None:
    if kv_dtype == "fp8_e4m3" and chip.vendor != "cpu" and "fp8" not in chip.flops:
        return f"kv_cache_dtype fp8: {chip.title} has no fp8 units; fp8_e5m2 or auto run"
    return None


def plan_format(request: PlanRequest, shape: ModelShape) -> str:
    """of the linears"""
    wanted = request.weight_format
    return shape.weight_format if wanted is None or _same(wanted, shape.weight_format) else wanted


def in_plan_format(request: PlanRequest, shape: ModelShape) -> ModelShape:
    """The model as the engine will hold it. headrace rounds no experts."""
    wanted = plan_format(request, shape)
    if wanted == shape.weight_format:
        return shape
    made = in_format(shape, wanted)
    if request.engine == "headrace" and wanted in MADE_AT_LOAD and shape.is_moe:
        return replace(made, format_parts=("attention", "dense"))
    return made


def at_load(request: PlanRequest, shape: ModelShape) -> str | None:
    """What `--quantization` says in a command; None: nothing, the checkpoint is taken as it is."""
    wanted = request.weight_format
    made = wanted in MADE_AT_LOAD and not _same(wanted or "", shape.weight_format)
    return wanted if made else None


def missing_checkpoint(request: PlanRequest, shape: ModelShape) -> str:
    """A format that the model's own checkpoint is not in, and that is not made at load; empty: there is none."""
    wanted = plan_format(request, shape)
    return "" if wanted == shape.weight_format or wanted in MADE_AT_LOAD else wanted


def format_decision(request: PlanRequest, shape: ModelShape, chip: Chip) -> Decision:
    """`quantization`. `shape` is the checkpoint's."""
    wanted, own = plan_format(request, shape), shape.weight_format
    units = UNITS.get(wanted)
    alone = wanted != "bf16" and (units is None or units not in chip.flops)
    how = f"; products run in 16 bits, as {chip.name} has no units for it" if alone else ""
    if request.quantization is not None:
        said = "given; experts stay as they are" if _plain_experts(request, shape) else "given"
        return Decision("quantization", wanted, said + how, source="user")
    if own != "bf16":
        return Decision("quantization", own, "the checkpoint's" + how)
    runner_up = "fp8: half the bytes a token, rounded" if "fp8" in chip.flops else ""
    return Decision("quantization", "none", "the checkpoint's own 16 bits: nothing is rounded unasked", runner_up)


def _plain_experts(request: PlanRequest, shape: ModelShape) -> bool:
    return shape.is_moe and request.engine == "headrace" and at_load(request, shape) is not None


def _same(wanted: str, own: str) -> bool:
    return wanted == own or (wanted in MADE_AT_LOAD and own == "fp8")
