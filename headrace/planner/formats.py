"""Weight formats in a plan: what may be asked for on which chip and engine, and what becomes of the model's shape.

Knows what chips have units for and what engines make at load; bytes and rates are other files' business.
"""

from __future__ import annotations

from headrace.planner.chips import Chip
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.shapes import ModelShape, in_format
from headrace.quantization.formats import MADE_AT_LOAD, PLAIN, find_format


def format_problem(request: PlanRequest, shape: ModelShape, chip: Chip) -> str | None:
    """Why the pinned weight format cannot be had; None: it can."""
    wanted, own = request.weight_format, shape.weight_format
    if wanted is None or _same(wanted, own):
        return None
    if own != PLAIN.name:
        return f"quantization {request.quantization}: the checkpoint holds {own} already and keeps it"
    units = find_format(wanted).units
    if units and units not in chip.flops:
        return f"quantization {request.quantization}: {chip.title} has no {units} units ({', '.join(chip.flops)})"
    vendor = find_format(wanted).vllm_vendor
    if request.engine == "vllm" and vendor not in ("", chip.vendor):
        return f"quantization {wanted}: vLLM has it for {vendor.upper()} GPUs only; {MADE_AT_LOAD[0]} runs here"
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
    """The model as the engine will hold it."""
    wanted = plan_format(request, shape)
    return shape if wanted == shape.weight_format else in_format(shape, wanted)


def at_load(request: PlanRequest, shape: ModelShape) -> str | None:
    """What `--quantization` says in a command; None: nothing, the checkpoint is taken as it is."""
    wanted = request.weight_format
    made = wanted is not None and find_format(wanted).made_at_load and not _same(wanted, shape.weight_format)
    return wanted if made else None


def missing_checkpoint(request: PlanRequest, shape: ModelShape) -> str:
    """A format that the model's own checkpoint is not in, and that is not made at load; empty: there is none."""
    wanted = plan_format(request, shape)
    return "" if wanted == shape.weight_format or find_format(wanted).made_at_load else wanted


def format_decision(request: PlanRequest, shape: ModelShape, chip: Chip) -> Decision:
    """`quantization`. `shape` is the checkpoint's."""
    wanted, own = plan_format(request, shape), shape.weight_format
    alone = wanted != PLAIN.name and find_format(wanted).units not in chip.flops
    how = f"; products run in 16 bits, as {chip.name} has no units for it" if alone else ""
    if request.quantization is not None:
        return Decision("quantization", wanted, "given" + how, source="user")
    if own != PLAIN.name:
        return Decision("quantization", own, "the checkpoint's" + how)
    runner_up = "fp8: half the bytes a token, rounded" if "fp8" in chip.flops else ""
    return Decision("quantization", "none", "the checkpoint's own 16 bits: nothing is rounded unasked", runner_up)


def _same(wanted: str, own: str) -> bool:
    """A checkpoint that holds what the wanted format would make of a plain one is as good."""
    return wanted == own or (find_format(wanted).made_at_load and find_format(own).made_at_load)
