"""Says for every setting what it is, why, and what came second: of a start, and of the layout that a plan chose."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from headrace.attention.table import select_backend
from headrace.config import EngineConfig
from headrace.graph_sizes import capture_sizes
from headrace.models.drafters import start_specs
from headrace.planner.decisions import backend_decision
from headrace.planner.draft_costs import asked_costs
from headrace.planner.engines import graph_decision, served_config, vllm_backend
from headrace.planner.layouts import PINS, ULTRA_SPARSE
from headrace.planner.parallel import Parallel
from headrace.planner.record import Decision
from headrace.planner.scenario import Scenario
from headrace.planner.search import FIRST_TOKEN_MS, READING_PACE_MS, Candidate, SearchResult, score
from headrace.planner.shapes import expert_share

PACE = f"{READING_PACE_MS:.0f} ms a token after {FIRST_TOKEN_MS / 1000:.0f} s"


class _Words(msgspec.Struct):
    """Holds settings.json."""

    order: list[str]
    """in which a start lists its settings; others come after these"""
    defaults: dict[str, str]
    """settings that keep their default unless somebody gives another value, and why the default is good"""
    wanted: dict[str, str]
    """what each objective wants of a layout"""


WORDS = msgspec.json.decode(Path(__file__).with_name("settings.json").read_bytes(), type=_Words)


def all_settings(config: EngineConfig, decisions: Iterable[Decision]) -> list[Decision]:
    """List the last decision on each field, and one on every field that nobody decided, in settings.json's order."""
    last = {entry.field: entry for entry in decisions}
    size = config.tensor_parallel_size
    if size == 1:
        why, source = "the default; `headrace plan` compares others", "derived"
    else:
        why, source = "given", "user"
    undecided = [Decision("tensor_parallel_size", size, why, source=source), *default_settings(config)]
    if config.quantization is None:
        undecided.append(Decision("quantization", None, "weights stay as the checkpoint holds them"))
    for entry in undecided:
        last.setdefault(entry.field, entry)
    place = {name: number for number, name in enumerate(WORDS.order)}
    return sorted(last.values(), key=lambda entry: place.get(entry.field, len(place)))


def default_settings(config: EngineConfig) -> Iterator[Decision]:
    """Yield decisions on what has a default, and on graph sizes, from a config whose cudagraph_mode is settled."""
    usual = EngineConfig()
    for name, why in WORDS.defaults.items():
        value = getattr(config, name)
        if name == "gpu_memory_utilization" and config.device == "cpu":
            why = "a CPU's memory is shared with other programs; this bounds nothing here"
        if value == getattr(usual, name):
            yield Decision(name, value, why)
        else:
            yield Decision(name, value, "given", source="user")
    yield _graph_sizes(config)


def _graph_sizes(config: EngineConfig) -> Decision:
    field, graphs = "cudagraph_capture_sizes", config.compilation_config
    if graphs.get("cudagraph_mode", "NONE") == "NONE":
        return Decision(field, [], "no graphs")
    if given := graphs.get(field):
        return Decision(field, given, "given", source="user")
    seqs = config.max_num_seqs or 1
    sizes = [size for size in capture_sizes(seqs) if size <= (graphs.get("max_cudagraph_capture_size") or seqs)]
    if not sizes:
        return Decision(field, [], "max_cudagraph_capture_size leaves none", source="user")
    return Decision(field, sizes, f"decode steps of up to {sizes[-1]} requests, each captured when it comes up again")


def parallel_decisions(scenario: Scenario, result: SearchResult) -> list[Decision]:
    """Decide how the GPUs are used."""
    best, request = result.best, scenario.request
    parallel = best.parallel
    stages = "the layers fit without stages, which would wait for each other"
    if parallel.pp > 1:
        stages = f"{parallel.pp} stages: the layers do not fit into {parallel.tp} GPUs"
    rival = next((f"{other.name}: {summary(other)}" for other in result.ranked[1:]), "")
    reasons = {
        "tp": (_why_layout(scenario, result), rival),
        "pp": (stages,),
        "dp": (_why_data(parallel),),
        "ep": (_why_experts(scenario, best), _best_other(result, "ep")),
        "dp_attention": (_why_attention(scenario, best), _best_other(result, "dp_attention")),
    }
    return [
        Decision(field, getattr(parallel, name), *reasons[name])
        if getattr(request, field) is None
        else Decision(field, getattr(parallel, name), "given", source="user")
        for field, name in PINS.items()
    ]


def summary(candidate: Candidate) -> str:
    prediction = candidate.prediction
    return f"{prediction.itl_ms:.1f} ms a token, {prediction.output_tok_s:,.0f} tok/s"


def _why_layout(scenario: Scenario, result: SearchResult) -> str:
    best, count, objective = result.best, len(result.ranked), scenario.request.objective
    what = f"{best.name}, {summary(best)}"
    if count == 1:
        return f"the one layout that runs: {what}"
    reached = score(objective, best.prediction)
    if objective == "interactive" and reached < 0:
        return f"of {count} layouts, none of which keeps to {PACE}, the nearest: {what}"
    wanted = WORDS.wanted[objective]
    if max(score(objective, other.prediction) for other in result.ranked[1:]) > reached:
        return f"the simplest of those that give about {wanted}, of {count} layouts: {what}"
    return f"{wanted} of {count} layouts: {what}"


def _why_data(parallel: Parallel) -> str:
    if parallel.dp_attention:
        return "each rank keeps the cache of its own requests; all share the experts"
    if parallel.dp == 1:
        return "one GPU" if parallel.gpus == 1 else "all GPUs work on each token"
    return f"{parallel.dp} copies that never wait for each other"


def _why_experts(scenario: Scenario, best: Candidate) -> str:
    if not scenario.shape.is_moe:
        return "a dense model has no experts"
    if best.parallel.ep:
        return "whole experts on each GPU: larger products, and tokens travel to them"
    share = expert_share(scenario.shape.spec)
    if share < ULTRA_SPARSE:
        return f"a token uses {share:.2%} of the experts: whole ones would leave most GPUs idle"
    if best.parallel.expert_gpus == 1:
        return "one GPU holds all experts"
    return "slices of every expert keep all GPUs equally busy"


def _why_attention(scenario: Scenario, best: Candidate) -> str:
    shape, parallel = scenario.shape, best.parallel
    if not shape.is_moe:
        return "for mixtures of experts, whose experts ranks can share"
    if parallel.dp_attention:
        if shape.is_mla:
            return f"a latent cache has no heads to split: {parallel.dp} ranks hold {parallel.dp} times the requests"
        return "no copies of KV heads, and no sums after attention"
    if parallel.expert_gpus == 1:
        return "a GPU holds the whole model, with nothing to share"
    if shape.is_mla and parallel.tp > 1:
        over = best.workload.concurrency / parallel.replicas
        return f"for {over:.0f} requests copies of the latent cost less than ranks of their own"
    return "predicted to be slower here"


def _best_other(result: SearchResult, name: str) -> str:
    """The best layout that differs from the chosen one in the field `name`."""
    chosen = getattr(result.best.parallel, name)
    others = (entry for entry in result.ranked if getattr(entry.parallel, name) != chosen)
    return next((f"{other.name}: {summary(other)}" for other in others), "")


def engine_decisions(scenario: Scenario, best: Candidate) -> list[Decision]:
    """Decide on attention, cache, scheduler and graphs. Raises ConfigError for a backend that cannot serve."""
    request = scenario.request
    backend = _attention_backend(scenario, best.parallel.tp)
    graphs = graph_decision(request, scenario.chip, str(backend.value))
    config = EngineConfig(
        device=scenario.chip.device_type,
        max_num_seqs=best.limits.max_num_seqs,
        compilation_config=request.compilation_config | {"cudagraph_mode": graphs.value},
        enable_chunked_prefill=request.enable_chunked_prefill,
        async_scheduling=request.async_scheduling,
        gpu_memory_utilization=request.gpu_memory_utilization,
    )
    default = {entry.field: entry for entry in default_settings(config)}
    limits = ("max_num_seqs", "max_num_batched_tokens", "mixed_step_tokens")
    return [
        backend,
        _block_size(scenario, backend),
        _model_length(scenario, best.max_model_len),
        *(best.decisions[name] for name in limits if name in best.decisions),
        default["enable_chunked_prefill"],
        graphs,
        default["cudagraph_capture_sizes"],
        default["async_scheduling"],
        _speculation(scenario, best),
        default["gpu_memory_utilization"],
    ]


def _attention_backend(scenario: Scenario, tp: int) -> Decision:
    given, field = scenario.request.attention_backend, "attention_backend"
    if scenario.engine == "vllm":
        if given is not None:
            return Decision(field, given.upper(), "given", source="user")
        return vllm_backend(scenario.shape, scenario.chip)
    if scenario.model_gaps():
        return Decision(field, "none", "headrace cannot serve the model yet")
    start = EngineConfig(
        tensor_parallel_size=tp,
        block_size=scenario.block_size,
        dtype=scenario.dtype.value,
        kv_cache_dtype=scenario.kv_cache.value,
    )
    specs = start_specs(start, served_config(scenario.config.config), scenario.chip.device_type)
    return backend_decision(select_backend(specs, given), given)


def _block_size(scenario: Scenario, backend: Decision) -> Decision:
    if scenario.request.block_size is not None:
        return Decision("block_size", scenario.block_size, "given", source="user")
    sparse = backend.value == "ROCM_AITER_MLA_SPARSE"
    return Decision(
        "block_size", scenario.block_size, "what the sparse backend takes" if sparse else WORDS.defaults["block_size"]
    )


def _model_length(scenario: Scenario, length: int) -> Decision:
    field, context = "max_model_len", scenario.shape.spec.max_position_embeddings
    if scenario.request.max_model_len is not None:
        return Decision(field, length, "given", source="user")
    if length < context:
        return Decision(field, length, "what the KV cache has room for", f"{context}, the model's")
    why = "the model's context: the cache holds such a sequence, and nothing is set aside for it"
    return Decision(field, length, why)


def guessing_gain(scenario: Scenario, best: Candidate) -> str:
    """Say what guessing tokens is expected to give beside the prediction, which leaves it out."""
    found = asked_costs(scenario.request.speculative_config, best.deployment, scenario.dtype.value)
    if found is None or scenario.engine != "headrace":
        return "not predicted: how many guesses are right depends on the traffic"
    costs, lengths = found
    return costs.describe(best.workload.input_len + best.workload.output_len / 2, lengths)


def _speculation(scenario: Scenario, best: Candidate) -> Decision:
    field, given = "speculative_config", scenario.request.speculative_config
    if given:
        return Decision(field, json.dumps(given), f"given; {guessing_gain(scenario, best)}", source="user")
    if scenario.engine == "headrace":
        return Decision(field, "off", "nobody asked for it", "ngram, where answers repeat parts of prompts")
    why = "how many draft tokens are accepted depends on the traffic"
    if scenario.shape.spec.draft_weights:
        other = "the checkpoint's own next-token layers with 1 token, below some 32 requests"
        return Decision(field, "off", f"{why}, and many requests at once make it a loss", other)
    return Decision(field, "off", f"the checkpoint brings no draft, and {why}")
