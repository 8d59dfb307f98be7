"""How many distinct experts a layer of a mixture reads in a decode step: counted in runs of its own, after the timed
ones, since keeping the choices costs time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h200_parts.offline import Bench

EVERY = 8
"""Decode steps between two that are counted."""


def mean_distinct_experts(bench: Bench, batches: dict[int, list[list[int]]], output_len: int) -> dict[int, float]:
    """Batch size -> mean over layers and counted steps, for the prompts of each."""
    from headrace.layers.moe import distinct_experts, keep_expert_ids

    core = bench.llm._client._core
    worker = core._executor._worker
    runner = worker.runner
    counted: list[float] = []
    size = steps = 0
    execute = runner.execute

    def counting(step: Any) -> Any:
        nonlocal steps
        pending = execute(step)
        if len(step.rows) == step.num_tokens == size:  # a decode step of the whole batch
            steps += 1
            if steps % EVERY == 1:
                found = distinct_experts(runner.model)
                counted.append(sum(found) / len(found))
        return pending

    keep_expert_ids(runner.model, bench.llm.config.max_num_batched_tokens)
    worker.initialize_cache(core.facts.num_blocks)  # drops the graphs, which keep nothing
    runner.execute = counting
    try:
        means = {}
        for batch, prompts in batches.items():
            counted, size, steps = [], len(prompts), 0
            bench.run(prompts, output_len)
            means[batch] = sum(counted) / max(1, len(counted))
        return means
    finally:
        runner.execute = execute
        keep_expert_ids(runner.model, 0)
        worker.initialize_cache(core.facts.num_blocks)
