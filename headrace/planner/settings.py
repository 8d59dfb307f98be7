"""Every setting as a decision: what it is, why, and what came second; of a start, and of the layout that a plan chose.

What holds because nothing spoke against it is said here for both. Measures nothing and ranks nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from headrace.config import EngineConfig
from headrace.graph_sizes import capture_sizes
from headrace.planner.chips import Chip
from headrace.planner.engines import GRAPHS_OF, attention_backend
from headrace.planner.graphs import decide_graphs
from headrace.planner.layouts import MANY_REQUESTS, ULTRA_SPARSE
from headrace.planner.plan_request import PlanRequest
from headrace.planner.record import Decision
from headrace.planner.search import FIRST_TOKEN_MS, READING_PACE_MS, Candidate, Found, Terms, score
from headrace.planner.shapes import ModelShape

CUSTOM_ALL_REDUCE_MIB = 8
"""Largest sum that vLLM's own kernels for linked GPUs take; larger ones go to NCCL or RCCL."""
PACE = f"{READING_PACE_MS:.0f} ms a token after {FIRST_TOKEN_MS / 1000:.0f} s"
ORDER = (
    "device", "tensor_parallel_size", "attention_backend", "dtype", "quantization", "kv_cache_dtype", "block_size",
    "num_gpu_blocks", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "mixed_step_tokens", "enable_chunked_prefill", "enable_prefix_caching", "async_scheduling", "cudagraph_mode",
    "cudagraph_capture_sizes",
)  # fmt: skip
"""as `headrace plan` lists them; others come after these"""
WHY = {
    "block_size": "little is left over in last blocks; speed hardly depends on it",
    "gpu_memory_utilization": "weights, steps, graphs and cache together; the rest is for others and for surprises",
    "enable_chunked_prefill": "a long prompt delays running requests by one step at most",
    "enable_prefix_caching": "prompts that start alike share blocks; a miss costs nothing",
    "async_scheduling": "the host plans a step while the one before it runs",
}
"""of what stands where nobody asks for another value"""
WANTED = {
    "latency": "the shortest answer",
    "interactive": "the most tokens at a reading pace",
    "throughput": "the most tokens",
}


def one_list(config: EngineConfig, decisions: Iterable[Decision]) -> list[Decision]:
    """Each field once, with its last word, and those that nobody decided on filled in."""
    found = {entry.field: entry for entry in decisions}
    size = config.tensor_parallel_size
    if size == 1:
        why, source = "what is used where nothing else is given; `headrace plan` compares", "derived"
    else:
        why, source = "given", "user"
    unsaid = [Decision("tensor_parallel_size", size, why, source=source), *standing(config)]
    if config.quantization is None:
        unsaid.append(Decision("quantization", None, "weights stay as the checkpoint holds them"))
    for entry in unsaid:
        found.setdefault(entry.field, entry)
    place = {name: number for number, name in enumerate(ORDER)}
    return sorted(found.values(), key=lambda entry: place.get(entry.field, len(place)))


def standing(config: EngineConfig) -> Iterator[Decision]:
    """What nobody decided on, from a config whose graphs are settled: as usual, or given."""
    usual = EngineConfig()
    for name, why in WHY.items():
        value = getattr(config, name)
        if name == "gpu_memory_utilization" and config.device == "cpu":
            why = "a CPU's memory belongs to everybody; it bounds nothing here"
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


def parallel_decisions(terms: Terms, found: Found) -> list[Decision]:
    """How the GPUs are used."""
    best, request, shape, chip = found.best, terms.request, terms.shape, terms.chip
    parallel = best.parallel
    rival = next((other for other in found.ranked[1:]), None)
    runner_up = "" if rival is None else f"{rival.name}: {summary(rival)}"
    why = _why_layout(terms, found)

    def settle(field: str, value: Any, reason: str, runner_up: str = "", given: Any = None) -> Decision:
        if given is not None:
            return Decision(field, value, "given", source="user")
        return Decision(field, value, reason, runner_up)

    stages = (
        f"{parallel.pp} stages: the layers do not fit into {parallel.tp} GPUs"
        if parallel.pp > 1
        else "the layers fit without stages, which would wait for each other"
    )
    size = parallel.tp * parallel.pp * (parallel.dp if parallel.dp_attention else 1)
    replicas = min(parallel.replicas, max(1, chip.gpus_per_node // size))
    idle = terms.num_gpus - parallel.gpus
    each = f"each takes {size} GPU{'s' if size > 1 else ''}" + (
        f"; {idle} of {terms.num_gpus} stay idle" if idle else ""
    )
    return [
        settle("tensor_parallel_size", parallel.tp, why, runner_up, request.tensor_parallel_size),
        settle("pipeline_parallel_size", parallel.pp, stages, "", request.pipeline_parallel_size),
        settle("data_parallel_size", parallel.dp, _why_data(terms, best), "", request.data_parallel_size),
        settle(
            "enable_expert_parallel",
            parallel.ep,
            _why_experts(shape, best),
            _other(found, "ep"),
            request.enable_expert_parallel,
        ),
        settle(
            "enable_dp_attention",
            parallel.dp_attention,
            _why_attention(terms, best),
            _other(found, "dp_attention"),
            request.enable_dp_attention,
        ),
        Decision("replicas_per_node", replicas, each),
        all_reduce(terms, best),
    ]


def summary(candidate: Candidate) -> str:
    prediction = candidate.prediction
    return f"{prediction.itl_ms:.1f} ms a token, {prediction.output_tok_s:,.0f} tok/s"


def _why_layout(terms: Terms, found: Found) -> str:
    best, count = found.best, len(found.ranked)
    said = f"{best.name}, {summary(best)}"
    if count == 1:
        return f"the one layout that runs: {said}"
    objective = terms.request.objective
    if objective == "interactive" and score(objective, best.prediction) < 0:
        return f"of {count} layouts, none of which keeps to {PACE}, the nearest: {said}"
    wanted = WANTED[objective]
    if max(score(objective, other.prediction) for other in found.ranked[1:]) > score(objective, best.prediction):
        return f"the simplest of those that give about {wanted}, of {count} layouts: {said}"
    return f"{wanted} of {count} layouts: {said}"


def _why_data(terms: Terms, best: Candidate) -> str:
    parallel = best.parallel
    if parallel.dp_attention:
        return "each rank keeps the cache of its own requests; all share the experts"
    if parallel.dp == 1:
        return "one GPU" if parallel.gpus == 1 else "all GPUs work on each token"
    return f"{parallel.dp} copies that never wait for each other"


def _why_experts(shape: ModelShape, best: Candidate) -> str:
    if not shape.is_moe:
        return "a dense model has no experts"
    if best.parallel.ep:
        return "whole experts on each GPU: larger products, and tokens travel to them"
    sparse = [group.feed_forward for group in shape.groups if group.feed_forward.num_experts]
    shares = [block.experts_per_token / block.num_experts for block in sparse]
    if min(shares) < ULTRA_SPARSE:
        return f"a token uses {min(shares):.2%} of the experts: whole ones would leave most GPUs idle"
    if best.parallel.expert_gpus == 1:
        return "one GPU holds all experts"
    return "slices of every expert keep all GPUs equally busy"


def _why_attention(terms: Terms, best: Candidate) -> str:
    shape, parallel = terms.shape, best.parallel
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
        return f"for {over:.0f} requests (below {MANY_REQUESTS}) copies of the latent cost less than ranks of their own"
    return "predicted to be slower here"


def _other(found: Found, name: str) -> str:
    """The best layout that differs in this."""
    chosen = getattr(found.best.parallel, name)
    other = next((entry for entry in found.ranked if getattr(entry.parallel, name) != chosen), None)
    return "" if other is None else f"{other.name}: {summary(other)}"


def all_reduce(terms: Terms, best: Candidate) -> Decision:
    parallel, field = best.parallel, "all_reduce"
    if parallel.dp_attention and parallel.tp == 1:
        value = "gather and scatter" if terms.engine == "vllm" else "none yet"
        return Decision(field, value, "ranks of attention sum nothing; tokens travel to the experts and back")
    if parallel.tp == 1:
        return Decision(field, "none", "each layer is on one GPU: there is nothing to sum, and nothing to quantize")
    name = "RCCL" if terms.chip.vendor == "amd" else "NCCL"
    if terms.chip.vendor == "cpu":
        return Decision(field, "gloo", "the CPU's")
    if terms.engine == "headrace":
        return Decision(field, name, "what headrace has; kernels of its own for small sums are to come")
    width = 2 * terms.shape.spec.hidden_size
    decode = best.limits.max_num_seqs * width / 2**20
    step = best.limits.max_num_batched_tokens * width / 2**20
    value = f"own kernel, {name} above {CUSTOM_ALL_REDUCE_MIB} MiB"
    reason = f"decode steps sum up to {decode:.1f} MiB, the largest step {step:.0f} MiB"
    if terms.request.disable_custom_all_reduce:
        return Decision(field, name, "given", value, source="user")
    if terms.chip.vendor == "amd":
        return Decision(field, value, reason, "Quick Reduce INT8 for large steps: faster prompts, rounded sums")
    return Decision(field, value, reason)


def engine_decisions(terms: Terms, best: Candidate, dtype: str) -> list[Decision]:
    """Attention, cache, scheduler and graphs. Raises ConfigError for a backend that cannot serve."""
    request = terms.request
    backend = attention_backend(
        terms.engine, terms.shape, terms.chip, best.parallel.tp, dtype, terms.kv_dtype, terms.block_size,
        request.attention_backend,
    )  # fmt: skip
    decisions = [backend, _block_size(terms, backend), _model_length(terms, best)]
    decisions += [best.decisions[name] for name in ("max_num_seqs", "max_num_batched_tokens")]
    if "mixed_step_tokens" in best.decisions:
        decisions.append(best.decisions["mixed_step_tokens"])
    graphs = graph_decision(request, terms.chip, str(backend.value), terms.engine)
    config = EngineConfig(
        device="cpu" if terms.chip.vendor == "cpu" else "cuda",
        max_num_seqs=best.limits.max_num_seqs,
        compilation_config=request.compilation_config | {"cudagraph_mode": graphs.value},
        enable_chunked_prefill=request.enable_chunked_prefill,
        async_scheduling=request.async_scheduling,
        gpu_memory_utilization=request.gpu_memory_utilization,
    )
    stands = {entry.field: entry for entry in standing(config)}
    decisions += [stands["enable_chunked_prefill"], graphs, stands["cudagraph_capture_sizes"]]
    return [*decisions, stands["async_scheduling"], _speculation(terms), stands["gpu_memory_utilization"]]


def graph_decision(request: PlanRequest, chip: Chip, backend: str, engine: str) -> Decision:
    """cudagraph_mode, by the rules that serving itself follows."""
    config = EngineConfig(compilation_config=request.compilation_config, enforce_eager=request.enforce_eager)
    device = "cpu" if chip.vendor == "cpu" else "cuda"
    return decide_graphs(config, device, backend, GRAPHS_OF.get(backend, "decode"))[1][0]


def _block_size(terms: Terms, backend: Decision) -> Decision:
    if terms.request.block_size is not None:
        return Decision("block_size", terms.block_size, "given", source="user")
    if backend.value == "ROCM_AITER_MLA_SPARSE":
        return Decision("block_size", terms.block_size, "what the sparse backend takes")
    return Decision("block_size", terms.block_size, WHY["block_size"])


def _model_length(terms: Terms, best: Candidate) -> Decision:
    if terms.request.max_model_len is not None:
        return Decision("max_model_len", best.max_model_len, "given", source="user")
    context = terms.shape.spec.max_position_embeddings
    if best.max_model_len < context:
        return Decision(
            "max_model_len", best.max_model_len, "what the KV cache has room for", f"{context}, the model's"
        )
    why = "the model's context: the cache holds such a sequence, and nothing is set aside for it"
    return Decision("max_model_len", best.max_model_len, why)


def _speculation(terms: Terms) -> Decision:
    field, drafts = "speculative_config", terms.shape.spec.draft_weights
    if terms.request.speculative_config:
        return Decision(field, json.dumps(terms.request.speculative_config), "given; not predicted", source="user")
    if terms.engine == "headrace":
        return Decision(field, "off", "headrace does not speculate yet")
    why = "how many guesses are right is known from traffic alone"
    if drafts:
        other = "the checkpoint's own next-token layers with 1 token, below some 32 requests"
        return Decision(field, "off", f"{why}, and many requests at once make it a loss", other)
    return Decision(field, "off", f"the checkpoint brings no draft, and {why}")
