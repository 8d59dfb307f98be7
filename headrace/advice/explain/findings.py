"""Finds what is to be said of a command line as a whole: what it lacks, and whether it fits the GPUs' memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.advice.explain.case import MASTER, OVERRIDES, Case, size
from headrace.advice.explain.shell_words import plain
from headrace.planner.chips import Chip
from headrace.planner.memory_map import MemoryMap, memory_map
from headrace.planner.shapes import ModelShape
from headrace.planner.smaller import SHORTEST_CONTEXT

WORTH_A_CONTEXT = 4096
"""Tokens of a context, below which more GPUs are the better advice."""
UNIT = 1024
"""A shorter context is advised in multiples of this many tokens."""
TAKE_MEMORY = (
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--gpu-memory-utilization", "--quantization", "--kv-cache-dtype", "--block-size",
    *OVERRIDES,
)  # fmt: skip
RUNS_AN_ENGINE = ("serve", "generate", "bench latency", "bench throughput")


@dataclass(frozen=True)
class Finding:
    """Holds a remark on the whole line."""

    title: str
    verdict: str
    """One of remark.VERDICTS."""
    text: str
    add: str = ""
    """Settings to add to the better line."""


def findings_of(case: Case) -> Iterator[Finding]:
    """Yield the remarks on a command line as a whole."""
    line = case.line
    if line.stray:
        yield Finding("words", "wrong", f"{' '.join(line.stray)!r} belongs to no flag")
    if line.unexpanded_words:
        words = " ".join(map(plain, line.unexpanded_words))
        yield Finding("words", "unknown", f"{words}: flags, maybe, once the shell has filled them in")
    if line.program not in RUNS_AN_ENGINE:
        return
    if case.vendor == "amd" and line.engine == "vllm" and line.find(MASTER) is None:
        text = f"{MASTER}=1: without it vLLM runs 1.7 to 3.7 times slower on {case.gpu}"
        yield Finding("missing", "costs", text, f"{MASTER}=1")
    if line.model is not None and case.shape is None:
        text = f"nothing is known of {line.model}: what depends on its shape is left open"
        yield Finding("model", "unknown", text)
    if case.shape is None or case.chip is None or case.chip.vendor == "cpu":
        return
    if case.may_be_set_elsewhere(*TAKE_MEMORY):
        yield Finding("memory", "unknown", f"whether it fits depends on {_unread(case)}")
    else:
        yield _memory(case, case.shape, case.chip)


def _unread(case: Case) -> str:
    names = [setting.name for setting in case.line.settings if setting.is_unexpanded and setting.key in TAKE_MEMORY]
    return f"{' and '.join(names)}, which the shell fills in" if names else "flags that stand elsewhere"


def _memory(case: Case, shape: ModelShape, chip: Chip) -> Finding:
    context = shape.spec.max_position_embeddings
    asked = case.asked.max_model_len or context
    longest = asked if case.stretches else min(asked, context)
    fits = _map(case, case.tp, longest)
    if not fits.fits and case.shortens_context and (length := _room(case, case.tp, longest, SHORTEST_CONTEXT)):
        fits = _map(case, case.tp, length)
    share = f"{size(fits.usable)} of {size(fits.total)} for this instance"
    many = f"each of {case.gpus} " if case.gpus > 1 else ""
    what = f"{size(fits.weight_bytes)} of {case.weight_format} weights on {many}{chip.title} ({share})"
    if not fits.fits:
        text = f"{what}: {size(fits.missing)} too little for one sequence of {fits.longest:,} tokens"
        return Finding("memory", "wrong", text, _enough(case, chip, longest))
    held = f"{fits.kv_tokens:,} tokens, or {fits.max_concurrency:,.0f} sequences of {fits.longest:,}"
    cut = f", to which the context is cut from {longest:,}" if fits.longest < longest else ""
    return Finding("memory", "fine", f"{what} leave {size(fits.kv_pool)} for the KV cache: {held}{cut}")


def _enough(case: Case, chip: Chip, longest: int) -> str:
    """Flags with which it fits: a shorter context where the weights leave room for one, else more GPUs too."""
    for tp in (case.tp, *(2**power for power in range(6) if 2**power > case.tp)):
        if tp > chip.gpus_per_node or case.tp_problems(tp):
            continue
        more = f"--tensor-parallel-size {tp}" if tp > case.tp else ""
        if _map(case, tp, longest).fits:
            return more
        if length := _room(case, tp, longest, WORTH_A_CONTEXT):
            return f"{more} --max-model-len {length}".strip()
    return ""


def _room(case: Case, tp: int, longest: int, least: int) -> int:
    """The longest context that fits, in whole UNITs; 0: fewer than `least` tokens."""
    low, high = 0, longest // UNIT
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _map(case, tp, middle * UNIT).fits else (low, middle - 1)
    return low * UNIT if low * UNIT >= least else 0


def _map(case: Case, tp: int, longest: int) -> MemoryMap:
    asked = case.asked
    assert case.shape is not None
    return memory_map(
        case.deployment(case.shape, case.parallel(tp)),
        max_num_seqs=asked.max_num_seqs or 1024,
        max_num_batched_tokens=asked.max_num_batched_tokens or 8192,
        max_model_len=longest,
        gpu_memory_utilization=asked.gpu_memory_utilization or 0.9,
        block_size=asked.block_size or 16,
    )
