"""Which values of each knob are worth a trial around a plan, and in which order: by the planner's own prediction.

Runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from headrace.advice.tune.record import Trial
from headrace.advice.tune.trial import Traffic, changed
from headrace.attention.table import BACKENDS, reasons_against, select_backend
from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.models.registry import attention_specs
from headrace.planner.chips import read_gpus
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.graphs import GRAPH_KEYS
from headrace.planner.search import score
from headrace.planner.served import expect
from headrace.step import WorkerFacts

KNOBS = ("max_num_batched_tokens", "max_num_seqs", "cudagraph_mode", "kv_cache_dtype", "attention_backend")
BUDGETS = tuple(1 << power for power in range(11, 17))
"""2k to 64k tokens"""
GRAPHS = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE")


def is_pinned(knob: str, config: EngineConfig) -> bool:
    """The user has given it."""
    if knob == "cudagraph_mode":
        return config.enforce_eager or any(key in config.compilation_config for key in GRAPH_KEYS)
    return getattr(config, knob) not in (None, "auto")


def trials_of(
    knobs: Iterable[str], config: EngineConfig, model: ModelConfig, settings: dict[str, Any], traffic: Traffic
) -> list[Trial]:
    """One knob changed in each, the most promising first. `settings`: the plan's, by field."""
    trials = [
        (distance, Trial({knob: value}))
        for knob in knobs
        if not is_pinned(knob, config)
        for distance, value in enumerate(_values(knob, resolved(config, settings), model, settings, traffic))
    ]
    gpu = next(iter(read_gpus()), ("cpu", 1 << 40))
    predict = partial(_predicted, config=config, model=model, settings=settings, traffic=traffic, gpu=gpu)
    plan = predict(Trial({}))
    ranked = sorted(trials, key=lambda entry: (-_promise(plan, predict(entry[1])), entry[0]))
    return [trial for _, trial in ranked]


def resolved(config: EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """The config as the engine settled it."""
    names = ("device", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    mode = {"cudagraph_mode": settings.get("cudagraph_mode", "NONE")}
    known = {name: settings[name] for name in names if name in settings}
    return config.replace(**known, compilation_config=config.compilation_config | mode)


def _values(knob: str, plan: EngineConfig, model: ModelConfig, settings: dict[str, Any], traffic: Traffic) -> list[Any]:
    """Nearest to the plan's first; none that would be the plan's under another name."""
    seqs, budget = plan.max_num_seqs or 1, plan.max_num_batched_tokens or 1
    if knob == "max_num_batched_tokens":
        return _nearest([value for value in BUDGETS if value >= seqs], budget, traffic.at_once * traffic.input_len)
    if knob == "max_num_seqs":
        here = min(seqs, _ladder_up(traffic.at_once))
        values = [here >> 3, here >> 2, here >> 1, here << 1, here << 2]
        return _nearest([value for value in values if 0 < value <= budget], here, traffic.at_once)
    if knob == "cudagraph_mode":
        modes = GRAPHS if settings.get("device") == "cuda" else ()
        return [mode for mode in modes if mode != settings.get("cudagraph_mode")]
    if knob == "kv_cache_dtype":
        return [plan.dtype] if str(plan.kv_cache_dtype).startswith("fp8") else ["fp8"]
    return _backends(plan, model)


def _ladder_up(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _nearest(values: list[int], here: int, enough: int) -> list[int]:
    """Without the plan's own, nearest first. From `enough` on all are alike, so the first of those does for all."""
    most = _ladder_up(enough)
    different = {min(value, most) for value in values} - {min(here, most)}
    return sorted(different, key=lambda value: max(value / here, here / value))


def _backends(plan: EngineConfig, model: ModelConfig) -> list[str]:
    specs = attention_specs(
        model,
        tp_size=plan.tensor_parallel_size,
        block_size=plan.block_size,
        dtype=plan.dtype,
        device_type=plan.device,
        batch_invariant=plan.batch_invariant,
        kv_cache_dtype=plan.kv_cache_dtype,
    )
    chosen = select_backend(specs).name
    return [entry.name for entry in BACKENDS if entry.name != chosen and not reasons_against(entry, specs)]


def _promise(before: float | None, after: float | None) -> float:
    """How much better than the plan the planner thinks a trial is; 0 where it cannot tell."""
    if before is None or after is None:
        return 0.0
    return (after - before) / abs(before) if before else 0.0


def _predicted(
    trial: Trial,
    config: EngineConfig,
    model: ModelConfig,
    settings: dict[str, Any],
    traffic: Traffic,
    gpu: tuple[str, int],
) -> float | None:
    """`gpu`: its name and its memory in bytes."""
    blocks = int(settings.get("num_gpu_blocks", 0))
    if (cache := trial.changes.get("kv_cache_dtype")) is not None:
        blocks = 2 * blocks if cache == "fp8" else blocks // 2
    try:
        plan = changed(resolved(config, settings), trial).replace(
            expected_input_len=traffic.input_len,
            expected_output_len=traffic.output_len,
            expected_concurrency=traffic.at_once,
        )
        found = expect(plan, model, [WorkerFacts(plan.device, *gpu, 0, same_layout(plan.block_size), 0, "")], blocks)
    except ConfigError:
        return None
    return None if found is None else score(config.objective or USUAL_OBJECTIVE, found.prediction)
