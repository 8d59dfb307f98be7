"""What a started engine is expected to give, by the same models as `headrace plan`: its speed with the traffic that its
flags say to expect, or else the usual one; its memory; and what any one step should take.

Takes what the ranks reported of the machine; measures nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.planner.chips import CHIPS, Chip, find_chip
from headrace.planner.cost import Deployment, Parallel, StepModel, step_model
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.formats import in_plan_format, plan_format
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import Prediction, Workload, predict
from headrace.planner.search import USUAL_CONCURRENCY
from headrace.planner.shapes import shape_of
from headrace.planner.simulate import Limits
from headrace.step import WorkerFacts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Expected:
    """A workload and what it should get."""

    workload: Workload
    source: str
    """who says that this is the workload"""
    prediction: Prediction
    chip: str

    def __str__(self) -> str:
        load, found = self.workload, self.prediction
        return (
            f"expected on {self.chip}, {load.input_len} in / {load.output_len} out, {load.concurrency} at once "
            f"({self.source}): {found.ttft_ms:.0f} ms to the first token, {found.itl_ms:.1f} ms between tokens, "
            f"{found.output_tok_s:,.0f} output tokens/s (within {found.error_band:.0%}), bound by {found.bound}"
        )


@dataclass(frozen=True)
class StepPrediction:
    """What any step of the engine should take."""

    model: StepModel
    chip: str
    excuse: str = ""
    """what makes steps slower here and is not in the model"""
    warns: bool = True
    """False: too rough to call a step slow by it"""


def expect(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts], num_pages: int) -> Expected | None:
    """For a resolved config. None: the chip or the model is unknown to the planner, or such a request does not fit."""
    try:
        deployment = deployment_of(config, model, facts)
        layout = facts[0].layout
        workload, source = _workload(config, lambda length: layout.tokens_in(num_pages, length))
        limits = Limits(
            max_num_seqs=config.max_num_seqs or 1,
            max_num_batched_tokens=config.max_num_batched_tokens or 1,
            kv_tokens=layout.tokens_in(num_pages, workload.input_len + workload.output_len),
            block_size=config.block_size,
            enable_chunked_prefill=config.enable_chunked_prefill,
        )
        found = predict(deployment, workload, limits, limits.max_num_seqs, limits.max_num_batched_tokens)
    except ConfigError as error:
        logger.info("no prediction: %s", error)
        return None
    return Expected(workload, source, found, deployment.chip.title)


def predict_steps(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> StepPrediction | None:
    """None: the chip or the model is unknown to the planner."""
    try:
        deployment = deployment_of(config, model, facts)
    except ConfigError:
        return None
    reasons = {
        "batch_invariant": config.batch_invariant,
        "eager steps (cudagraph_mode NONE)": config.compilation_config.get("cudagraph_mode") == "NONE",
        "what the self-check took out of service": bool(facts[0].demoted),
    }
    excuse = " and ".join(reason for reason, holds in reasons.items() if holds)
    return StepPrediction(step_model(deployment), deployment.chip.title, excuse, deployment.chip.vendor != "cpu")


def predict_memory(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> MemoryMap | None:
    """Of one rank. None: the chip or the model is unknown to the planner."""
    try:
        deployment = deployment_of(config, model, facts)
    except ConfigError:
        return None
    return memory_map(
        deployment.shape,
        deployment.chip,
        deployment.parallel,
        weight_format=deployment.weight_format,
        kv_dtype_bytes=deployment.kv_dtype_bytes,
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        block_size=config.block_size,
        graph_mode=config.compilation_config.get("cudagraph_mode", "NONE"),
    )


def deployment_of(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> Deployment:
    """Raises ConfigError for a chip or a model that the planner does not know."""
    if not facts:
        raise ConfigError("no rank has said on what it runs")
    shape = shape_of(model.raw, config.model).held_in(config.dtype)
    asked = PlanRequest(model=config.model, quantization=config.quantization, engine="headrace")
    return Deployment(
        in_plan_format(asked, shape),
        _chip(facts[0]),
        Parallel(tp=config.tensor_parallel_size),
        plan_format(asked, shape),
        1.0 if config.kv_cache_dtype.startswith("fp8") else 4.0 if config.kv_cache_dtype == "float32" else 2.0,
        "headrace",
    )


def _chip(fact: WorkerFacts) -> Chip:
    if fact.device == "cpu":
        return replace(CHIPS["cpu"], title="the CPU of this machine", memory_bytes=fact.total_memory)
    return find_chip(fact.device_name, fact.total_memory)


def _workload(config: EngineConfig, tokens_in: Callable[[int], int]) -> tuple[Workload, str]:
    """What is expected, and who says so: flags, and for what they leave open what `headrace plan` takes. `tokens_in`:
    the tokens that the cache holds in sequences of a length."""
    said = {
        "input_len": config.expected_input_len,
        "output_len": config.expected_output_len,
        "concurrency": config.expected_concurrency,
    }
    usual = PlanRequest(model=config.model, input_len=said["input_len"], output_len=said["output_len"])
    usual = usual.filled(config.max_model_len or tokens_in(1))
    length = usual.prompt_len + usual.answer_len
    held = max(1, min(config.max_num_seqs or 1, tokens_in(length) // length))
    objective = config.objective or USUAL_OBJECTIVE
    concurrency = said["concurrency"] or min(held, USUAL_CONCURRENCY.get(objective, held))
    left_open = [name for name, value in said.items() if value is None]
    flags = ", ".join(f"--expected-{name.replace('_', '-')}" for name in left_open)
    what = {0: "as flags say", 3: f"usual for {objective}"}.get(len(left_open), "flags and usual values")
    source = f"{what}; {flags} would say otherwise" if left_open else what
    return Workload(usual.prompt_len, usual.answer_len, concurrency), source
