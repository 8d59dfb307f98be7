"""What is to be said of a command line as a whole: what it lacks, and whether it fits the GPUs' memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.explain.case import Case, size
from headrace.explain.remarks_variables import MASTER
from headrace.planner.chips import Chip
from headrace.planner.cost import Parallel
from headrace.planner.layouts import reasons
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.shapes import ModelShape

WORTH_A_CONTEXT = 4096
"""Tokens of a context, below which more GPUs are the better advice"""
RUNS_AN_ENGINE = ("serve", "generate", "bench latency", "bench throughput")


@dataclass(frozen=True)
class Finding:
    title: str
    verdict: str
    """one of case.VERDICTS"""
    text: str
    add: str = ""
    """settings that the better line has"""


def findings_of(case: Case) -> Iterator[Finding]:
    line = case.line
    if line.stray:
        yield Finding("words", "wrong", f"{' '.join(line.stray)!r} belongs to no flag")
    if line.program not in RUNS_AN_ENGINE:
        return
    if case.vendor == "amd" and line.engine == "vllm" and line.find(MASTER) is None:
        text = f"{MASTER}=1: without it vLLM runs 1.7 to 3.7 times slower on {case.gpu}"
        yield Finding("missing", "costs", text, f"{MASTER}=1")
    if line.model is not None and case.shape is None:
        text = f"nothing is known of {line.model}: what depends on its shape is left open"
        yield Finding("model", "unknown", text)
    if case.shape is not None and case.chip is not None and case.chip.vendor != "cpu":
        yield _memory(case, case.shape, case.chip)


def _memory(case: Case, shape: ModelShape, chip: Chip) -> Finding:
    longest = min(case.asked.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings)
    fits = _map(case, shape, chip, case.tp, longest)
    share = f"{size(fits.usable)} of {size(fits.total)} for this instance"
    many = f"each of {case.gpus} " if case.gpus > 1 else ""
    what = f"{size(fits.weight_bytes)} of {case.weight_format} weights on {many}{chip.title} ({share})"
    if not fits.fits:
        text = f"{what}: {size(fits.missing)} too little for one sequence of {fits.longest:,} tokens"
        return Finding("memory", "wrong", text, _enough(case, shape, chip, longest))
    held = f"{fits.kv_tokens:,} tokens, or {fits.max_concurrency:,.0f} sequences of {fits.longest:,}"
    return Finding("memory", "fine", f"{what} leave {size(fits.kv_pool)} for the KV cache: {held}")


def _enough(case: Case, shape: ModelShape, chip: Chip, longest: int) -> str:
    """Flags with which it fits: a shorter context where the weights leave room for one, else more GPUs too."""
    for tp in (case.tp, *(2**power for power in range(6) if 2**power > case.tp)):
        if tp > chip.gpus_per_node or reasons(Parallel(tp), shape, chip):
            continue
        fits = _map(case, shape, chip, tp, longest)
        more = f"--tensor-parallel-size {tp}" if tp > case.tp else ""
        if fits.fits:
            return more
        if fits.kv_tokens >= WORTH_A_CONTEXT:
            return f"{more} --max-model-len {fits.kv_tokens // 1024 * 1024}".strip()
    return ""


def _map(case: Case, shape: ModelShape, chip: Chip, tp: int, longest: int) -> MemoryMap:
    asked = case.asked
    return memory_map(
        shape,
        chip,
        Parallel(tp, asked.pipeline_parallel_size or 1, case.dp, ep=bool(asked.enable_expert_parallel)),
        weight_format=case.weight_format or None,
        kv_dtype_bytes=case.kv_width,
        max_num_seqs=asked.max_num_seqs or 1024,
        max_num_batched_tokens=asked.max_num_batched_tokens or 8192,
        max_model_len=longest,
        gpu_memory_utilization=asked.gpu_memory_utilization or 0.9,
        block_size=asked.block_size or 16,
        engine="headrace" if case.line.engine == "headrace" else "vllm",
    )
