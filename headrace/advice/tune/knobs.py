"""Chooses which values of each knob are worth a trial, and orders them by what the planner predicts. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.advice.tune.options import TuneOptions
from headrace.advice.tune.record import Trial
from headrace.advice.tune.trial import changed
from headrace.attention.table import BACKENDS, reasons_against, select_backend
from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.models.drafters import start_specs
from headrace.planner.chips import read_gpus
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.graphs import GRAPH_KEYS
from headrace.planner.search import score
from headrace.planner.served import expect
from headrace.planner.speculation import decide_speculation
from headrace.speculation import MTP, NGRAM
from headrace.step import WorkerFacts

KNOBS = (
    "max_num_batched_tokens", "max_num_seqs", "cudagraph_mode", "kv_cache_dtype", "attention_backend",
    "speculative_config",
)  # fmt: skip
BUDGETS = tuple(1 << power for power in range(11, 17))
"""Tokens of a step: 2k to 64k."""
GRAPHS = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE")


def is_pinned(knob: str, config: EngineConfig) -> bool:
    """Return whether the user has set the knob, so that it is not varied."""
    if knob == "cudagraph_mode":
        return config.enforce_eager or any(key in config.compilation_config for key in GRAPH_KEYS)
    return getattr(config, knob) not in (None, "auto", {})


def trials_of(
    knobs: Iterable[str], config: EngineConfig, model: ModelConfig, settings: dict[str, Any], load: TuneOptions
) -> list[Trial]:
    """Return trials with one knob changed in each, the most promising first; `settings` are the plan's, by field."""
    plan = resolved(config, settings)
    gpu, memory = next(iter(read_gpus()), ("cpu", 1 << 40))

    def predict(trial: Trial) -> float | None:
        """The planner's score of the trial; None where it can tell nothing."""
        blocks = int(settings.get("num_gpu_blocks", 0))
        if (cache := trial.changes.get("kv_cache_dtype")) is not None:
            blocks = 2 * blocks if cache == "fp8" else blocks // 2
        try:
            changed_plan = changed(plan, trial).replace(
                expected_input_len=load.input_len,
                expected_output_len=load.output_len,
                expected_concurrency=load.requests_at_once,
            )
            facts = WorkerFacts(plan.device, gpu, memory, 0, same_layout(plan.block_size), 0, "")
            expected = expect(changed_plan, model, [facts], blocks)
        except ConfigError:
            return None
        return None if expected is None else score(config.objective or USUAL_OBJECTIVE, expected.prediction)

    unchanged = predict(Trial({}))
    ranked = []
    for knob in knobs:
        for distance, value in enumerate([] if is_pinned(knob, config) else _values(knob, plan, model, settings, load)):
            trial = Trial({knob: value})
            predicted = predict(trial)
            better = (predicted - unchanged) / abs(unchanged) if predicted is not None and unchanged else 0.0
            ranked.append((-better, distance, trial))
    return [trial for _, _, trial in sorted(ranked, key=lambda entry: entry[:2])]


def resolved(config: EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """Return the config with what the engine decided in place of what the user left open."""
    names = ("device", "dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    mode = {"cudagraph_mode": settings.get("cudagraph_mode", "NONE")}
    known = {name: settings[name] for name in names if name in settings}
    return config.replace(**known, compilation_config=config.compilation_config | mode)


def _values(
    knob: str, plan: EngineConfig, model: ModelConfig, settings: dict[str, Any], load: TuneOptions
) -> list[Any]:
    """Nearest to the plan's first; none that would be the plan's under another name."""
    seqs, budget = plan.max_num_seqs or 1, plan.max_num_batched_tokens or 1
    if knob == "max_num_batched_tokens":
        return _nearest([value for value in BUDGETS if value >= seqs], budget, load.requests_at_once * load.input_len)
    if knob == "max_num_seqs":
        here = min(seqs, _ladder_up(load.requests_at_once))
        values = [here >> 3, here >> 2, here >> 1, here << 1, here << 2]
        return _nearest([value for value in values if 0 < value <= budget], here, load.requests_at_once)
    if knob == "cudagraph_mode":
        modes = GRAPHS if settings.get("device") == "cuda" else ()
        return [mode for mode in modes if mode != settings.get("cudagraph_mode")]
    if knob == "kv_cache_dtype":
        return [plan.dtype] if str(plan.kv_cache_dtype).startswith("fp8") else ["fp8"]
    if knob == "speculative_config":
        return [{"method": method} for method in (NGRAM, MTP) if _may_guess(method, plan, model)]
    return _backends(plan, model)


def _may_guess(method: str, plan: EngineConfig, model: ModelConfig) -> bool:
    """Tell whether the model may be served with guesses of a method that needs nothing beside it."""
    try:
        given, _ = decide_speculation(plan.replace(speculative_config={"method": method}), model, plan.device)
    except ConfigError:
        return False
    return bool(given)


def _ladder_up(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _nearest(values: list[int], here: int, enough: int) -> list[int]:
    """Without the plan's own, nearest first. From `enough` on all are alike, so the first of those does for all."""
    most = _ladder_up(enough)
    different = {min(value, most) for value in values} - {min(here, most)}
    return sorted(different, key=lambda value: max(value / here, here / value))


def _backends(plan: EngineConfig, model: ModelConfig) -> list[str]:
    specs = start_specs(plan, model, plan.device)
    chosen = select_backend(specs).name
    return [entry.name for entry in BACKENDS if entry.name != chosen and not reasons_against(entry, specs)]
