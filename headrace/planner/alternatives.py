"""Changes a request that does not run as asked, so that it may run: the changes nearest to it come first."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.planner.layouts import PINS
from headrace.planner.plan_request import PlanRequest
from headrace.planner.scenario import Scenario
from headrace.quantization.formats import FORMATS, MADE_AT_LOAD, PLAIN

SHORTER = (2, 4, 8, 16, 32, 64)
"""What the numbers of tokens are divided by, until they fit."""
USUAL_UTILIZATION = 0.9


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
    """Yield requests with several changes at once, for when none of `changes` is enough: without any pin but the
    model's precision, then without that too, then with fewer tokens."""
    request, checkpoint = scenario.request, scenario.checkpoint
    free = request.replace(
        **dict.fromkeys((*PINS, "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")),
        gpu_memory_utilization=max(request.gpu_memory_utilization, USUAL_UTILIZATION),
        enable_chunked_prefill=True,
    )
    plain = lowest = free.replace(quantization=None, kv_cache_dtype="auto")
    for lower in _lower_precision(scenario.asking(quantization=None, kv_cache_dtype="auto")):
        if checkpoint.weight_format != PLAIN.name or lower.quantization == MADE_AT_LOAD[0]:
            lowest = free.replace(quantization=lower.quantization, kv_cache_dtype=lower.kv_cache_dtype)
    context = checkpoint.spec.max_position_embeddings
    for tokens in (plain, _shorter(plain, context, 1), _shorter(plain, context, SHORTER[-1])):
        for count in (scenario.num_gpus, *_more_gpus(scenario.num_gpus, most_gpus)):
            for entry in (free, plain, lowest):
                yield entry.replace(num_gpus=count, input_len=tokens.input_len, output_len=tokens.output_len)


def _without_pins(scenario: Scenario) -> Iterator[PlanRequest]:
    request = scenario.request
    if request.max_model_len is not None:
        yield request.replace(max_model_len=None)
    if request.quantization is not None and scenario.checkpoint.weight_format != PLAIN.name:
        yield request.replace(quantization=None)
    if request.max_num_batched_tokens is not None or request.max_num_seqs is not None:
        yield request.replace(max_num_batched_tokens=None, max_num_seqs=None)
    tp = request.tensor_parallel_size
    if tp is not None:
        for other in sorted(range(1, 2 * tp + 1), key=lambda size: abs(size - tp)):
            yield request.replace(tensor_parallel_size=other)
    pinned = [name for name in PINS if getattr(request, name) is not None]
    for name in pinned:
        yield request.replace(**{name: None})
    if pinned:
        yield request.replace(**dict.fromkeys(pinned))


def _lower_precision(scenario: Scenario) -> Iterator[PlanRequest]:
    """headrace is offered no formats but those that it makes at load; nobody is, where the GPU lacks their units."""
    request = scenario.request
    caches, formats = [request.kv_cache_dtype], [request.quantization]
    if request.kv_cache_dtype != "auto":
        caches.append("auto")
    elif "fp8" in scenario.chip.flops:
        caches.append("fp8")
    if scenario.checkpoint.weight_format == PLAIN.name:
        units = ("", *scenario.chip.flops)
        small = [one.name for one in FORMATS.values() if one.bits < 8 and one.units in units]
        fewer = small if request.engine == "vllm" else []
        formats += [form for form in (MADE_AT_LOAD[0], *fewer) if form != request.quantization]
    if request.quantization is not None:
        formats.append(None)
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
