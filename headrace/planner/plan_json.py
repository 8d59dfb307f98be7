"""A plan as plain data for JSON: field names are those of the classes, sizes bytes, rates tokens a second.

Writes what a plan holds; computes nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from headrace.planner.commands import Command, Flag
from headrace.planner.memory_map import MemoryMap
from headrace.planner.plan import Plan
from headrace.planner.simulate import Percentiles, Simulation


def to_json(plan: Plan) -> dict[str, Any]:
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
        "gpu": {"name": chip.name, "title": chip.title, "memory_bytes": chip.memory_bytes, "source": chip.source},
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
        "percentiles": None if plan.simulation is None else _percentiles(plan.simulation),
        "cost": None if plan.cost is None else asdict(plan.cost),
        "commands": [_command(command) for command in plan.commands],
        "headrace_gaps": list(plan.gaps),
        "passed_over": plan.passed_over,
        "alternatives": [{"change": entry.change, "plan": to_json(entry.plan)} for entry in plan.alternatives],
    }


def _memory(memory: MemoryMap) -> dict[str, Any]:
    return {
        "total": memory.total,
        "usable": memory.usable,
        "parts": memory.parts(),
        "kv_bytes_per_token": memory.kv_bytes_per_token,
        "kv_pool": memory.kv_pool,
        "kv_tokens": memory.kv_tokens,
        "longest": memory.longest,
        "fits": memory.fits,
    }


def _percentiles(run: Simulation) -> dict[str, Any]:
    def milliseconds(values: Percentiles) -> dict[str, float]:
        return {name: 1000 * seconds for name, seconds in asdict(values).items()}

    return {
        "ttft_ms": milliseconds(run.ttft),
        "itl_ms": milliseconds(run.itl),
        "e2e_ms": milliseconds(run.e2e),
        "num_requests": run.num_requests,
        "duration_s": run.seconds,
        "num_preemptions": run.num_preemptions,
        "max_running": run.max_running,
    }


def _command(command: Command) -> dict[str, Any]:
    def listed(flags: tuple[Flag, ...]) -> list[dict[str, Any]]:
        return [asdict(flag) for flag in flags]

    return {
        "engine": command.engine,
        "lines": command.lines,
        "environment": listed(command.variables),
        "flags": listed(command.flags),
        "notes": list(command.notes),
    }
