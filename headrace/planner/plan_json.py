"""Writes a plan as plain data for JSON: field names are those of the classes, sizes bytes, rates tokens a second."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from headrace.planner.memory_map import MemoryMap
from headrace.planner.plan import Plan
from headrace.planner.simulate import Simulation


def to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan, and in it those that run where it does not."""
    request, shape, chip = plan.request, plan.shape, plan.chip
    return {
        "model": {
            "name": shape.name,
            "architecture": shape.spec.architecture,
            "source": shape.source,
            "parameters": shape.total_weights,
            "active_parameters": shape.active_weights,
            "weight_format": shape.weight_format,
            "context": shape.spec.max_position_embeddings,
        },
        "gpu": {name: getattr(chip, name) for name in ("name", "title", "memory_bytes", "source")},
        "num_gpus": plan.num_gpus,
        "engine": plan.engine,
        "objective": request.objective,
        "workload": {
            "input_len": request.prompt_len,
            "output_len": request.answer_len,
            "concurrency": plan.concurrency or request.concurrency,
            "num_prompts": request.num_prompts,
            "request_rate": request.request_rate,
        },
        "feasible": plan.feasible,
        "problems": list(plan.problems),
        "notices": list(plan.notices),
        "layout": plan.layout or None,
        "memory_map": None if plan.memory is None else _memory(plan.memory),
        "decisions": [asdict(decision) for decision in plan.decisions],
        "prediction": None if plan.prediction is None else asdict(plan.prediction),
        "simulation": None if plan.simulation is None else _without_segments(plan.simulation),
        "cost": None if plan.cost is None else asdict(plan.cost),
        "command": None if plan.command is None else {"line": plan.command.line, **asdict(plan.command)},
        "headrace_gaps": list(plan.gaps),
        "passed_over": plan.passed_over,
        "alternatives": [{"change": entry.change, "plan": to_json(entry.plan)} for entry in plan.alternatives],
    }


def _memory(memory: MemoryMap) -> dict[str, Any]:
    names = ("total", "usable", "parts", "kv_bytes_per_token", "kv_pool", "kv_tokens", "longest", "fits")
    return {name: memory.parts() if name == "parts" else getattr(memory, name) for name in names}


def _without_segments(run: Simulation) -> dict[str, Any]:
    """A simulation's figures, in seconds, without the thousands of its steps."""
    return {name: value for name, value in asdict(replace(run, segments=[])).items() if name != "segments"}
