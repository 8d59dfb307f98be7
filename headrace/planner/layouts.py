"""Lists the layouts of a model on a number of GPUs, and the rules that forbid some of them.

Integers only; which of the allowed ones is fastest is the business of search.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.planner.chips import Chip
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape, expert_share
from headrace.quantization.linear_rules import PARTS

PINS = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "enable_expert_parallel": "ep",
    "enable_dp_attention": "dp_attention",
}
"""Field of a request that pins the layout -> field of Parallel."""
ULTRA_SPARSE = 0.01
"""Share of the experts that a token uses, below which whole experts on a GPU leave most GPUs without work."""


def name_of(parallel: Parallel) -> str:
    """Write the layout as people do: `TP8`, `4 x TP2`, `TP8 PP2`, `DP8 attention, EP8 experts`."""
    split = f"TP{parallel.tp}" + (f" PP{parallel.pp}" if parallel.pp > 1 else "")
    if parallel.dp_attention:
        experts = f"{'EP' if parallel.ep else 'TP'}{parallel.expert_gpus} experts"
        attention = f"DP{parallel.dp}" + (f" x TP{parallel.tp}" if parallel.tp > 1 else "")
        return f"{attention} attention, {experts}"
    split += f", EP{parallel.expert_gpus}" if parallel.ep else ""
    return f"{parallel.replicas} x {split}" if parallel.replicas > 1 else split


def layouts(num_gpus: int, shape: ModelShape, most_ranks: int | None = None) -> Iterator[Parallel]:
    """Yield every way to use `num_gpus` GPUs, or as many of them as come out even.

    There are at most `most_ranks` data-parallel ranks: more would have no request to work on.
    """
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
    """Say why a model cannot, or should not, be spread like that over such GPUs; empty: it may."""
    return list(dict.fromkeys(_reasons(parallel, shape, chip)))


def _reasons(parallel: Parallel, shape: ModelShape, chip: Chip) -> Iterator[str]:
    tp, pp, expert_gpus, per_node = parallel.tp, parallel.pp, parallel.expert_gpus, chip.gpus_per_node
    if tp > per_node:
        yield f"tensor parallelism over {tp} GPUs leaves the node of {per_node}"
    for group in shape.groups:
        attention, mlp = group.mixer, group.feed_forward
        if attention.num_heads % tp:
            yield f"{attention.num_heads} attention heads do not divide by {tp}"
        kv_heads = attention.num_kv_heads
        if attention.kind == "gqa" and kv_heads % tp and tp % kv_heads:
            yield f"{kv_heads} KV heads neither divide by {tp} nor go into it"
        if mlp.intermediate_size % tp:
            yield f"an MLP of {mlp.intermediate_size} does not divide by {tp}"
        if not parallel.ep and mlp.expert_intermediate_size % expert_gpus:
            yield f"experts of {mlp.expert_intermediate_size} do not divide by {expert_gpus}"
    yield from _group_reasons(parallel, shape)
    if not shape.is_moe and (parallel.ep or parallel.dp_attention):
        yield "a dense model has no experts to spread"
    elif parallel.ep:
        for count in sorted({group.feed_forward.num_experts for group in shape.groups}):
            if count % expert_gpus:
                yield f"{count} experts do not divide by {expert_gpus}"
        if (share := expert_share(shape.spec)) < ULTRA_SPARSE:
            yield f"a token uses {share:.2%} of the experts: whole ones would leave most GPUs idle"
    if pp > shape.num_layers:
        yield f"{pp} stages for {shape.num_layers} layers"
    if pp > 1 and tp * pp > per_node and per_node % tp:
        yield f"stages of {tp} GPUs do not come out even on nodes of {per_node}"
    if parallel.dp_attention and parallel.gpus > per_node and not parallel.ep:
        yield "experts in slices would be summed over the network in every layer"


def _group_reasons(parallel: Parallel, shape: ModelShape) -> Iterator[str]:
    """Say which GPUs would begin within a group of inputs that share a scale, or have no group of an expert's."""
    tp, expert_gpus = parallel.tp, parallel.expert_gpus
    held = {part: shape.part_format(part, shape.weight_format) for part in PARTS}
    for group in shape.groups:
        parameters = {"attention": group.mixer.parameters, "dense": group.feed_forward.parameters}
        for part, ones in parameters.items():
            size = 0 if held[part].any_order else held[part].group_size
            for one in ones if held[part].tiled == "all" and size else ():
                inputs = one.shape[-1]
                if one.kind == "linear" and one.axis == 1 and size < inputs and inputs % (size * tp) and tp > 1:
                    yield f"{inputs} inputs of {one.name} in groups of {size} do not divide by {tp}"
        size, width = held["experts"].group_size, group.feed_forward.expert_intermediate_size
        if size and not parallel.ep and 0 < -(-width // size) < expert_gpus:
            yield f"experts of {width} have {-(-width // size)} groups of {size} inputs, fewer than {expert_gpus} GPUs"
