"""Spreads tokens over the experts of a mixture whose weights are random, and counts the experts that a layer reads.

It counts in runs of their own, after the timed ones, since recording the choices costs time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from h200_parts.engines import runner_of, watched

Prompts = list[list[int]]

EVERY = 8
"""One in so many decode steps is counted."""
WHOLE = 0.9
"""Decode steps with a smaller share of the batch's requests are not counted."""


def spread_tokens(llm: Any, seed: int) -> None:
    """Draw embeddings and routers anew, normal and large. Of the loader's small numbers, the biases and the experts'
    outputs, alike for all tokens, would outweigh the embeddings, and all tokens would go to the same experts."""
    import torch

    from headrace.layers.embedding import VocabParallelEmbedding
    from headrace.layers.moe import SparseMoE

    for layer in runner_of(llm).model.modules():
        drawn = {VocabParallelEmbedding: "weight", SparseMoE: "router"}.get(type(layer))
        if drawn is not None:
            weight = getattr(layer, drawn)
            seed += 1
            weight.normal_(generator=torch.Generator(weight.device).manual_seed(seed))
        if isinstance(layer, SparseMoE) and layer.selection_bias is not None:
            layer.selection_bias.zero_()


def mean_distinct_experts(
    llm: Any, run: Callable[[Prompts, int], Any], cases: list[tuple[Prompts, int]]
) -> list[float]:
    """Return the mean over layers and counted steps of each case (prompts, output length), which `run` runs on `llm`.

    Counted are decode steps of the whole batch, or, where one token is asked for, the steps that read the prompts.
    """
    from headrace.layers.moe import distinct_experts, keep_expert_ids

    runner = runner_of(llm)
    counted: list[float] = []
    size = steps = 0
    decoding = False

    def count(step: Any) -> None:
        nonlocal steps
        requests = len(step.rows)
        if not requests or (decoding and not WHOLE * size <= requests == step.num_tokens):
            return
        steps += 1
        if not decoding or steps % EVERY == 1:
            of_layers = distinct_experts(runner.model)
            counted.append(sum(of_layers) / len(of_layers))

    keep_expert_ids(runner.model, llm.config.max_num_batched_tokens)
    runner.renew_graphs()  # graphs captured before do not record the choices
    try:
        means = []
        with watched(runner, count):
            for prompts, output_len in cases:
                counted, size, steps, decoding = [], len(prompts), 0, output_len > 1
                run(prompts, output_len)
                means.append(sum(counted) / max(1, len(counted)))
        return means
    finally:
        keep_expert_ids(runner.model, 0)
        runner.renew_graphs()
