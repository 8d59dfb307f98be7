"""A step for which there was no memory: computed all the same, in parts, with what was cached given back.

A step that failed half-way may be computed again: it writes the same keys, values and tokens to the same places. Knows
nothing of why there was no memory.
"""

from __future__ import annotations

import msgspec

from headrace.errors import OutOfMemoryError
from headrace.runner.memory import DeviceMemory, is_out_of_memory
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep
from headrace.step import Logprobs, RunnerOutput, SchedulerOutput


def rescue(runner: ModelRunner, memory: DeviceMemory, step: SchedulerOutput, said: str) -> FinishedStep:
    """What `runner.execute(step)` would have given, but for drafts, which are left out; `said`: the words with which it
    failed.

    Raises OutOfMemoryError when there is no memory even for one token.
    """
    runner.keep_results()  # the step before may not have been read, and parts of this one would take its place
    memory.give_back()
    smaller = step.without_drafts()
    output, how = _attempt(runner, smaller), "computed once cached memory was given back"
    if output is None:
        runner.renew_graphs()
        memory.give_back()
        output, how = _in_parts(runner, memory, smaller, said), "computed in parts, and CUDA graphs were freed"
    note = f"step {step.step} of {step.num_tokens} tokens found no memory, and was {how}: {said}"
    return FinishedStep(
        msgspec.structs.replace(
            output,
            warnings=[*output.warnings, note],
            short_of_memory=True,
            graph_bytes=dict(runner.notes.graph_bytes),
            num_sampled=[int(samples) for samples in step.samples] if step.num_drafts else [],
        )
    )


def halves(step: SchedulerOutput) -> tuple[SchedulerOutput, SchedulerOutput] | None:
    """Two steps that do one after the other what `step` does; None for a single token."""
    if len(step.rows) > 1:
        middle, tokens = 0, 0
        while middle < len(step.rows) - 1 and (
            middle == 0 or tokens + step.num_scheduled_tokens[middle] <= step.num_tokens // 2
        ):
            tokens += step.num_scheduled_tokens[middle]
            middle += 1
        return _cut(step, 0, middle), _cut(step, middle, len(step.rows))
    count = step.num_scheduled_tokens[0]
    if count == 1:
        return None
    first = msgspec.structs.replace(step, num_scheduled_tokens=[count // 2], samples=[False])
    second = msgspec.structs.replace(
        _cut(step, 0, 1, rows_filled=True),
        num_computed_tokens=[step.num_computed_tokens[0] + count // 2],
        num_scheduled_tokens=[count - count // 2],
    )
    return first, second


def _cut(step: SchedulerOutput, begin: int, end: int, rows_filled: bool = False) -> SchedulerOutput:
    """The requests from `begin` to `end`; what the step does to rows is done with its first ones."""
    part = slice(begin, end)
    cut = msgspec.structs.replace(
        step,
        rows=step.rows[part],
        num_computed_tokens=step.num_computed_tokens[part],
        num_scheduled_tokens=step.num_scheduled_tokens[part],
        samples=step.samples[part],
    )
    if begin or rows_filled:
        return msgspec.structs.replace(
            cut, new_rows=[], freed_rows=[], block_updates=[], cleared_pages=[], state_copies=[]
        )
    return cut


def _attempt(runner: ModelRunner, step: SchedulerOutput) -> RunnerOutput | None:
    """None: no memory."""
    try:
        return runner.execute(step).result()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None


def _in_parts(runner: ModelRunner, memory: DeviceMemory, step: SchedulerOutput, said: str) -> RunnerOutput:
    parts = halves(step)
    if parts is None:
        raise OutOfMemoryError(f"no memory for a step of one token: {said}")
    outputs = []
    for part in parts:
        output = _attempt(runner, part)
        if output is None:
            memory.give_back()
            output = _in_parts(runner, memory, part, said)
        outputs.append(output)
    return join(step.step, outputs)


def join(number: int, outputs: list[RunnerOutput]) -> RunnerOutput:
    """The results of a step's parts as those of step `number`."""
    token_ids = [token for output in outputs for token in output.token_ids]
    logprobs: list[Logprobs | None] = []
    prompts: dict[int, list[Logprobs]] = {}
    for output in outputs:
        logprobs += output.logprobs or [None] * len(output.token_ids)
        for row, entries in output.prompt_logprobs.items():
            prompts.setdefault(row, []).extend(entries)
    notes = [note for output in outputs for note in output.notes]
    warnings = [warning for output in outputs for warning in output.warnings]
    return RunnerOutput(number, token_ids, logprobs if any(logprobs) else [], prompts, notes, warnings)
