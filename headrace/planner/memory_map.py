"""Counts where one GPU's memory goes: weights by part, tables, the largest step, graphs, libraries, and the KV cache.

Everything is counted from shapes, on the fullest rank; what cannot be counted is a constant with its origin.
runner/profile.py measures the same parts on a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from headrace.cache_groups import CacheLayout, cache_layout
from headrace.config import GRAPH_MODES
from headrace.graph_sizes import GraphSettings
from headrace.kernels.attention_config import COPY_ENGINE_PREFILL, UNPACKED_BYTES
from headrace.kernels.latent_config import EXPANDED_BYTES, MOST_SCORES, SELECTING_NUMBERS
from headrace.mixers import LatentAttention, Mixer
from headrace.model_spec import ModelSpec
from headrace.planner.chips import GIB
from headrace.planner.deployment import Deployment
from headrace.planner.weights import adapter_bytes, head_bytes
from headrace.speculation import KEPT_TOKENS
from headrace.stages import WHOLE, Stage

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
"""Bytes outside torch's allocator: kernels, and libraries with a handle for each thread that compiles. NVIDIA:
headrace, the mean of what an H200 reported on 2026-11-21 (Llama-3.1-8B 1.17 GiB, Qwen3-30B-A3B 1.05); vLLM 0.26, what
explains the KV tokens of Llama-3.1-8B on an H200, 891,392. AMD, CPU: guesses, to be measured."""
WORKSPACE = {"nvidia": 32 << 20}
"""Bytes of cuBLAS on Hopper and Blackwell, which torch takes from its allocator for each stream that calls it, and
keeps. AMD's stands in LIBRARIES."""
FILTER_BINS, FILTER_GROUP = 4096, 128
"""as kernels/filter.py"""
COMMUNICATION = int(0.75 * GIB)
"""Bytes that NCCL or RCCL take of each GPU as soon as there are two; a guess, to be measured."""
VLLM_GRAPH_SIZES = 51
"""Sizes that vLLM captures: 1, 2, 4, every 8 to 256, every 16 to 512; each whole and piecewise."""
VLLM_GRAPH_LAYER = 96 << 10
"""Bytes of each layer and graph of vLLM's; together with LIBRARIES fitted on the KV tokens of Llama-3.1-8B."""
VLLM_EXPERT_BUFFERS = 3
"""vLLM keeps so many times what one layer's experts write; fitted on the KV tokens of Qwen3-30B-A3B on an H200."""
CPU_CACHE = 4 * GIB
"""Bytes of the cache on a CPU, whose memory is shared with others; or a quarter of what is left, if that is less."""


@dataclass(frozen=True)
class MemoryMap:
    """Holds the bytes of each part of one GPU's memory, the fullest of them."""

    total: int
    usable: int
    """the engine's share of it"""
    weights: dict[str, int]
    """by part: embedding, head, attention, dense, router, experts, norms, extra, draft"""
    tables: int
    """tokens and blocks of every row, and what else is allocated before there is a cache"""
    activations: int
    """the largest step, for as long as it runs"""
    graphs: int
    reserve: int
    """context, kernels, workspaces, communication"""
    kv_pool: int
    """what is left for the KV cache, at least 0"""
    layout: CacheLayout
    longest: int
    """tokens of the longest sequence asked for"""
    missing: int
    """bytes that are missing for one longest sequence; 0: it fits"""

    @property
    def fits(self) -> bool:
        return self.missing == 0

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds in sequences of `longest`."""
        return self.tokens_in(self.longest)

    @property
    def max_concurrency(self) -> float:
        """Longest sequences that the pool holds at once."""
        return self.kv_tokens / self.longest

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all layers, as long as no window has passed it."""
        return self.layout.bytes_per_token

    def tokens_in(self, length: int) -> int:
        """Count the tokens that the pool holds in sequences of `length`, in whole blocks; 0 where nothing is cached.

        What windows have passed is given back, so longer sequences may hold more.
        """
        if not self.layout.groups:
            return 0
        size = self.layout.block_size
        return self.layout.tokens_in(self.kv_pool // self.layout.page_bytes, length) // size * size

    def parts(self) -> dict[str, int]:
        """The parts as the plan's table shows them; they add up to `usable` where it fits."""
        weights = {f"weights: {name}": size for name, size in self.weights.items() if size}
        return {
            **weights,
            "tables": self.tables,
            "activations": self.activations,
            "graphs": self.graphs,
            "libraries": self.reserve,
            "KV cache": self.kv_pool,
        }


def memory_map(
    deployment: Deployment,
    *,
    max_num_seqs: int = 1024,
    max_num_batched_tokens: int = 8192,
    max_model_len: int | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    graph_mode: str = "FULL_AND_PIECEWISE",
    speculates: bool = False,
    decode_lens: tuple[int, ...] = (1,),
    adapters: tuple[int, int, bool] = (0, 0, False),
) -> MemoryMap:
    """Map one GPU's memory. Limits, and the tokens that the cache holds, are those of one replica or data-parallel
    rank. `speculates`: layers of the checkpoint that predict further tokens are loaded. `decode_lens`: the numbers of
    tokens that a running request may have in a step, guesses included. `adapters`: slots, the rank of each,
    and whether they may change experts.

    Of pipeline stages it is the map of the one whose cache holds least. Never fails: what does not fit says by how
    much (`missing`), and a split that leaves a remainder is rounded up.
    """
    stages = (
        [WHOLE]
        if deployment.parallel.pp == 1
        else [Stage(number, deployment.partition) for number in range(deployment.parallel.pp)]
    )
    maps = [
        _map_of_stage(
            deployment, stage, max_num_seqs, max_num_batched_tokens,
            max_model_len or deployment.shape.spec.max_position_embeddings, gpu_memory_utilization, block_size,
            graph_mode, speculates, decode_lens, adapters,
        )
        for stage in stages
    ]  # fmt: skip
    return min(maps, key=lambda one: (-one.missing, one.kv_pool / one.layout.page_bytes))


def _map_of_stage(
    deployment: Deployment,
    stage: Stage,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    longest: int,
    gpu_memory_utilization: float,
    block_size: int,
    graph_mode: str,
    speculates: bool,
    decode_lens: tuple[int, ...],
    adapters: tuple[int, int, bool],
) -> MemoryMap:
    """Map the memory of a GPU of one stage."""
    shape, chip, parallel, engine = deployment.shape, deployment.chip, deployment.parallel, deployment.engine
    on_cpu = chip.vendor == "cpu"
    spec = stage.of(shape.spec)
    weights = _weights(deployment, spec, speculates)
    draft, most_drafts, hidden_states = deployment.of_draft, max(decode_lens) - 1, 0
    cached, of_stage = shape.spec.keeping(max(decode_lens)), stage
    if draft is not None:  # its layers are behind the model's own, on the last stage
        layers = draft.shape.spec.layers
        cached = replace(cached, layers=(*cached.layers, *layers))
        if not stage.is_only:
            of_stage = replace(stage, partition=(*stage.partition[:-1], stage.partition[-1] + len(layers)))
        weights["draft"] = sum(_weights(draft, draft.shape.spec, False).values())
        if (head := draft.shape.spec.head) is not None and not draft.shape.spec.has_embedding:
            weights["draft"] += math.ceil((head.weights - head.layer.weights) * draft.shape.plain_bytes)
            read = (max_num_batched_tokens + KEPT_TOKENS) * (len(head.taps) or 1) * head.hidden_size
            hidden_states = math.ceil(read * draft.shape.plain_bytes)
    kv_dtype_bytes = math.ceil(deployment.kv_dtype_bytes)
    layout = cache_layout(cached, parallel.tp, kv_dtype_bytes, block_size, of_stage)
    places = longest + most_drafts
    tokens_of_row = places + 1 + (most_drafts > 0) if engine == "headrace" else 0  # vLLM keeps them on the host
    tables = hidden_states + (max_num_seqs + 1) * 4 * (tokens_of_row + math.ceil(places / block_size))
    tables += adapter_bytes(spec, parallel, *adapters, shape.plain_bytes)
    if engine == "headrace":
        angles = _angles(spec, longest + max(decode_lens))
        tables += angles + _beside_rows(deployment, graph_mode) + 2 * layout.page_bytes  # one page, and padding's
        if not spec.has_embedding:  # hidden states come in from the stage before
            tables += max_num_batched_tokens * spec.hidden_size * shape.plain_bytes
    step = _step_bytes(deployment, max_num_batched_tokens, max_num_seqs * max(decode_lens), samples=spec.has_end)
    if draft is not None:
        tables += _angles(draft.shape.spec, longest + max(decode_lens))
        step = max(step, _step_bytes(draft, max_num_batched_tokens, max_num_seqs, samples=True))
    graphs = 0
    if engine == "vllm" and not on_cpu:
        kinds = len(set(GRAPH_MODES[graph_mode]) - {"none"})
        graphs = kinds * VLLM_GRAPH_SIZES * len(spec.layers) * VLLM_GRAPH_LAYER
    elif not on_cpu:
        graphs = _graph_bytes(
            deployment, len(spec.layers), graph_mode, max_num_seqs, max_num_batched_tokens, longest, decode_lens
        )
    communicates = parallel.gpus > parallel.replicas and not on_cpu
    reserve = LIBRARIES[chip.vendor, engine] + (COMMUNICATION if communicates else 0)
    usable = chip.memory_bytes if on_cpu else int(chip.memory_bytes * gpu_memory_utilization)
    left = usable - sum(weights.values()) - tables - step - graphs - reserve
    pool = max(0, min(CPU_CACHE, left // 4)) // parallel.tp if on_cpu else max(0, left)
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
        longest=longest,
        missing=max(0, needed - (left if left < 0 else pool)),
    )


def _weights(deployment: Deployment, spec: ModelSpec, speculates: bool) -> dict[str, int]:
    shape, parallel, form = deployment.shape, deployment.parallel, deployment.weight_format
    plain, tp = shape.plain_bytes, parallel.tp
    rows = math.ceil(spec.vocab_size / (VOCAB_ALIGNMENT * tp)) * VOCAB_ALIGNMENT
    tied = not shape.head_weights
    ends = dict.fromkeys(("embedding", "head"), 0)
    if spec.has_embedding or (spec.has_end and tied):
        ends["embedding"] = rows * spec.hidden_size * plain
    if spec.has_end and not tied:
        ends["head"] = math.ceil(head_bytes(shape, rows, form, deployment.holds_on)) + spec.head_bias * rows * plain
    sums = dict.fromkeys(("attention", "dense", "router", "experts", "norms"), 0.0)
    of_layer = {group.layer: sizes for group, sizes in zip(shape.groups, deployment.layer_bytes, strict=True)}
    for layer, count in spec.groups:
        for part, size in of_layer[layer].items():
            sums[part] += count * size
    if spec.has_end:
        sums["norms"] += sum(one.plain_bytes(plain) for one in spec.norm_parameters)
    loads_vision = deployment.holds_on is None  # as vLLM does; headrace skips it
    sums["extra"] = spec.vision_weights * plain / tp if loads_vision else 0.0
    if speculates:
        sums["extra"] += spec.draft_weights * shape.bytes_per_weight(form) / parallel.expert_gpus
    return {**ends, **{name: math.ceil(size) for name, size in sums.items()}}


def _beside_rows(deployment: Deployment, graph_mode: str) -> int:
    """Bytes of headrace's tables beside rows and angles: cuBLAS's workspace, where a prompt's share of an fp8 cache is
    unpacked to, for a kernel that only Hopper has (kernels/prefill.py), and where latents are projected to
    (kernels/latent_prompt.py).

    A router calls cuBLAS in the small graphs that a start checks, too, on a stream of their own; dense layers have
    kernels of ours for so few tokens.
    """
    shape, chip = deployment.shape, deployment.chip
    mixers = [group.mixer for group in shape.groups]
    streams = 2 if shape.is_moe and graph_mode != "NONE" else 1
    unpacks = any(
        mixer.kind != "mla" and mixer.window is None and mixer.head_dim in COPY_ENGINE_PREFILL for mixer in mixers
    )
    unpacked = UNPACKED_BYTES if unpacks and chip.arch == "sm_90" and deployment.kv_dtype_bytes == 1 else 0
    expands = chip.vendor != "cpu" and any(mixer.kind == "mla" for mixer in mixers)
    expanded = EXPANDED_BYTES if expands else 0
    return streams * WORKSPACE.get(chip.vendor, 0) + unpacked + expanded


def _angles(spec: ModelSpec, longest: int) -> int:
    """Bytes of the cosines and sines of every position, up to the `longest` that rows have, in fp32."""
    positions = min(longest, spec.max_position_embeddings)
    return 4 * positions * sum(turns.numbers for turns in spec.turns)


def _step_bytes(deployment: Deployment, tokens: int, seqs: int, samples: bool) -> int:
    """The most that a step of `tokens` tokens holds at once: in the widest layer, or where it samples `seqs` times.
    vLLM keeps the residual beside the hidden states, and logits in fp32 and twice over."""
    shape, parallel, ours = deployment.shape, deployment.parallel, deployment.engine == "headrace"
    plain, tp, hidden, vocab = shape.plain_bytes, parallel.tp, shape.spec.hidden_size, shape.spec.vocab_size
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
        widest = max(widest, 2 * hidden + shared)  # ours: the hidden states, and normed
        if mlp.num_experts:
            width = mlp.expert_intermediate_size / (1 if parallel.ep else parallel.expert_gpus)
            pairs = mlp.experts_per_token / (parallel.expert_gpus if parallel.ep and not parallel.dp_attention else 1)
            if ours:  # router's logits, both products of every pair, sums of shared experts and for other ranks
                sums = hidden * ((mlp.intermediate_size > 0) + (tp > 1))
                chosen = mlp.num_experts + pairs * (width + hidden) + sums
                if parallel.dp_attention:  # of the tokens of all, which are there too
                    chosen = parallel.dp * (chosen + hidden)
            else:
                chosen = hidden + pairs * VLLM_EXPERT_BUFFERS * (3 * width + hidden) + shared
            widest = max(widest, 2 * hidden + chosen)
    longest = shape.spec.max_position_embeddings
    most = tokens * widest * plain + max(_index_bytes(group.mixer, tokens, longest) for group in shape.groups)
    if samples and ours:  # hidden states; logits, fp32 for as many, extremes of groups, counts and weights of bins
        row = vocab * (plain + 4) + math.ceil(vocab / FILTER_GROUP) * 2 * 4 + FILTER_BINS * (4 + 8)
        most = max(most, tokens * hidden * plain + seqs * row)
    elif samples:
        gathered = plain / tp if tp > 1 else 0
        most = max(most, 3 * tokens * hidden * plain + seqs * vocab * (plain + 8 + gathered))
    return math.ceil(most)


def _index_bytes(mixer: Mixer, tokens: int, longest: int) -> float:
    """What an index holds beside a layer's own numbers: the keys it chose for each token, and scores while it chooses
    (layers/indexer.py)."""
    if not isinstance(mixer, LatentAttention) or not mixer.index_heads:
        return 0
    scores = min(MOST_SCORES, tokens * longest)
    return 4 * (tokens * (mixer.sparse_top_k or 0) + scores + scores * SELECTING_NUMBERS)


def _graph_bytes(
    deployment: Deployment, num_layers: int, mode: str, seqs: int, tokens: int, longest: int,
    decode_lens: tuple[int, ...],
) -> int:  # fmt: skip
    """Bytes of headrace's graphs, if all come up: what runner/profile.py expects."""
    most_in_pieces = deployment.shape.most_in_pieces(deployment.weight_format, deployment.parallel.tp)
    settings = GraphSettings.of({"cudagraph_mode": mode}, seqs, tokens, longest, most_in_pieces, decode_lens)
    if settings is None:
        return 0
    return _step_bytes(deployment, settings.most_tokens, seqs, samples=False) + settings.bytes_beside_pool(num_layers)
