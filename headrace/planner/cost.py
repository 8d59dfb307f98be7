"""Predicts how long one step takes, part by part: bytes of weights and cache, operations, collectives, launches, host.

The model is a roofline (Williams, Waterman, Patterson, 2009) with named efficiencies (constants.py). It knows shapes,
rates and numbers of tokens; requests and the passing of time are the business of predict.py and simulate.py.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from operator import mul, sub
from typing import NamedTuple

from headrace.feed_forwards import FeedForward
from headrace.kernels.gemm_config import BUCKETS
from headrace.mixers import STATE_BYTES, Mixer
from headrace.parameters import total
from headrace.planner.collectives import Links
from headrace.planner.constants import (
    GROUPED,
    NARROW,
    TILED,
    TILED_EXPERTS,
    TILED_READS,
    TRAITS,
    Efficiency,
    EngineTraits,
    find_efficiency,
    host_overlap,
)
from headrace.planner.deployment import Deployment
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import LayerGroup, ModelShape, rank_shares
from headrace.planner.weights import head_bytes, held_on, layer_bytes
from headrace.quantization.formats import PLAIN, WeightFormat
from headrace.quantization.resident import is_tiled
from headrace.step import SchedulerOutput

HEAD_KERNELS = 8
"""Kernels outside the layers: embedding, last norm, head, sampling, and what prepares the step."""
HEAD_BYTES = 12
"""Bytes that sampling moves for each entry of the vocabulary: 16-bit logits, a copy in fp32, a pass over it."""
PIECES = 3
"""Operations of a layer that the host starts in a step that is captured piecewise."""
FULL_GRAPH_OPERATIONS = 10
"""Operations that the host starts for a whole step that is one graph."""
TILES = (16, 64)
"""Fewest and most rows of a tile of the experts' products; in between, a tile has as many as an expert has."""


@dataclass(frozen=True)
class StepWork:
    """Counts what one step of the whole deployment computes; data-parallel ranks share it evenly."""

    decodes: float
    decode_context: float
    """keys that a decode reads, on average"""
    prefill_tokens: float = 0
    prefill_context: float = 0.0
    """keys that a prompt token sees, on average"""
    prompts: int = 0
    """prompts that the prompt tokens belong to; 0: one, if there are any tokens"""
    decode_len: float = 1
    """tokens of each decode: its last known one, and guesses behind it"""

    @classmethod
    def of(cls, step: SchedulerOutput) -> StepWork:
        """Count a scheduled step. Requests that run one token, or have guesses, are decodes; they come first in a step.

        An engine asks this of every step, so lists are summed by C code.
        """
        computed, counts = step.num_computed_tokens, step.num_scheduled_tokens
        known, guesses = counts, sum(step.num_drafts)
        if guesses:
            known = list(map(sub, counts, step.num_drafts))
        decodes = bisect_right(known, 1)
        context = sum(computed[:decodes]) / decodes + 1 if decodes else 0.0
        decode_len = 1 + guesses / decodes if guesses else 1
        if decodes == len(counts):
            return cls(decodes, context, decode_len=decode_len)
        chunks = counts[decodes:]
        tokens = sum(chunks)
        pairs = sum(map(mul, chunks, computed[decodes:])) + (sum(map(mul, chunks, chunks)) + tokens) / 2
        return cls(decodes, context, tokens, pairs / tokens, len(chunks), decode_len)

    def times(self, ranks: int) -> StepWork:
        """Return the work of `ranks` ranks that each do this."""
        if ranks == 1:
            return self
        return StepWork(
            self.decodes * ranks,
            self.decode_context,
            self.prefill_tokens * ranks,
            self.prefill_context,
            self.prompts * ranks,
            self.decode_len,
        )


@dataclass(frozen=True)
class StepCost:
    """Tells how long a step takes, and why."""

    seconds: float
    parts: dict[str, float]
    """seconds that each of PARTS would take alone; they overlap, so they need not add up to `seconds`"""

    @property
    def bound(self) -> str:
        """Name of the largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


PARTS = ("weights", "kv", "flops", "activations", "links", "launches", "host")


@lru_cache(maxsize=512)
def step_model(deployment: Deployment) -> StepModel:
    """Return the cost model of a deployment, with the constants of its chip and engine."""
    return StepModel(deployment, find_efficiency(deployment.chip, deployment.engine))


def distinct_experts(num_experts: int, experts_per_token: int, tokens: float) -> float:
    """Estimate how many different experts `tokens` tokens choose, where all experts are equally likely."""
    if not num_experts:
        return 0.0
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** tokens)


def _busiest(mean: float, groups: int) -> float:
    """The expected largest of `groups` random counts with this mean."""
    return mean + math.sqrt(2 * mean * math.log(groups))


class _Product(NamedTuple):
    """Holds what a product with some weights takes: seconds to read them, and seconds for each token."""

    read: float
    each: float
    tiled: bool = False
    """Kernels of ours widen the weights on the way to the matrix units."""
    widened: float = 0.0
    """seconds to write and read what is widened for many tokens"""

    def seconds(self, tokens: float) -> tuple[float, float]:
        """Return (seconds for bytes, seconds for operations)."""
        if not self.tiled:
            return self.read, tokens * self.each
        if tokens > BUCKETS[-1]:
            return self.read + self.widened, tokens * self.each
        rows = tokens if tokens <= 1 else max(tokens, TILES[0])
        return self.read / TILED_READS, rows * self.each / TILED

    def of_experts(self, experts: float, rows: float) -> tuple[float, float]:
        """Return the same for `rows` rows of tiles over so many experts."""
        if not self.tiled:
            return experts * self.read, rows * self.each
        return experts * self.read / TILED_READS, rows * self.each / TILED_EXPERTS


class _Layer:
    """The seconds that one layer of a group takes on one GPU, for each quantity that a step is counted in."""

    def __init__(self, group: LayerGroup, sizes: dict[str, float], model: StepModel) -> None:
        deployment, traits = model.deployment, model.traits
        shape, parallel, weight_format = deployment.shape, deployment.parallel, deployment.weight_format
        attention, mlp, tp = group.mixer, group.feed_forward, parallel.tp
        self.count, self.attention, self.mlp, self.parallel = group.count, attention, mlp, parallel

        def product(part: str, weights: float, num_bytes: float) -> _Product:
            held = shape.format_of(PLAIN.name) if part == "router" else shape.part_format(part, weight_format)
            if deployment.holds_on is not None:
                held = held_on(held, deployment.holds_on)
            grouped = GROUPED if part == "experts" else 1.0
            in_tiles = deployment.holds_on is not None and is_tiled(held, experts=part == "experts")
            plain = held.widened or in_tiles
            each = 2 * weights / (model.rate(PLAIN if plain else held) * grouped)
            if not in_tiles:
                return _Product(num_bytes / model.bandwidth, each)
            widened = 0.0 if part == "experts" else 2 * shape.plain_bytes * weights / model.bandwidth
            return _Product(num_bytes / model.bandwidth, each, True, widened)

        shares = rank_shares(attention, tp)
        counts = {
            "attention": sum(p.size * shares[p.split] for p in attention.parameters),
            "dense": total(mlp.parameters, "linear", "plain") / tp,
            "router": total(mlp.parameters, "router"),
        }
        self.linears = [product(part, count, sizes[part]) for part, count in counts.items()]
        whole = layer_bytes(shape, group, Parallel(), weight_format, deployment.holds_on)["experts"]
        self.expert = product("experts", group.layer.expert_weights, whole / max(1, mlp.num_experts))

        key_bytes = attention.cached_values * deployment.kv_dtype_bytes * attention.cache_share(tp)
        self.seconds_per_key = key_bytes / model.kv_bandwidth
        self.seconds_per_pair = attention.flops_per_pair / tp / model.attention_rate
        self.decode_seconds_per_pair = attention.decode_flops_per_pair / tp / model.attention_rate
        self.index_seconds_per_pair = attention.index_flops_per_pair / model.attention_rate
        # A decode reads its state and writes one for each of its tokens.
        self.state_seconds = STATE_BYTES * attention.state_values / tp / model.kv_bandwidth
        self.seconds_per_token = attention.flops_per_token / tp / model.attention_rate

        narrow = _rounds_activations(deployment)
        self.activation_seconds = _activation_bytes(group, shape, parallel, narrow) / model.bandwidth
        kernels = _kernels(attention, mlp, traits, narrow)
        self.launch_seconds = kernels * model.efficiency.kernel
        self.operations = kernels + (traits.expert_operations - traits.expert_kernels if mlp.num_experts else 0)

    def products(self, tokens: float, everywhere: float) -> list[tuple[float, float]]:
        """(Seconds for bytes, seconds for operations) of each product with weights, on the busiest GPU.

        `everywhere`: tokens of all GPUs that share the experts. With expert parallelism each of them holds some of the
        experts, without a slice of each.
        """
        products = [one.seconds(tokens) for one in self.linears]
        mlp, gpus = self.mlp, self.parallel.expert_gpus
        active = distinct_experts(mlp.num_experts, mlp.experts_per_token, everywhere)
        if active <= 0:
            return products
        rows, slices = everywhere * mlp.experts_per_token, gpus
        if self.parallel.ep and gpus > 1:
            here, slices = mlp.num_experts / gpus, 1
            active = min(here, _busiest(active / gpus, gpus))
            rows = min(max(rows / gpus, everywhere * min(mlp.experts_per_token, here)), _busiest(rows / gpus, gpus))
        tile = min(max(rows / active, TILES[0]), TILES[1])
        padded = rows + active * tile / 2
        read, compute = self.expert.of_experts(active, padded)
        return [*products, (read / slices, compute / slices)]

    def keys(self, context: float) -> tuple[float, float, float]:
        """Keys that a query with `context` keys before it attends to, keys that it reads, and keys that the layer's own
        index scores: it reads a part of each key that it may choose."""
        attention = self.attention
        seen = context if attention.window is None else min(context, attention.window)
        if attention.sparse_top_k is None or seen <= attention.sparse_top_k:
            return seen, seen, 0.0
        index = attention.index_dim / attention.cached_values
        return attention.sparse_top_k, attention.sparse_top_k + seen * index, seen * bool(index)


def _rounds_activations(deployment: Deployment) -> bool:
    """Tell whether the inputs of most linears are rounded."""
    held, chip = deployment.shape.format_of(deployment.weight_format), deployment.holds_on
    if chip is not None and (held_on(held, chip).widened or is_tiled(held, experts=False)):
        return False
    return bool(held.units)


def _activation_bytes(group: LayerGroup, shape: ModelShape, parallel: Parallel, narrow: bool) -> float:
    """Bytes that kernels between products read and write for one token: norms and residuals, rotary, activation,
    rounding, sums over experts, all in 16 bits."""
    attention, mlp, hidden = group.mixer, group.feed_forward, shape.spec.hidden_size
    heads = attention.num_heads * attention.head_dim
    inner = mlp.intermediate_size / parallel.tp
    inner += mlp.experts_per_token * mlp.expert_intermediate_size / parallel.expert_gpus
    values = 8 * hidden + 2 * (heads + 2 * attention.num_kv_heads * attention.head_dim) / parallel.tp + 3 * inner
    if mlp.num_experts:
        values += (mlp.experts_per_token + 1) * hidden
    if narrow:  # 16 bits in, 8 out, before the products that no norm precedes
        values += 1.5 * (heads / parallel.tp + inner)
    return 2 * values


def _kernels(attention: Mixer, mlp: FeedForward, traits: EngineTraits, narrow: bool) -> int:
    count = traits.attention_kernels + (traits.expert_kernels if mlp.num_experts else traits.dense_kernels)
    if attention.kind == "mla":
        count += traits.latent_kernels
    if attention.index_dim:
        count += traits.index_kernels
    if mlp.num_experts and mlp.intermediate_size:  # shared experts beside the routed ones
        count += traits.dense_kernels - 1
    return count + (2 if narrow else 0)  # activations are rounded in each half of the layer


class StepModel:
    """Predicts any step of one deployment; what is the same for all steps is computed once."""

    def __init__(self, deployment: Deployment, constants: Efficiency) -> None:
        chip, shape, tp = deployment.chip, deployment.shape, deployment.parallel.tp
        self.deployment, self.efficiency = deployment, constants
        self.traits = TRAITS[deployment.engine]
        self._host_overlap = host_overlap(chip, deployment.engine)
        self._graph_tokens = self.traits.graph_tokens or shape.most_in_pieces(deployment.weight_format, tp)
        self.links = Links(chip, deployment.engine, constants.link, constants.collective)
        self.bandwidth = chip.memory_bandwidth * constants.bandwidth
        self.kv_bandwidth = chip.memory_bandwidth * constants.kv_bandwidth
        self._peak = chip.flops.get("bf16") or chip.flops.get("fp16") or max(chip.flops.values())
        self.attention_rate = self._peak * constants.attention
        held = zip(shape.groups, deployment.layer_bytes, strict=True)
        self._layers = [_Layer(group, sizes, self) for group, sizes in held]
        head = (shape.head_weights or shape.embedding_weights) / tp
        form = deployment.weight_format
        read = head_bytes(shape, math.ceil(shape.spec.vocab_size / tp), form, deployment.holds_on)
        self._head = read / self.bandwidth, 2 * head / self.rate(shape.head_format(form))
        self._sampling_seconds = HEAD_BYTES * shape.spec.vocab_size / self.bandwidth
        self._operations = HEAD_KERNELS + sum(layer.count * layer.operations for layer in self._layers)

    def rate(self, held: WeightFormat) -> float:
        """Return operations a second of large products with weights in that format."""
        units = self.deployment.chip.flops.get(held.units)
        if units is None:
            return self._peak * self.efficiency.gemm
        return units * self.efficiency.gemm * NARROW

    def seconds(self, work: StepWork) -> float:
        return self._count(work)[0]

    def cost(self, work: StepWork) -> StepCost:
        seconds, parts = self._count(work)
        return StepCost(seconds, dict(zip(PARTS, parts, strict=True)))

    def _count(self, work: StepWork) -> tuple[float, tuple[float, ...]]:
        """Seconds of the step, and of each of PARTS alone, on the busiest rank.

        With pipeline stages its requests form as many batches as there are stages, all under way at once.
        """
        parallel, p = self.deployment.parallel, self.efficiency.overlap
        prompts = work.prompts or (1 if work.prefill_tokens else 0)
        decodes = work.decodes / parallel.dp
        if 0 < decodes < 1:  # a rank has one or none
            decodes = min(1.0, work.decodes)
        prompts_here = -(-prompts // parallel.dp)
        prefill = work.prefill_tokens * prompts_here / prompts if prompts else 0.0
        batches = min(parallel.pp, max(1.0, decodes + prompts_here))
        decodes, prefill = decodes / batches, prefill / batches
        queries = decodes * work.decode_len
        tokens, samples = queries + prefill, queries + prompts_here / batches
        everywhere = tokens
        if parallel.dp_attention:
            everywhere = max(tokens, (work.decodes * work.decode_len + work.prefill_tokens) / batches)

        weights = kv = flops = activations = links = launches = total = 0.0
        for layer in self._layers:
            keys, read, scored = layer.keys(work.decode_context)
            cache = decodes * (read * layer.seconds_per_key + (1 + work.decode_len) * layer.state_seconds)
            of_index = layer.index_seconds_per_pair
            looking = queries * (keys * layer.decode_seconds_per_pair + scored * of_index + layer.seconds_per_token)
            keys, _, scored = layer.keys(work.prefill_context)
            prompt_pairs = prefill * (keys * layer.seconds_per_pair + scored * of_index + layer.seconds_per_token)
            products = layer.products(tokens, everywhere)
            collectives = self._collectives(layer, tokens, everywhere)
            elementwise = tokens * layer.activation_seconds
            seconds = sum(_norm(bytes_, compute, p) for bytes_, compute in products) + _norm(cache, looking, p)
            count = layer.count
            total += count * (seconds + prompt_pairs + elementwise + collectives + layer.launch_seconds)
            weights += count * sum(bytes_ for bytes_, _ in products)
            flops += count * (sum(compute for _, compute in products) + looking + prompt_pairs)
            kv += count * cache
            activations += count * elementwise
            links += count * collectives
            launches += count * layer.launch_seconds

        head = self._head[0], samples * self._head[1]
        sampling = samples * self._sampling_seconds
        own = HEAD_KERNELS * self.efficiency.kernel
        between = self._between_stages(tokens)
        host = self._host(decodes + prompts_here / batches, prefill)
        total += _norm(*head, p) + sampling + own + between
        weights, flops, activations = weights + head[0], flops + head[1], activations + sampling
        parts = (weights, kv, flops, activations, links + between, launches + own, host)
        return _norm(total, host, self._host_overlap), parts

    def _collectives(self, layer: _Layer, tokens: float, everywhere: float) -> float:
        """Seconds of a layer's collectives: sums after attention and after the MLP, or tokens to experts and back."""
        parallel, width = self.deployment.parallel, 2.0 * self.deployment.shape.spec.hidden_size
        seconds = self.links.all_reduce(tokens * width, parallel.tp)
        if not layer.mlp.num_experts or not parallel.dp_attention:
            return 2 * seconds
        return seconds + self.links.gather_and_scatter(everywhere * width, parallel.expert_gpus)

    def _between_stages(self, tokens: float) -> float:
        """Seconds in which pipeline stages pass hidden states on."""
        parallel = self.deployment.parallel
        if parallel.pp == 1:
            return 0.0
        other_node = parallel.tp * parallel.pp > self.deployment.chip.gpus_per_node
        return (parallel.pp - 1) * self.links.send(tokens * 2.0 * self.deployment.shape.spec.hidden_size, other_node)

    def _host(self, sequences: float, prefill: float) -> float:
        """Seconds of the host: starting operations that are in no graph, and bookkeeping for each request."""
        traits, layers = self.traits, sum(layer.count for layer in self._layers)
        tokens = sequences + prefill
        if not prefill and sequences <= traits.graph_decodes:
            operations = FULL_GRAPH_OPERATIONS
        elif tokens <= self._graph_tokens:
            operations = FULL_GRAPH_OPERATIONS + PIECES * layers
        else:
            operations = FULL_GRAPH_OPERATIONS + self._operations
        return operations * self.efficiency.launch + sequences * self.efficiency.sequence


def _norm(a: float, b: float, p: float) -> float:
    """The p-norm of two times: a + b for p = 1, and max(a, b), as if they overlapped wholly, for p to infinity."""
    if a <= 0 or b <= 0:
        return a + b
    if a < b:
        a, b = b, a
    return float(a * (1 + (b / a) ** p) ** (1 / p))
