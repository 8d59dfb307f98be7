"""What a started engine is expected to give, by the same closed form as `headrace plan`, for the traffic that its flags
say to expect.

Takes what the ranks reported of the machine; measures nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.planner.chips import CHIPS, Chip, find_chip
from headrace.planner.cost import Deployment, Parallel
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.formats import in_plan_format, plan_format
from headrace.planner.plan_request import USUAL_INPUT, USUAL_OUTPUT, PlanRequest
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
    prediction: Prediction
    chip: str

    def __str__(self) -> str:
        load, found = self.workload, self.prediction
        return (
            f"expected on {self.chip}, {load.input_len} in / {load.output_len} out, {load.concurrency} at once: "
            f"{found.ttft_ms:.0f} ms to the first token, {found.itl_ms:.1f} ms between tokens, "
            f"{found.output_tok_s:,.0f} output tokens/s (within {found.error_band:.0%})"
        )


def expect(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts], num_blocks: int) -> Expected | None:
    """For a resolved config. None: nobody said what to expect, the chip or the model is unknown to the planner, or such
    a request does not fit."""
    said = (config.expected_input_len, config.expected_output_len, config.expected_concurrency)
    if said == (None, None, None) or not facts:
        return None
    objective = config.objective or USUAL_OBJECTIVE
    usual = USUAL_CONCURRENCY.get(objective, config.max_num_seqs or 1)
    try:
        workload = Workload(said[0] or USUAL_INPUT, said[1] or USUAL_OUTPUT, said[2] or usual)
        chip = _chip(facts[0])
        prediction = _predict(config, model, chip, workload, num_blocks)
    except ConfigError as error:
        logger.info("no prediction: %s", error)
        return None
    return Expected(workload, prediction, chip.title)


def _chip(fact: WorkerFacts) -> Chip:
    if fact.device == "cpu":
        return replace(CHIPS["cpu"], title="the CPU of this machine", memory_bytes=fact.total_memory)
    return find_chip(fact.device_name, fact.total_memory)


def _predict(config: EngineConfig, model: ModelConfig, chip: Chip, workload: Workload, num_blocks: int) -> Prediction:
    shape = shape_of(model.raw, config.model)
    asked = PlanRequest(model=config.model, quantization=config.quantization, engine="headrace")
    deployment = Deployment(
        in_plan_format(asked, shape),
        chip,
        Parallel(tp=config.tensor_parallel_size),
        plan_format(asked, shape),
        1.0 if config.kv_cache_dtype.startswith("fp8") else 4.0 if config.kv_cache_dtype == "float32" else 2.0,
        "headrace",
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        kv_tokens=num_blocks * config.block_size,
        block_size=config.block_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    return predict(deployment, workload, limits, limits.max_num_seqs, limits.max_num_batched_tokens)
