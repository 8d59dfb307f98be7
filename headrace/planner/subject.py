"""What a request is about: the model's shape, the chip, how many; its types of numbers, and the terms of its search.

Between what was asked and search.py; ranks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.hub import DEMO_FOLDER, DEMO_MODEL
from headrace.planner.catalogue import FoundConfig, catalogue, find_config, find_model
from headrace.planner.chips import Chip, find_chip, this_machine
from headrace.planner.decisions import DTYPE_ALIASES, activation_dtype
from headrace.planner.engines import default_block_size, model_gaps
from headrace.planner.formats import cache_problem, format_problem, in_plan_format, plan_format
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.rounded_cache import FP8, LOSSLESS, OFFERED, cache_for, runs_fp8_cache
from headrace.planner.search import Terms
from headrace.planner.settings import graph_decision
from headrace.planner.shapes import ModelShape
from headrace.quantization.formats import MADE_AT_LOAD, PLAIN

HUB = "https://huggingface.co/"


@dataclass(frozen=True)
class Subject:
    """What a request is about."""

    shape: ModelShape
    config: FoundConfig
    chip: Chip
    num_gpus: int | None

    def model_id(self, asked: str, engine: str) -> str:
        """As an engine takes it: what was asked where that is a folder or an id; the catalogue's hub id where its name
        alone was asked for. Another checkpoint of such a model (`llama-3.1-8b-fp8`) has an id that is not known here:
        that is `<asked>`."""
        if asked == DEMO_MODEL and engine != "headrace":
            return str(DEMO_FOLDER)
        if asked.endswith(".json"):
            return str(Path(asked).parent)
        if not self.config.source.startswith(HUB) or "/" in asked:
            return asked
        entry = catalogue()[self.config.name]
        if asked.lower() in (entry.name, *entry.aliases):
            return "/".join(self.config.source.removeprefix(HUB).split("/")[:2])
        return f"<{asked}>"


def find_subject(request: PlanRequest, machine: tuple[Chip, int] | None) -> Subject:
    config, shape = find_config(request.model), find_model(request.model)
    if request.gpu == "auto":
        chip, found = machine or this_machine()
        return Subject(shape, config, chip, request.num_gpus or found)
    return Subject(shape, config, find_chip(request.gpu), request.num_gpus)


def pinned_gpus(request: PlanRequest) -> int | None:
    """As many as the pinned layout takes; None: nothing is pinned."""
    pins = (request.tensor_parallel_size, request.pipeline_parallel_size, request.data_parallel_size)
    if pins == (None, None, None):
        return None
    gpus = 1
    for pin in pins:
        gpus *= pin or 1
    return gpus


def problems_of(request: PlanRequest, subject: Subject) -> list[str]:
    """What no layout could mend."""
    shape, chip = subject.shape, subject.chip
    problems = [format_problem(request, shape, chip), cache_problem(kv_cache_of(request, subject).value, chip)]
    context, length, budget = shape.spec.max_position_embeddings, request.max_model_len, request.max_num_batched_tokens
    load = request.prompt_len + request.answer_len
    tokens = max(load, length or 0)
    if tokens > context:
        problems.append(f"{tokens} tokens are more than the model's context of {context}")
    elif length is not None and load > length:
        problems.append(f"max_model_len {length} is less than a prompt and an answer of {load} tokens")
    if not request.enable_chunked_prefill and budget is not None and budget < (length or context):
        problems.append(
            f"max_num_batched_tokens {budget} is less than max_model_len ({length or context}), and without chunked "
            "prefill a whole prompt must fit into one step"
        )
    return [problem for problem in problems if problem]


def terms_of(request: PlanRequest, subject: Subject, num_gpus: int) -> Terms:
    shape = in_plan_format(request, subject.shape).held_in(dtype_of(request, subject).value)
    gaps = gaps_of_model(request, subject)
    return Terms(
        request=request,
        shape=shape,
        chip=subject.chip,
        num_gpus=num_gpus,
        weight_format=plan_format(request, subject.shape),
        kv_dtype=kv_cache_of(request, subject).value,
        block_size=request.block_size or default_block_size(request.engine, shape, subject.chip),
        graph_mode=graph_decision(request, subject.chip, "", request.engine).value,
        served_by_headrace=request.engine == "headrace" and not gaps,
    )


def dtype_of(request: PlanRequest, subject: Subject) -> Decision:
    if request.dtype != "auto":
        return Decision("dtype", DTYPE_ALIASES.get(request.dtype, request.dtype), "given", source="user")
    return Decision("dtype", *activation_dtype(subject.shape.dtype, _device(subject.chip)))


def kv_cache_of(request: PlanRequest, subject: Subject) -> Decision:
    if request.kv_cache_dtype != "auto":
        given = request.kv_cache_dtype
        return Decision("kv_cache_dtype", FP8 if given == "fp8" else given, "given", source="user")
    if subject.shape.fp8_kv_cache and "fp8" in subject.chip.flops:
        return Decision("kv_cache_dtype", FP8, "the checkpoint brings scales for it")
    dtype = dtype_of(request, subject).value
    served = request.engine == "headrace" and not subject.shape.is_mla
    if served and runs_fp8_cache(dtype, subject.chip):
        value, why, other = cache_for(request.objective, dtype)
        return Decision("kv_cache_dtype", value, why, other or OFFERED)
    return Decision("kv_cache_dtype", dtype, LOSSLESS, OFFERED if "fp8" in subject.chip.flops else "")


def gaps_of_model(request: PlanRequest, subject: Subject) -> list[str]:
    gaps = model_gaps(subject.config.config, request.weight_format)
    own = subject.config.weight_format
    if not gaps and own not in (None, PLAIN.name):
        gaps = [f"headrace reads no {own} checkpoints yet; it rounds plain ones to {MADE_AT_LOAD[0]} at load"]
    return gaps


def _device(chip: Chip) -> str:
    return "cpu" if chip.vendor == "cpu" else "cuda"
