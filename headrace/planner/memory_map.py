"""Where one GPU's memory goes: weights by part, tables, the largest step, graphs, libraries, and the KV cache.

Counted from shapes alone, on the fullest rank; `runner/profile.py` measures the same parts on a device, under the names
that `MemoryMap` repeats (standing, step, graphs, outside, left). What cannot be counted is a constant with its origin.
Knows nothing of speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.cache_groups import CacheLayout, cache_layout
from headrace.config import GRAPH_MODES
from headrace.kernels.attention_config import COPY_ENGINE_PREFILL, UNPACKED_BYTES
from headrace.model_spec import Mixer, Parameter
from headrace.planner.chips import GIB, Chip
from headrace.planner.cost import Parallel
from headrace.planner.shapes import LayerGroup, ModelShape
from headrace.runner.graph_settings import GraphSettings

VOCAB_ALIGNMENT = 64
"""as layers/embedding.py"""
LIBRARIES = {
    ("nvidia", "headrace"): int(1.11 * GIB),
    ("nvidia", "vllm"): int(0.20 * GIB),
    ("amd", "headrace"): int(1.20 * GIB),
    ("amd", "vllm"): int(1.00 * GIB),
    ("cpu", "headrace"): int(0.50 * GIB),
    ("cpu", "vllm"): int(0.50 * GIB),
}
"""Beside torch's allocator: kernels, and libraries with a handle for each thread that compiles. NVIDIA: headrace, the
mean of what an H200 reported on 2026-11-21 (Llama-3.1-8B 1.17 GiB, Qwen3-30B-A3B 1.05); vLLM 0.26, what is missing to
the KV tokens of Llama-3.1-8B on an H200, 891,392. AMD, CPU: guesses, to be measured."""
WORKSPACE = {"nvidia": 32 << 20}
"""Of cuBLAS on Hopper and Blackwell, which torch takes from its allocator for each stream that calls it, and keeps.
AMD's stands in LIBRARIES."""
FILTER_BINS, FILTER_GROUP = 4096, 128
"""as kernels/filter.py"""
COMMUNICATION = int(0.75 * GIB)
"""What NCCL or RCCL take of each GPU as soon as there are two; a guess, to be measured"""
VLLM_GRAPH_SIZES = 51
"""1, 2, 4, every 8 to 256, every 16 to 512; each in whole and in pieces"""
VLLM_GRAPH_LAYER = 96 << 10
"""of each layer and graph of vLLM's; together with LIBRARIES fitted on the KV tokens of Llama-3.1-8B"""
VLLM_EXPERT_BUFFERS = 3
"""vLLM keeps so many times what one layer's experts write; fitted on the KV tokens of Qwen3-30B-A3B on an H200"""
CPU_CACHE = 4 * GIB
"""A CPU's memory is everybody's: the cache takes this, or a quarter of what is left (planner/decisions.py)"""


@dataclass(frozen=True)
class MemoryMap:
    """Bytes on one GPU, the fullest of them."""

    total: int
    usable: int
    """the engine's share of it"""
    weights: dict[str, int]
    """by part: embedding, head, attention, dense, router, experts, norms, extra"""
    tables: int
    """tokens and blocks of every row, and what else stands before there is a cache"""
    activations: int
    """the largest step, for as long as it runs"""
    graphs: int
    reserve: int
    """context, kernels, workspaces, communication"""
    kv_pool: int
    """what is left for the KV cache, 0 at least"""
    layout: CacheLayout
    kv_tokens: int
    """that the pool holds in sequences of `longest`, in whole blocks: what windows have passed goes back"""
    longest: int
    """tokens of the longest sequence asked for"""
    missing: int
    """bytes that lack for one longest sequence; 0: it fits"""

    @property
    def fits(self) -> bool:
        return self.missing == 0

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def max_concurrency(self) -> float:
        """longest sequences that the pool holds at once"""
        return self.kv_tokens / self.longest

    @property
    def kv_bytes_per_token(self) -> int:
        """in all layers, as long as no window has passed it"""
        return self.layout.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """of a sequence, however long it is: recurrent states"""
        return sum(group.block_bytes for group in self.layout.groups if group.is_state)

    def tokens_in(self, length: int) -> int:
        """that the pool holds in sequences of `length`, in whole blocks"""
        return _tokens_in(self.layout, self.kv_pool, length)

    def parts(self) -> dict[str, int]:
        """What adds up to `usable` where it fits, as the plan's table shows it."""
        weights = {f"weights: {name}": size for name, size in self.weights.items() if size}
        return {
            **weights,
            "tables": self.tables,
            "activations": self.activations,
            "graphs": self.graphs,
            "libraries": self.reserve,
            "KV cache": self.kv_pool,
        }

    # runner/profile.py's names
    @property
    def standing(self) -> int:
        return self.weight_bytes + self.tables

    @property
    def step(self) -> int:
        return self.activations

    @property
    def outside(self) -> int:
        return self.reserve

    @property
    def left(self) -> int:
        return self.kv_pool


@dataclass(frozen=True)
class LayerBytes:
    """One layer's weights on one GPU."""

    attention: float
    dense: float
    """dense MLP and shared experts"""
    router: float
    expert: float
    """one of the experts that the GPU holds, or its slice of one"""
    experts_here: int
    norms: float

    @property
    def total(self) -> float:
        return self.attention + self.dense + self.router + self.expert * self.experts_here + self.norms


def layer_bytes(shape: ModelShape, group: LayerGroup, parallel: Parallel, weight_format: str) -> LayerBytes:
    """What one GPU holds of a layer of `group` when its linears are in `weight_format`."""
    plain, tp = shape.plain_bytes, parallel.tp
    held, parts = shape.format_of(weight_format), shape.parts_in(weight_format)

    def size(part: str, parameter: Parameter) -> float:
        formatted = part in parts and parameter.kind == "linear"
        return held.num_bytes(*parameter.shape) if formatted else parameter.size * plain

    feed_forward, shares = group.feed_forward, mixer_shares(group.mixer, tp)
    expert, experts = sum(size("experts", one) for one in feed_forward.expert_parameters), feed_forward.num_experts
    if parallel.ep:
        experts = math.ceil(experts / parallel.expert_gpus)
    else:
        expert /= parallel.expert_gpus
    return LayerBytes(
        attention=sum(size("attention", one) * shares[one.split] for one in group.mixer.parameters),
        dense=sum(size("dense", one) for one in feed_forward.parameters if one.kind != "router") / tp,
        router=group.router_weights * plain,
        expert=expert,
        experts_here=experts,
        norms=group.layer.norm_weights * plain,
    )


def mixer_shares(mixer: Mixer, tp: int) -> dict[str, float]:
    """What one of `tp` ranks holds of a mixer's parameters, by how they are split."""
    heads = math.ceil(mixer.num_heads / tp) / mixer.num_heads
    return {"heads": heads, "kv_heads": mixer.cache_share(tp), "width": 1 / tp, "whole": 1.0}


def memory_map(
    shape: ModelShape,
    chip: Chip,
    parallel: Parallel,
    *,
    weight_format: str | None = None,
    kv_dtype_bytes: float = 2.0,
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    graph_mode: str = "FULL_AND_PIECEWISE",
    engine: str = "headrace",
    speculates: bool = False,
) -> MemoryMap:
    """The map of one GPU. `weight_format`: of the linears, default the checkpoint's; limits, and the tokens that the
    cache holds, are those of one replica or data-parallel rank; `speculates`: layers that predict further tokens are
    loaded.

    Nothing is refused: what does not fit says by how much (`missing`), a split that leaves a rest is rounded up.
    """
    form = weight_format or shape.weight_format
    longest = max_model_len or shape.spec.max_position_embeddings
    layers = _fullest_stage(shape, parallel, form)
    weights = _weights(shape, layers, parallel, form, speculates)
    tokens_of_row = longest + 1 if engine == "headrace" else 0  # vLLM keeps them on the host
    tables = (max_num_seqs + 1) * 4 * (tokens_of_row + math.ceil(longest / block_size))
    alike = tuple(group.layer for count, group in layers for _ in range(count))
    layout = cache_layout(replace(shape.spec, layers=alike), parallel.tp, math.ceil(kv_dtype_bytes), block_size)
    if engine == "headrace":
        tables += _beside_rows(shape, chip, graph_mode) + 2 * layout.page_bytes  # one page, and padding's
        tables += _unpacked(shape, chip) if kv_dtype_bytes == 1 else 0
    step = _step_bytes(shape, parallel, max_num_batched_tokens, max_num_seqs, engine, sampling=True)
    graphs = 0
    if chip.vendor != "cpu":
        num_layers = sum(count for count, _ in layers)
        limits = max_num_seqs, max_num_batched_tokens, longest
        graphs = _graph_bytes(shape, parallel, num_layers, graph_mode, *limits, engine, form)
    talks = parallel.gpus > parallel.replicas and chip.vendor != "cpu"
    reserve = LIBRARIES[chip.vendor, engine] + (COMMUNICATION if talks else 0)
    usable = int(chip.memory_bytes * gpu_memory_utilization) if chip.vendor != "cpu" else chip.memory_bytes
    left = usable - sum(weights.values()) - tables - step - graphs - reserve
    pool = max(0, left) if chip.vendor != "cpu" else max(0, min(CPU_CACHE, left // 4)) // parallel.tp
    needed = layout.pages_for(longest, max_num_batched_tokens) * layout.page_bytes
    return MemoryMap(
        total=chip.memory_bytes,
        usable=usable,
        weights=weights,
        tables=tables,
        activations=step,
        graphs=graphs,
        reserve=reserve,
        kv_pool=pool,
        layout=layout,
        kv_tokens=_tokens_in(layout, pool, longest),
        longest=longest,
        missing=max(0, needed - (left if left < 0 else pool)),
    )


def _tokens_in(layout: CacheLayout, pool: int, length: int) -> int:
    """that `pool` bytes hold in sequences of `length`, in whole blocks; 0 where nothing is cached"""
    if not layout.groups:
        return 0
    return layout.tokens_in(pool // layout.page_bytes, length) // layout.block_size * layout.block_size


def _beside_rows(shape: ModelShape, chip: Chip, graph_mode: str) -> int:
    """What stands beside weights and rows: cosines and sines of every position in fp32, and cuBLAS's workspace of the
    steps' stream. A router calls cuBLAS in the small graphs that a start checks, too, on a stream of their own; dense
    layers have kernels of ours for so few tokens."""
    angles = 4 * shape.spec.max_position_embeddings * max(group.mixer.head_dim for group in shape.groups)
    streams = 2 if shape.is_moe and graph_mode != "NONE" else 1
    return angles + streams * WORKSPACE.get(chip.vendor, 0)


def _unpacked(shape: ModelShape, chip: Chip) -> int:
    """Where prompts' share of an fp8 cache is unpacked to, for a kernel that only Hopper has (kernels/prefill.py)."""
    kinds = [group.mixer for group in shape.groups]
    served = any(kind.kind != "mla" and kind.window is None and kind.head_dim in COPY_ENGINE_PREFILL for kind in kinds)
    return UNPACKED_BYTES if served and chip.arch == "sm_90" else 0


def _fullest_stage(shape: ModelShape, parallel: Parallel, form: str) -> list[tuple[int, LayerGroup]]:
    """(how many layers, of which group) of the pipeline stage that weighs most: of the heaviest layers alone."""
    room = math.ceil(shape.num_layers / parallel.pp)
    found = []
    heaviest = sorted(shape.groups, key=lambda group: -layer_bytes(shape, group, parallel, form).total)
    for group in heaviest if parallel.pp > 1 else shape.groups:
        count = min(room, group.count)
        room -= count
        if count:
            found.append((count, group))
    return found


def _weights(
    shape: ModelShape,
    layers: list[tuple[int, LayerGroup]],
    parallel: Parallel,
    form: str,
    speculates: bool,
) -> dict[str, int]:
    plain = shape.plain_bytes
    tp = parallel.tp
    rows = math.ceil(shape.spec.vocab_size / (VOCAB_ALIGNMENT * tp)) * VOCAB_ALIGNMENT
    ends = {"embedding": rows * shape.spec.hidden_size * plain, "head": 0}
    if shape.head_weights:
        ends["head"] = ends["embedding"]
        if parallel.pp > 1:  # at opposite ends of the pipeline
            ends["embedding"] = 0
    sums = dict.fromkeys(("attention", "dense", "router", "experts", "norms"), 0.0)
    for count, group in layers:
        held = layer_bytes(shape, group, parallel, form)
        sums["attention"] += count * held.attention
        sums["dense"] += count * held.dense
        sums["router"] += count * held.router
        sums["experts"] += count * held.experts_here * held.expert
        sums["norms"] += count * held.norms
    sums["norms"] += shape.final_weights * plain
    vision = (shape.extra_weights - shape.spec.draft_weights) * plain / tp
    draft = shape.spec.draft_weights * shape.bytes_per_weight(form) / parallel.expert_gpus if speculates else 0
    return {**ends, **{name: math.ceil(size) for name, size in sums.items()}, "extra": math.ceil(vision + draft)}


def _step_bytes(shape: ModelShape, parallel: Parallel, tokens: int, seqs: int, engine: str, sampling: bool) -> int:
    """The most that a step of so many tokens holds at once: in the widest layer, or where it samples.

    vLLM keeps the residual beside the stream, and logits in fp32 and twice over.
    """
    plain = shape.plain_bytes
    tp, hidden, ours = parallel.tp, shape.spec.hidden_size, engine == "headrace"
    widest = 0.0
    for group in shape.groups:
        attention, mlp = group.mixer, group.feed_forward
        heads = math.ceil(attention.num_heads / tp)
        queries, values = heads * attention.head_dim, heads * attention.v_head_dim
        if attention.kind == "mla":  # prompts: keys and values of every head come out of the latent
            keys = queries + values + attention.cached_values
        else:
            keys = 2 * attention.head_dim * math.ceil(attention.num_kv_heads / tp)
        beside = queries if ours else hidden  # queries as rotated; the residual
        widest = max(widest, hidden + beside + queries + keys + values)
        shared = 3 * mlp.intermediate_size / tp  # gate, up and their product
        widest = max(widest, 2 * hidden + shared)  # ours: the stream, and normed
        if mlp.num_experts:
            width = mlp.expert_intermediate_size / (1 if parallel.ep else parallel.expert_gpus)
            pairs = mlp.experts_per_token / (parallel.expert_gpus if parallel.ep and not parallel.dp_attention else 1)
            if ours:  # router's logits, both products of every pair, sums of shared experts and for other ranks
                sums = hidden * ((mlp.intermediate_size > 0) + (tp > 1))
                chosen = mlp.num_experts + pairs * (width + hidden) + sums
            else:
                chosen = hidden + pairs * VLLM_EXPERT_BUFFERS * (3 * width + hidden) + shared
            widest = max(widest, 2 * hidden + chosen)
    most = tokens * widest * plain
    if sampling and ours:  # hidden states; logits, fp32 for as many, extremes of groups, counts and weights of bins
        groups = math.ceil(shape.spec.vocab_size / FILTER_GROUP)
        row = shape.spec.vocab_size * (plain + 4) + groups * 2 * 4 + FILTER_BINS * (4 + 8)
        most = max(most, tokens * hidden * plain + seqs * row)
    elif sampling:
        gathered = plain / tp if tp > 1 else 0
        most = max(most, 3 * tokens * hidden * plain + seqs * shape.spec.vocab_size * (plain + 8 + gathered))
    return math.ceil(most)


def _graph_bytes(
    shape: ModelShape,
    parallel: Parallel,
    num_layers: int,
    mode: str,
    seqs: int,
    tokens: int,
    longest: int,
    engine: str,
    form: str,
) -> int:
    """headrace: what runner/profile.py expects of graphs, if all come up."""
    if engine == "vllm":
        kinds = len(set(GRAPH_MODES[mode]) - {"none"})
        return kinds * VLLM_GRAPH_SIZES * num_layers * VLLM_GRAPH_LAYER
    most_in_pieces = shape.most_in_pieces(form, parallel.tp)
    settings = GraphSettings.of({"cudagraph_mode": mode}, seqs, tokens, longest, most_in_pieces)
    if settings is None:
        return 0
    pool = _step_bytes(shape, parallel, settings.most_tokens, seqs, engine, sampling=False)
    return pool + settings.bytes_beside(num_layers)
