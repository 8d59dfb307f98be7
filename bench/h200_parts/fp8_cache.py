"""Checks which type the KV cache gets: the model's where nobody asks, fp8 for --objective throughput.

It goes back to the model's type, with all its memory, where a start measures that fp8 changes the model too much.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from h200_parts.engines import greedy_tokens
from h200_parts.models import EIGHT_B, TOY
from h200_parts.run import Run
from headrace import LLM
from headrace.runner import worker
from headrace.runner.kv_scales import settle_kv_scales

FAR = 0.2
"""the injected ||difference|| / ||hidden states||"""
SAME_SIZE = 0.97
"""of a plain start's blocks, after going back"""
PROMPTS = [[5 + i] * (60 + 90 * i) for i in range(6)]


def unasked_cache_cases(run: Run) -> None:
    """Start with each objective, and once with an injected error of the fp8 cache."""
    model = run.settings.write_config("8b", EIGHT_B | (TOY if run.smoke else {}))

    def start(objective: str | None) -> tuple[str, str, int, list[list[int]]]:
        """Return (type of the cache, why, its blocks, greedy tokens)."""
        # a CPU takes an fp8 cache for no objective
        here: AbstractContextManager[Any] = nullcontext()
        if run.smoke:
            here = patch("headrace.planner.decisions.runs_fp8_cache_here", lambda *_: True)
        with here, LLM(
            model, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            objective=objective, max_num_seqs=8, gpu_memory_utilization=0.4,
        ) as llm:  # fmt: skip
            facts = llm._core.facts
            decision = next(entry for entry in facts.decisions if entry.field == "kv_cache_dtype")
            return facts.config.kv_cache_dtype, decision.reason, facts.num_pages, greedy_tokens(llm, PROMPTS, 8)

    plain = start(None)
    run.case("no objective: the model's own", plain[0] == "bfloat16", f"{plain[2]} blocks, {plain[1]}")
    quick = start("latency")
    same = quick[0] == "bfloat16" and quick[3] == plain[3]
    run.case("latency: the model's own", same, f"{quick[2]} blocks, {quick[1]}")
    rounded = start("throughput")
    answered = all(len(tokens) == 8 for tokens in rounded[3])
    run.case("throughput: fp8", rounded[0] == "fp8_e4m3" and answered, f"{rounded[2]} blocks, {rounded[1]}")

    def far(*arguments: Any, **options: Any) -> Any:
        return replace(settle_kv_scales(*arguments, **options), error=FAR)

    with patch.object(worker, "settle_kv_scales", far):
        back = start("throughput")
    sound = back[0] == "bfloat16" and f"{FAR:.1%}" in back[1] and back[3] == plain[3]
    run.case("changed too much: back", sound, back[1])
    run.case("memory after going back", back[2] >= SAME_SIZE * plain[2], f"{back[2]} of {plain[2]} blocks")
