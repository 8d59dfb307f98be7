"""When memory ends: each plan asks for less than the one before, says why, and comes to an end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.errors import OutOfMemoryError
from headrace.planner.decisions import decide_before_load
from headrace.planner.smaller import fewer_pages, smaller_budget, smaller_plan
from headrace.step import WorkerFacts
from tests.planner.test_decisions import MODEL

BLOCK = 1000
"""bytes; MODEL's 512 positions take 32 blocks"""
SAID = "CUDA out of memory. Tried to allocate 2.00 GiB."


def facts(available: int = 10**6, step: int = 0, shortfall: str = "") -> WorkerFacts:
    return WorkerFacts(
        "cuda", "a GPU", 10**9, available, same_layout(16, BLOCK), 0, "ANY", step_bytes=step, shortfall=shortfall
    )


def resolved(**given: Any) -> tuple[EngineConfig, EngineConfig]:
    """(resolved, given)"""
    config = EngineConfig(**given)
    return decide_before_load(config, MODEL, "cuda")[0], config


def test_what_fits_stays() -> None:
    assert smaller_plan(*resolved(), [facts(), facts()]) is None


def test_tokens_go_first_then_sequences_and_then_it_is_told() -> None:
    config, given = resolved(max_num_batched_tokens=128, max_num_seqs=40)
    seen = []
    for _ in range(7):
        smaller = smaller_plan(config, given, [facts(), facts(shortfall=SAID)])
        config, decisions = smaller
        assert all(SAID in decision.reason and decision.runner_up for decision in decisions)
        seen.append((config.max_num_batched_tokens, config.max_num_seqs))
    with pytest.raises(OutOfMemoryError, match=r"not even the smallest plan fits: a step of 16 tokens .*2.00 GiB"):
        smaller_plan(config, given, [facts(shortfall=SAID)])
    assert seen == [(64, 40), (40, 40), (20, 20), (16, 10), (16, 5), (16, 2), (16, 1)]


def test_a_prompt_that_may_not_be_cut_keeps_its_step() -> None:
    config, given = resolved(enable_chunked_prefill=False, max_num_batched_tokens=1024, max_num_seqs=8)
    config, _ = smaller_plan(config, given, [facts(shortfall=SAID)]) or (config, [])
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (512, 8)
    config, _ = smaller_plan(config, given, [facts(shortfall=SAID)]) or (config, [])
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (512, 4)


def test_a_context_that_nobody_gave_shrinks_to_what_the_tightest_rank_has() -> None:
    config, given = resolved()
    config, (decision,) = smaller_plan(config, given, [facts(), facts(20 * BLOCK)]) or (config, [None])
    assert config.max_model_len == 320
    assert str(decision).startswith("max_model_len = 320: what the KV cache has room for")
    assert smaller_plan(config, given, [facts(), facts(20 * BLOCK)]) is None


def test_a_step_is_made_smaller_for_the_shortest_context_worth_having() -> None:
    """16 of the 32 blocks that the longest one takes."""
    smaller = smaller_plan(*resolved(), [facts(10 * BLOCK, step=10 * BLOCK)])
    assert (smaller[0].max_model_len, smaller[0].max_num_batched_tokens) == (512, 4096)
    assert smaller_plan(*resolved(), [facts(-10 * BLOCK, step=10 * BLOCK)]) is None


def test_graphs_go_where_a_smaller_step_alone_is_not_enough() -> None:
    """26 blocks are missing, of which a step can give 10."""
    tight = [msgspec.structs.replace(facts(-10 * BLOCK, step=10 * BLOCK), graph_bytes=17 * BLOCK)]
    config, given = resolved()
    smaller = smaller_plan(config, given, tight)
    config, (decision,) = smaller
    assert config.compilation_config["cudagraph_mode"] == "NONE"
    assert str(decision).startswith("cudagraph_mode = NONE: room for the KV cache, which graphs would take")
    assert smaller_plan(config, given, tight) is None
    just_short = [msgspec.structs.replace(tight[0], graph_bytes=16 * BLOCK)]
    assert smaller_plan(*resolved(), just_short) is None, "all of both would be gone, and nothing left of the step"
    for asked in ({"cudagraph_mode": "FULL"}, {"full_cuda_graph": True}):
        assert smaller_plan(*resolved(compilation_config=asked), tight) is None


def test_graphs_go_before_hardly_any_sequences_are_left() -> None:
    """5 blocks are missing, however small the step becomes."""
    config, given = resolved()
    seen = []
    for _ in range(40):
        graphs = 100 * BLOCK * (config.compilation_config["cudagraph_mode"] != "NONE")
        left = 11 * BLOCK + graphs // 2 if not graphs else 11 * BLOCK
        tight = [msgspec.structs.replace(facts(left, step=10 * BLOCK), graph_bytes=graphs)]
        smaller = smaller_plan(config, given, tight) if graphs else None
        if smaller is None:
            break
        config, decisions = smaller
        seen += [(decision.field, decision.value) for decision in decisions]
    assert seen[-1] == ("cudagraph_mode", "NONE")
    assert config.max_num_seqs == 64


def test_a_context_that_was_given_makes_steps_smaller_where_that_helps() -> None:
    config, given = resolved(max_model_len=512)
    smaller = smaller_plan(config, given, [facts(20 * BLOCK, step=100 * BLOCK)])
    assert smaller[0].max_model_len == 512
    assert smaller[0].max_num_batched_tokens == 4096
    assert "room for the KV cache" in smaller[1][0].reason
    for step in (5 * BLOCK, 12 * BLOCK):  # of the 12 blocks that are missing
        assert smaller_plan(config, given, [facts(20 * BLOCK, step=step)]) is None, "decide_num_pages says what fits"
    assert smaller_plan(config, given, [facts(-(10**9), step=BLOCK)]) is None


def test_blocks_that_the_user_gave_are_not_questioned_before_they_are_tried() -> None:
    assert smaller_plan(*resolved(num_gpu_blocks_override=3), [facts(0)]) is None


def test_a_cache_that_did_not_fit() -> None:
    config, _ = resolved()
    blocks, decision = fewer_pages(config, 100, [facts(0), facts(70 * BLOCK, shortfall=SAID)])
    assert blocks == 70
    assert str(decision) == f"num_gpu_blocks = 70: 100 did not fit: {SAID} (instead of 100)"
    assert fewer_pages(config, 100, [facts(10**6, shortfall=SAID)])[0] == 93, "whatever is reported, it ends"
    assert fewer_pages(config, 100, [facts(32 * BLOCK, shortfall=SAID)])[0] == 32, "one longest sequence is enough"
    with pytest.raises(OutOfMemoryError, match=r"room for 320 tokens, fewer than max_model_len \(512\): CUDA out of"):
        fewer_pages(config, 100, [facts(20 * BLOCK, shortfall=SAID)])


def test_a_step_that_found_no_memory_while_serving_halves_the_budget_down_to_the_sequences() -> None:
    config, _ = resolved(max_num_seqs=100)
    config, (decision,) = smaller_budget(config, 8192) or (config, [None])
    assert config.max_num_batched_tokens == 4096
    assert str(decision).startswith("max_num_batched_tokens = 4096: a step of 8192 tokens found no memory")
    config, _ = smaller_budget(config, 120) or (config, [])
    assert config.max_num_batched_tokens == 100
    assert smaller_budget(config, 90) is None
