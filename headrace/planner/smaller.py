"""Makes a plan smaller when memory runs out: from what ranks report to a config that asks for less, with a reason.

Pure functions; the engine core carries out what they return. All ranks get the same plan.
"""

from __future__ import annotations

from typing import Any

from headrace.config import EngineConfig
from headrace.errors import OutOfMemoryError
from headrace.planner.decisions import longest_sequence, pages_by_memory, pages_of_longest
from headrace.planner.graphs import GRAPH_KEYS
from headrace.planner.record import Decision
from headrace.step import WorkerFacts

FEW_SEQS = 64
"""Graphs are given up before fewer sequences than this run at once."""
FEWEST_TOKENS = 16
"""Tokens of the smallest step, where prompts may be cut."""
SHORTEST_CONTEXT = 2048
"""A max_model_len that nobody gave may shrink to this before steps do."""


def smaller_plan(
    config: EngineConfig, given: EngineConfig, facts: list[WorkerFacts]
) -> tuple[EngineConfig, list[Decision]] | None:
    """Return a config that needs less memory than `config`, of which ranks report `facts`; None: it fits, or nothing
    smaller would help the KV cache, as decide_num_pages will say.

    `given` is what the user asked for. Raises OutOfMemoryError when not even the smallest step fits.
    """
    step = f"a step of {config.max_num_batched_tokens} tokens in up to {config.max_num_seqs} sequences"
    if shortfall := next((fact.shortfall for fact in facts if fact.shortfall), ""):
        return _smaller_step(config, f"{step} did not fit: {shortfall}")
    if config.num_gpu_blocks_override is not None:
        return None
    tokens, seqs, length = _sizes(config)
    pages = pages_by_memory(config, facts)
    missing = pages_of_longest(config, facts) - pages
    if missing <= 0:
        return None
    if given.max_model_len is None:
        longest, shortest = longest_sequence(config, facts, pages), min(SHORTEST_CONTEXT, length // 2)
        if longest >= shortest:
            reason = "what the KV cache has room for; longer sequences need more memory or GPUs"
            return _change(config, reason, max_model_len=longest)
        # A smaller step first, then a shorter context.
        missing = pages_of_longest(config.replace(max_model_len=shortest), facts) - pages
    by_step = all(missing * fact.layout.page_bytes < fact.step_bytes for fact in facts)
    by_both = all(missing * fact.layout.page_bytes < fact.step_bytes + fact.graph_bytes for fact in facts)
    enough = by_step and (tokens > max(_fewest(config), seqs * config.decode_len) or seqs > FEW_SEQS)
    mode = config.compilation_config["cudagraph_mode"]
    if by_both and not enough and mode != "NONE" and not GRAPH_KEYS & given.compilation_config.keys():
        eager = config.replace(compilation_config={**config.compilation_config, "cudagraph_mode": "NONE"})
        reason = "room for the KV cache, which graphs would take"
        return eager, [Decision("cudagraph_mode", "NONE", reason, mode, source="measured")]
    return _smaller_step(config, f"room for the KV cache beside {step}") if by_step else None


def fewer_pages(config: EngineConfig, num_pages: int, facts: list[WorkerFacts]) -> tuple[int, Decision]:
    """Return the number of pages to try after `num_pages` did not fit, from what the ranks without memory report now.

    Raises OutOfMemoryError when that is not enough for one sequence of max_model_len.
    """
    short = [fact for fact in facts if fact.shortfall]
    shortfall = short[0].shortfall
    pages = min(pages_by_memory(config, short), num_pages * 15 // 16)
    if pages < pages_of_longest(config, short):
        raise OutOfMemoryError(
            f"the KV cache has room for {longest_sequence(config, short, pages)} tokens, fewer than max_model_len "
            f"({config.max_model_len}): {shortfall}"
        )
    reason = f"{num_pages} did not fit: {shortfall}"
    return pages, Decision("num_gpu_blocks", pages, reason, str(num_pages), source="measured")


def smaller_budget(config: EngineConfig, num_tokens: int) -> tuple[EngineConfig, list[Decision]] | None:
    """Return a config for later steps, after a step of `num_tokens` found no memory while serving: half the tokens, but
    never fewer than the sequences that may run need; None: it cannot be lowered."""
    tokens, seqs, _ = _sizes(config)
    budget = max(_fewest(config), seqs * config.decode_len, num_tokens // 2)
    if budget >= tokens:
        return None
    return _change(config, f"a step of {num_tokens} tokens found no memory", max_num_batched_tokens=budget)


def _smaller_step(config: EngineConfig, reason: str) -> tuple[EngineConfig, list[Decision]]:
    """Half the tokens, down to what the sequences need; then half of both."""
    (tokens, seqs, _), fewest, each = _sizes(config), _fewest(config), config.decode_len
    if tokens > max(fewest, seqs * each):
        return _change(config, reason, max_num_batched_tokens=max(fewest, seqs * each, tokens // 2))
    if seqs > 1:
        return _change(config, reason, max_num_seqs=seqs // 2, max_num_batched_tokens=max(fewest, seqs // 2 * each))
    raise OutOfMemoryError(f"not even the smallest plan fits: {reason}")


def _sizes(config: EngineConfig) -> tuple[int, int, int]:
    """(tokens of a step, sequences, tokens of the longest sequence) of a resolved config."""
    tokens, seqs, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    assert tokens is not None
    assert seqs is not None
    assert length is not None
    return tokens, seqs, length


def _fewest(config: EngineConfig) -> int:
    """The fewest tokens that a step may have: a prompt that may not be cut must fit in whole."""
    return FEWEST_TOKENS if config.enable_chunked_prefill else _sizes(config)[2]


def _change(config: EngineConfig, reason: str, **changes: Any) -> tuple[EngineConfig, list[Decision]]:
    decisions = [
        Decision(field, value, reason, str(getattr(config, field)), source="measured")
        for field, value in changes.items()
        if value != getattr(config, field)
    ]
    return config.replace(**changes), decisions
