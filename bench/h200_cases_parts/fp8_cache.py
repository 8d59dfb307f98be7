"""The KV cache is the model's where nobody asks; --objective throughput takes it in fp8, and gives it back, with all
its memory, where a start finds that it moves the model too far."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from h200_parts.models import TOY

from h200_cases_parts.report import EIGHT_B, Report
from headrace import LLM, SamplingParams
from headrace.runner import worker
from headrace.runner.kv_scales import settle_kv_scales

FAR = 0.2
"""||difference|| / ||hidden states|| that is planted"""
SAME_ROOM = 0.97
"""of a plain start's blocks, after going back"""
PROMPTS = [[5 + i] * (60 + 90 * i) for i in range(6)]


def unasked_cache_cases(report: Report) -> None:
    shape = EIGHT_B | (TOY if report.smoke else {})

    def start(objective: str | None) -> tuple[str, str, int, list[list[int]]]:
        """(type of the cache, why, its blocks, greedy tokens)"""
        # a CPU takes no such cache for any objective
        here: AbstractContextManager[Any] = nullcontext()
        if report.smoke:
            here = patch("headrace.planner.decisions.runs_fp8_cache_here", lambda *_: True)
        with here, LLM(
            report.model("8b", shape), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            objective=objective, max_num_seqs=8, gpu_memory_utilization=0.4,
        ) as llm:  # fmt: skip
            facts = llm._client.facts
            decision = next(entry for entry in facts.decisions if entry.field == "kv_cache_dtype")
            params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            return facts.config.kv_cache_dtype, decision.reason, facts.num_pages, tokens

    plain = start(None)
    report.case("no objective: the model's own", plain[0] == "bfloat16", f"{plain[2]} blocks, {plain[1]}")
    quick = start("latency")
    same = quick[0] == "bfloat16" and quick[3] == plain[3]
    report.case("latency: the model's own", same, f"{quick[2]} blocks, {quick[1]}")
    rounded = start("throughput")
    answered = all(len(tokens) == 8 for tokens in rounded[3])
    report.case("throughput: fp8", rounded[0] == "fp8_e4m3" and answered, f"{rounded[2]} blocks, {rounded[1]}")

    def far(*arguments: Any, **options: Any) -> Any:
        return replace(settle_kv_scales(*arguments, **options), error=FAR)

    with patch.object(worker, "settle_kv_scales", far):
        back = start("throughput")
    sound = back[0] == "bfloat16" and f"{FAR:.1%}" in back[1] and back[3] == plain[3]
    report.case("moved too far: back", sound, back[1])
    report.case("room after going back", back[2] >= SAME_ROOM * plain[2], f"{back[2]} of {plain[2]} blocks")
