"""Changes a request that does not run as asked, so that it may run: the changes nearest to it come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.planner.layouts import PINS
from headrace.planner.plan_request import PlanRequest
from headrace.planner.scenario import Scenario
from headrace.quantization.formats import FORMATS, MADE_AT_LOAD, PLAIN

SHORTER = (2, 4, 8, 16, 32, 64)
"""What the numbers of tokens are divided by, until they fit."""
USUAL_UTILIZATION = 0.9
LIMITS = ("max_model_len", "quantization", "max_num_seqs", "max_num_batched_tokens", "block_size")
"""Pins beside those of the layout."""


def changes(scenario: Scenario, most_gpus: int) -> Iterator[list[PlanRequest]]:
    """Yield groups of changed requests: without one of the pins, in lower precision, with fewer tokens, on more GPUs.

    Of each group, the first request that runs is of interest.
    """
    request = scenario.request
    yield list(_without_pins(scenario))
    yield list(_lower_precision(scenario))
    yield list(_fewer_tokens(scenario))
    yield [request.replace(num_gpus=count) for count in _more_gpus(scenario.num_gpus, most_gpus)]


def drastic_changes(scenario: Scenario, most_gpus: int) -> Iterator[PlanRequest]:
    """Yield requests without any pin, for when none of `changes` is enough: with all tokens, then with fewer, each on
    ever more GPUs and in ever lower precision."""
    request, context = scenario.request, scenario.checkpoint.spec.max_position_embeddings
    usual = max(request.gpu_memory_utilization, USUAL_UTILIZATION)
    free = request.replace(**_open(scenario), gpu_memory_utilization=usual, enable_chunked_prefill=True)
    for tokens in (free, _shorter(free, context, 1), _shorter(free, context, SHORTER[-1])):
        for count in (scenario.num_gpus, *_more_gpus(scenario.num_gpus, most_gpus)):
            entry = tokens.replace(num_gpus=count)
            yield entry
            yield from _lower_precision(replace(scenario, request=entry))


def _open(scenario: Scenario) -> dict[str, Any]:
    """The pins of a request, left open."""
    usual = {**dict.fromkeys((*PINS, *LIMITS)), "kv_cache_dtype": "auto"}
    return {name: value for name, value in usual.items() if getattr(scenario.request, name) != value}


def _without_pins(scenario: Scenario) -> Iterator[PlanRequest]:
    """Without each of the pins, and without all."""
    pinned = _open(scenario)
    for name, value in pinned.items():
        yield scenario.request.replace(**{name: value})
    if len(pinned) > 1:
        yield scenario.request.replace(**pinned)


def _lower_precision(scenario: Scenario) -> Iterator[PlanRequest]:
    """headrace is offered no formats but those that it makes at load; nobody is, where the GPU lacks their units."""
    request = scenario.request
    caches, formats = [request.kv_cache_dtype], [request.quantization]
    if request.kv_cache_dtype == "auto" and "fp8" in scenario.chip.flops:
        caches.append("fp8")
    if scenario.checkpoint.weight_format == PLAIN.name:
        units = ("", *scenario.chip.flops)
        small = [one.name for one in FORMATS.values() if one.bits < 8 and one.units in units]
        fewer = small if request.engine == "vllm" else []
        formats += [form for form in (MADE_AT_LOAD[0], *fewer) if form != request.quantization]
    for form in formats:
        for cache in caches:
            if (form, cache) != (request.quantization, request.kv_cache_dtype):
                yield request.replace(quantization=form, kv_cache_dtype=cache)


def _fewer_tokens(scenario: Scenario) -> Iterator[PlanRequest]:
    request, context = scenario.request, scenario.checkpoint.spec.max_position_embeddings
    if request.answer_len < context < scenario.tokens:
        yield request.replace(input_len=context - request.answer_len, max_model_len=None)
    for part in (1, *SHORTER):
        yield _shorter(request, context, part).replace(max_model_len=None)


def _shorter(request: PlanRequest, context: int, part: int) -> PlanRequest:
    """The request with a `part`-th of the tokens, and no more than the context holds."""
    return request.replace(
        input_len=max(1, min(request.prompt_len, context // 2) // part),
        output_len=max(1, min(request.answer_len, context // 4) // part),
    )


def _more_gpus(num_gpus: int, most: int) -> list[int]:
    """The powers of two above `num_gpus`, up to `most`."""
    return [count for count in (1 << power for power in range(most.bit_length())) if num_gpus < count <= most]
