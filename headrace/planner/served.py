"""Predicts a started engine's speed, memory and steps by the models of `headrace plan`, from what its ranks reported.

The traffic is what the engine's flags say to expect, or else the usual one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.model_config import ModelConfig
from headrace.planner.chips import GIB, find_chip, this_cpu
from headrace.planner.cost import StepModel, step_model
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.deployment import Deployment
from headrace.planner.draft_costs import DraftCosts
from headrace.planner.fp8_cache import cached_bytes
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.parallel import Parallel
from headrace.planner.plan_request import PlanRequest
from headrace.planner.predict import Limits, Prediction, Workload, predict
from headrace.planner.record import Decision
from headrace.planner.scenario import USUAL_CONCURRENCY
from headrace.planner.shapes import shape_of
from headrace.planner.speculation import FIELD, draft_shape
from headrace.step import WorkerFacts

logger = logging.getLogger(__name__)

STREAM_RATE = 24_000
"""Tokens a second that one HTTP process streams, in events of one token, on a core of a server."""
USUAL_CONTEXT = 1024
"""Tokens of a request where nobody says how many, for what guessing gives; it depends little on them."""


@dataclass(frozen=True)
class Expected:
    """Holds a workload and what it should get."""

    workload: Workload
    source: str
    """who says that this is the workload"""
    prediction: Prediction
    chip: str

    def __str__(self) -> str:
        load, prediction = self.workload, self.prediction
        return (
            f"expected on {self.chip}, {load.input_len} in / {load.output_len} out, {load.concurrency} at once "
            f"({self.source}): {prediction.ttft_ms:.0f} ms to the first token, {prediction.itl_ms:.1f} ms between "
            f"tokens, {prediction.output_tok_s:,.0f} output tokens/s (within {prediction.error_band:.0%}), bound by "
            f"{prediction.bound}"
        )


@dataclass(frozen=True)
class StepPrediction:
    """Tells how long any step of the engine should take."""

    model: StepModel
    chip: str
    excuse: str = ""
    """what makes steps slower here and is not in the model"""
    warns: bool = True
    """False: too rough to call a step slow by it"""
    drafts: DraftCosts | None = None
    """of steps in which tokens are guessed, if any are"""


@dataclass(frozen=True)
class MemoryPart:
    """Compares one part of a rank's memory, as predicted and as reported."""

    name: str
    predicted: int | None
    """bytes; None: the planner does not know this chip or model"""
    reported: int | None
    """bytes; None: not measured here"""

    def __str__(self) -> str:
        sizes = ("?" if size is None else f"{size / GIB:.2f}" for size in (self.predicted, self.reported))
        return f"{self.name} {' / '.join(sizes)}"


@dataclass(frozen=True)
class MemoryReport:
    """Compares the memory of the rank with the least left, as predicted and as reported."""

    device: str
    total: int
    usable: int
    """the engine's share of it"""
    parts: tuple[MemoryPart, ...]
    kv_bytes_per_token: MemoryPart
    kv_cache: int
    """bytes allocated: what is left, or what is useful of it"""

    def __str__(self) -> str:
        parts = ", ".join(str(part) for part in self.parts if part.reported is not None)
        cache = f"the KV cache took {self.kv_cache / GIB:.2f}"
        return f"memory of {self.device} in GiB, predicted / reported: {parts}; {cache}"


def expect(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts], num_pages: int) -> Expected | None:
    """Predict the expected traffic of a resolved config. None: the planner does not know the chip or the model, such a
    request does not fit, or the engine's steps are as long as those of others that share its experts."""
    if config.joined_engines > 1:
        return None
    try:
        deployment = deployment_of(config, model, facts)
        layout = facts[0].layout
        workload, source = _workload(config, lambda length: layout.tokens_in(num_pages, length))
        limits = Limits(
            max_num_seqs=config.max_num_seqs or 1,
            max_num_batched_tokens=config.max_num_batched_tokens or 1,
            kv_tokens=layout.tokens_in(num_pages, workload.input_len + workload.output_len),
        )
        return Expected(workload, source, predict(deployment, workload, limits), deployment.chip.title)
    except ConfigError as error:
        logger.info("no prediction: %s", error)
        return None


def most_output(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts], num_pages: int) -> float | None:
    """Predict the output tokens a second of an engine that runs as many requests as it can. None: as of `expect`."""
    full = expect(config.replace(expected_concurrency=config.max_num_seqs), model, facts, num_pages)
    return None if full is None else full.prediction.output_tok_s


def decide_http_processes(given: int | None, engines: int, most: float | None, one_because: str = "") -> Decision:
    """Decide how many HTTP processes serve `engines` engines, which give `most` output tokens a second together.
    `one_because`: what does not go with several; empty: nothing."""
    field, each = "api_server_count", f"one process streams about {STREAM_RATE:,} tokens/s"
    if given is not None:
        return Decision(field, given, "given", source="user")
    if engines == 1:
        return Decision(field, 1, "one engine")
    if most is None:
        return Decision(field, 1, f"{each}, and nothing predicts what {engines} engines give: more may be needed")
    wanted = min(engines, max(1, math.ceil(most / STREAM_RATE)))
    reason = f"{each}, and {engines} engines give {most:,.0f} at most"
    if wanted > 1 and one_because:
        return Decision(field, 1, one_because, f"{wanted}: {reason}")
    return Decision(field, wanted, reason)


def predict_steps(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> StepPrediction | None:
    """Predict the time of steps. None: the planner does not know the chip or the model, or they are as long as those of
    other engines, which share the experts."""
    if config.joined_engines > 1:
        return None
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
    drafts = None if config.speculation is None else DraftCosts(deployment)
    steps = step_model(replace(deployment, draft=None))
    return StepPrediction(steps, deployment.chip.title, excuse, deployment.chip.vendor != "cpu", drafts)


def decide_gain(config: EngineConfig, prediction: StepPrediction | None) -> list[Decision]:
    """Say what the guesses that a config asks for are expected to give; empty: nothing is guessed, or predicted."""
    speculation = config.speculation
    if speculation is None or prediction is None or prediction.drafts is None:
        return []
    context = (config.expected_input_len or USUAL_CONTEXT) + (config.expected_output_len or 0) / 2
    why = f"given; {prediction.drafts.describe(min(context, config.max_model_len or context), speculation.lengths)}"
    return [Decision(FIELD, json.dumps(config.speculative_config), why, source="user")]


def predict_memory(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> MemoryMap | None:
    """Map the memory of one rank. None: the planner does not know the chip or the model."""
    try:
        deployment = deployment_of(config, model, facts)
    except ConfigError:
        return None
    return memory_map(
        deployment,
        max_num_seqs=config.max_num_seqs or 1,
        max_num_batched_tokens=config.max_num_batched_tokens or 1,
        max_model_len=config.max_model_len,
        gpu_memory_utilization=config.gpu_memory_utilization,
        block_size=config.block_size,
        graph_mode=config.compilation_config.get("cudagraph_mode", "NONE"),
        decode_lens=config.decode_lens,
        adapters=(config.max_loras if config.enable_lora else 0, config.max_lora_rank, config.lora_experts),
    )


def report_memory(
    config: EngineConfig, predicted: MemoryMap | None, facts: list[WorkerFacts], num_pages: int
) -> MemoryReport | None:
    """Put the prediction beside what the ranks reported. None: no rank has reported anything."""
    if not facts:
        return None
    fact = min(facts, key=lambda fact: fact.available_kv_memory)
    parts = {
        "weights": fact.weight_bytes,
        "tables": fact.table_bytes,
        "activations": fact.step_bytes,
        "graphs": fact.graph_bytes,
        "libraries": fact.library_bytes,
        "left for the KV cache": fact.available_kv_memory,
    }
    profiled = fact.step_bytes > 0  # a CPU's memory is shared with all, and is not
    sizes: dict[str, int] = {}
    if predicted is not None:
        sizes = {**predicted.parts(), "weights": predicted.weight_bytes, "left for the KV cache": predicted.kv_pool}
    per_token = None if predicted is None else predicted.kv_bytes_per_token
    return MemoryReport(
        device=fact.device_name,
        total=fact.total_memory,
        usable=fact.total_memory if fact.device == "cpu" else int(fact.total_memory * config.gpu_memory_utilization),
        parts=tuple(
            MemoryPart(name, sizes.get(name), size if profiled or name == "weights" else None)
            for name, size in parts.items()
        ),
        kv_bytes_per_token=MemoryPart("KV cache, a token", per_token, fact.layout.bytes_per_token),
        kv_cache=num_pages * fact.layout.page_bytes,
    )


def deployment_of(config: EngineConfig, model: ModelConfig, facts: list[WorkerFacts]) -> Deployment:
    """Describe the engine to the cost model. Raises ConfigError for a chip or a model that the planner does not
    know."""
    if not facts:
        raise ConfigError("no rank has reported its device")
    fact, shape = facts[0], shape_of(model.raw, config.model).held_in(config.dtype)
    wanted = PlanRequest(model=config.model, quantization=config.quantization).weight_format(shape.weight_format)
    return Deployment(
        shape.converted(wanted),
        this_cpu(fact.total_memory) if fact.device == "cpu" else find_chip(fact.device_name, fact.total_memory),
        Parallel(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.joined_engines,
            ep=config.joined_engines > 1,
            dp_attention=config.joined_engines > 1,
        ),
        shape.format_for(wanted),
        cached_bytes(config.kv_cache_dtype),
        "headrace",
        draft_shape(config.speculation, model, config.dtype),
    )


def _workload(config: EngineConfig, tokens_in: Callable[[int], int]) -> tuple[Workload, str]:
    """The expected workload, and who says so: flags, and `headrace plan`'s usual values for what they leave open.

    `tokens_in`: the tokens that the cache holds in sequences of a given length.
    """
    given = {
        "input_len": config.expected_input_len,
        "output_len": config.expected_output_len,
        "concurrency": config.expected_concurrency,
    }
    usual = PlanRequest(model=config.model, input_len=given["input_len"], output_len=given["output_len"])
    usual = usual.filled(config.max_model_len or tokens_in(1))
    length = usual.prompt_len + usual.answer_len
    held = max(1, min(config.max_num_seqs or 1, tokens_in(length) // length))
    objective = config.objective or USUAL_OBJECTIVE
    concurrency = given["concurrency"] or min(held, USUAL_CONCURRENCY.get(objective, held))
    left_open = [name for name, value in given.items() if value is None]
    flags = ", ".join(f"--expected-{name.replace('_', '-')}" for name in left_open)
    what = {0: "as flags say", 3: f"usual for {objective}"}.get(len(left_open), "flags and usual values")
    source = f"{what}; {flags} would say otherwise" if left_open else what
    return Workload(usual.prompt_len, usual.answer_len, concurrency), source
