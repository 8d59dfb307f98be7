"""Spreads tokens over the experts of a mixture whose weights are random, and counts the experts that a layer reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from h200_parts.engines import runner_of, watched

EVERY = 8
"""One in so many decode steps is counted."""


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


def mean_distinct_experts(llm: Any, batch: int, run: Callable[[], Any]) -> float:
    """Return how many experts a layer reads, in the mean over layers and decode steps of all of `batch` requests, which
    `run` runs on `llm`. It is not for runs that are timed: recording the choices costs time."""
    from headrace.layers.moe import distinct_experts, keep_expert_ids

    runner, steps, counted = runner_of(llm), 0, list[float]()

    def count(step: Any) -> None:
        nonlocal steps
        if len(step.rows) == step.num_tokens == batch:
            steps += 1
            if steps % EVERY == 1:
                of_layers = distinct_experts(runner.model)
                counted.append(sum(of_layers) / len(of_layers))

    keep_expert_ids(runner.model, llm.config.max_num_batched_tokens)
    runner.renew_graphs()  # graphs captured before do not record the choices
    try:
        with watched(runner, count):
            run()
        return sum(counted) / max(1, len(counted))
    finally:
        keep_expert_ids(runner.model, 0)
        runner.renew_graphs()
