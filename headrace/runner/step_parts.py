"""Computes a step in several parts: smaller ones where memory ran out, single tokens for batch invariance on a CPU.

A part writes the same keys, values and tokens to the same places as the whole step, so a step that failed half-way may
be computed again. Where layers keep a recurrent state it may not: the state would be updated twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.errors import OutOfMemoryError
from headrace.pooling import Pooled
from headrace.runner.memory import DeviceMemory, is_out_of_memory
from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep
from headrace.step import Logprobs, Masks, RunnerOutput, SchedulerOutput


def execute_token_by_token(runner: ModelRunner, step: SchedulerOutput, masks: Masks | None = None) -> FinishedStep:
    """Compute what `runner.execute` would, one token at a time, so that no token's result depends on another's.

    Matrix libraries add up in another order for other numbers of rows; here every operation has one row. Prompts
    therefore run at the speed of decoding. Drafts are left out, since they would share a batch with their request.
    """
    outputs = [runner.execute(token, masks).result() for token in single_tokens(step.without_drafts())]
    return FinishedStep(join(step, outputs))


def execute_with_less_memory(
    runner: ModelRunner, memory: DeviceMemory, step: SchedulerOutput, failure: str, masks: Masks | None = None
) -> FinishedStep:
    """Compute a step that ran out of memory, as the message `failure` says, without its drafts.

    Cached memory is freed first; if that is not enough, CUDA graphs are freed and the step is halved until its parts
    fit. Raises OutOfMemoryError if there is not even memory for one token, or if layers keep a recurrent state.
    """
    runner.keep_results()  # the step before may not have been read, and parts of this one would take its place
    memory.empty_cache()
    if any(group.is_state for group in runner.shape.layout.groups):
        raise OutOfMemoryError(f"no memory for a step of {step.num_tokens} tokens over recurrent states: {failure}")
    smaller = step.without_drafts()
    whole = _attempt(runner, smaller, masks)
    if whole is not None:
        outputs, how = [whole], "computed once cached memory was freed"
    else:
        runner.renew_graphs()
        memory.empty_cache()
        outputs = _in_parts(runner, memory, smaller, failure, masks)
        how = "computed in parts, and CUDA graphs were freed"
    output = join(step, outputs)
    note = f"step {step.step} of {step.num_tokens} tokens found no memory, and was {how}: {failure}"
    return FinishedStep(
        msgspec.structs.replace(
            output,
            warnings=[*output.warnings, note],
            short_of_memory=True,
            graph_bytes=dict(runner.notes.graph_bytes),
        )
    )


def halves(step: SchedulerOutput) -> tuple[SchedulerOutput, SchedulerOutput] | None:
    """Return two steps that together do what `step` does; None if it has one token or none.

    Requests are divided first; a request alone is divided by its tokens.
    """
    if step.num_tokens <= 1:
        return None
    if len(step.rows) > 1:
        middle, tokens = 0, 0
        while middle < len(step.rows) - 1 and (
            middle == 0 or tokens + step.num_scheduled_tokens[middle] <= step.num_tokens // 2
        ):
            tokens += step.num_scheduled_tokens[middle]
            middle += 1
        return _requests(step, 0, middle), _without_updates(_requests(step, middle, len(step.rows)))
    count = step.num_scheduled_tokens[0]
    first = msgspec.structs.replace(step, num_scheduled_tokens=[count // 2], samples=[False])
    second = msgspec.structs.replace(
        _without_updates(step),
        num_computed_tokens=[step.num_computed_tokens[0] + count // 2],
        num_scheduled_tokens=[count - count // 2],
    )
    return first, second


def single_tokens(step: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """Yield steps of one token each that together do what `step` does; a step without tokens is yielded as it is."""
    parts = halves(step)
    if parts is None:
        yield step
    for part in parts or ():
        yield from single_tokens(part)


def _requests(step: SchedulerOutput, begin: int, end: int) -> SchedulerOutput:
    part = slice(begin, end)
    return msgspec.structs.replace(
        step,
        rows=step.rows[part],
        num_computed_tokens=step.num_computed_tokens[part],
        num_scheduled_tokens=step.num_scheduled_tokens[part],
        samples=step.samples[part],
    )


def _without_updates(step: SchedulerOutput) -> SchedulerOutput:
    """Return `step` without its changes to rows, blocks and pages, which the part before it has made."""
    return msgspec.structs.replace(
        step,
        new_rows=[],
        freed_rows=[],
        block_updates=[],
        cleared_pages=[],
        state_copies=[],
        adapter_loads=[],
    )


def _attempt(runner: ModelRunner, step: SchedulerOutput, masks: Masks | None) -> RunnerOutput | None:
    """Return the step's result; None if it ran out of memory."""
    try:
        return runner.execute(step, masks).result()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return None


def _in_parts(
    runner: ModelRunner, memory: DeviceMemory, step: SchedulerOutput, failure: str, masks: Masks | None
) -> list[RunnerOutput]:
    whole = len(step.rows) == 1 and any(spec is not None and not spec.causal for spec in runner.shape.specs)
    parts = None if whole else halves(step)
    if parts is None:
        of = "one text, which is computed whole" if whole else "one token"
        raise OutOfMemoryError(f"no memory for a step of {of}: {failure}")
    outputs = []
    for part in parts:
        output = _attempt(runner, part, masks)
        if output is None:
            memory.empty_cache()
            outputs += _in_parts(runner, memory, part, failure, masks)
        else:
            outputs.append(output)
    return outputs


def join(step: SchedulerOutput, outputs: list[RunnerOutput]) -> RunnerOutput:
    """Return the results of the parts of `step`, computed without its drafts, as one result."""
    logprobs: list[Logprobs | None] = []
    prompts: dict[int, list[Logprobs]] = {}
    pooled: dict[int, Pooled] = {}
    for output in outputs:
        for row, made in output.pooled.items():
            before = pooled.get(row)
            pooled[row] = made if before is None else Pooled(before.data + made.data, made.width)
        logprobs += output.logprobs or [None] * len(output.token_ids)
        for row, entries in output.prompt_logprobs.items():
            prompts.setdefault(row, []).extend(entries)
    return RunnerOutput(
        step.step,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs if any(logprobs) else [],
        prompt_logprobs=prompts,
        notes=[note for output in outputs for note in output.notes],
        warnings=[warning for output in outputs for warning in output.warnings],
        num_sampled=[int(samples) for samples in step.samples] if step.num_drafts else [],
        drafts={row: drafts for output in outputs for row, drafts in output.drafts.items()},
        pooled=pooled,
    )
