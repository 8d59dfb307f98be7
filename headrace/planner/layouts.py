"""How a model may be spread over GPUs: every layout of a number of GPUs, and the rules of models that forbid some.

Integers only; which of the allowed ones is fastest is search.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.planner.chips import Chip
from headrace.planner.cost import Parallel
from headrace.planner.shapes import ModelShape

ULTRA_SPARSE = 0.01
"""Share of the experts that a token uses, below which whole experts on a GPU leave most GPUs without work"""
MANY_REQUESTS = 512
"""in flight over one copy of the weights, from which a latent cache is no longer copied to every GPU. (AMD's guide puts
the crossover at 256 to 512; below, the cost model decides.)"""


def name_of(parallel: Parallel) -> str:
    """`TP8`, `4 x TP2`, `TP8 PP2`, `DP8 attention, EP8`."""
    split = f"TP{parallel.tp}" + (f" PP{parallel.pp}" if parallel.pp > 1 else "")
    if parallel.dp_attention:
        experts = f"{'EP' if parallel.ep else 'TP'}{parallel.expert_gpus} experts"
        attention = f"DP{parallel.dp}" + (f" x TP{parallel.tp}" if parallel.tp > 1 else "")
        return f"{attention} attention, {experts}"
    split += f", EP{parallel.expert_gpus}" if parallel.ep else ""
    return f"{parallel.replicas} x {split}" if parallel.replicas > 1 else split


def layouts(num_gpus: int, shape: ModelShape, most_ranks: int | None = None) -> Iterator[Parallel]:
    """Every way to use `num_gpus` GPUs, or as many of them as come out even; with up to `most_ranks` data-parallel
    ranks, as others would have no request to work on."""
    for tp in range(1, num_gpus + 1):
        for pp in range(1, num_gpus // tp + 1):
            dp = min(num_gpus // (tp * pp), most_ranks or num_gpus)
            yield Parallel(tp, pp, dp)
            if not shape.is_moe or pp > 1:
                continue
            if tp > 1:
                yield Parallel(tp, pp, dp, ep=True)
            if dp > 1:
                yield Parallel(tp, pp, dp, dp_attention=True)
                yield Parallel(tp, pp, dp, ep=True, dp_attention=True)


def reasons(parallel: Parallel, shape: ModelShape, chip: Chip) -> list[str]:
    """Why a model cannot, or should not, be spread like that over such GPUs; empty: it may."""
    found = [*_tensor_reasons(parallel, shape, chip), *_expert_reasons(parallel, shape)]
    if parallel.pp > shape.num_layers:
        found.append(f"{parallel.pp} stages for {shape.num_layers} layers")
    if parallel.pp > 1 and parallel.tp * parallel.pp > chip.gpus_per_node and chip.gpus_per_node % parallel.tp:
        found.append(f"stages of {parallel.tp} GPUs do not come out even on nodes of {chip.gpus_per_node}")
    if parallel.dp_attention and parallel.gpus > chip.gpus_per_node and not parallel.ep:
        found.append("experts in slices would be summed over the network in every layer")
    return found


def _tensor_reasons(parallel: Parallel, shape: ModelShape, chip: Chip) -> list[str]:
    tp, found = parallel.tp, []
    if tp > chip.gpus_per_node:
        found.append(f"tensor parallelism over {tp} GPUs leaves the node of {chip.gpus_per_node}")
    for group in shape.groups:
        attention, mlp = group.mixer, group.feed_forward
        if attention.num_heads % tp:
            found.append(f"{attention.num_heads} attention heads do not divide by {tp}")
        kv_heads = attention.num_kv_heads
        if attention.kind == "gqa" and kv_heads % tp and tp % kv_heads:
            found.append(f"{kv_heads} KV heads neither divide by {tp} nor go into it")
        if mlp.intermediate_size % tp:
            found.append(f"an MLP of {mlp.intermediate_size} does not divide by {tp}")
        if not parallel.ep and mlp.expert_intermediate_size % parallel.expert_gpus:
            found.append(f"experts of {mlp.expert_intermediate_size} do not divide by {parallel.expert_gpus}")
    return list(dict.fromkeys(found))


def _expert_reasons(parallel: Parallel, shape: ModelShape) -> list[str]:
    found: list[str] = []
    if not shape.is_moe:
        if parallel.ep or parallel.dp_attention:
            found.append("a dense model has no experts to spread")
        return found
    sparse = [group.feed_forward for group in shape.groups if group.feed_forward.num_experts]
    share = min(mlp.experts_per_token / mlp.num_experts for mlp in sparse)
    if parallel.ep:
        for count in sorted({mlp.num_experts for mlp in sparse}):
            if count % parallel.expert_gpus:
                found.append(f"{count} experts do not divide by {parallel.expert_gpus}")
        if share < ULTRA_SPARSE:
            found.append(f"a token uses {share:.2%} of the experts: whole ones would leave most GPUs idle")
    return found


def copies_latent(parallel: Parallel, shape: ModelShape) -> bool:
    """Every GPU of a tensor-parallel group would hold the same latent cache."""
    return shape.is_mla and parallel.tp > 1
