"""A step computed one token at a time, so that nothing beside a token can touch its bits: batch invariance on a CPU.

Matrix libraries, and vectorized loops with their rests, add up in another order for other numbers of rows. Here every
operation sees a batch of one token, whatever the step holds. Prompts then run at the pace of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.runner.model_runner import ModelRunner
from headrace.runner.pending import FinishedStep
from headrace.step import Logprobs, RunnerOutput, SchedulerOutput


def execute_one_by_one(runner: ModelRunner, step: SchedulerOutput) -> FinishedStep:
    """What `runner.execute` would give, computed already. Drafts would be in one batch with what they follow: they are
    left out."""
    token_ids: list[int] = []
    logprobs: list[Logprobs | None] = []
    prompt_logprobs: dict[int, list[Logprobs]] = {}
    num_sampled = [int(samples) for samples in step.samples] if step.num_drafts else []
    for single in single_tokens(step.without_drafts()):
        result = runner.execute(single).result()
        token_ids += result.token_ids
        logprobs += result.logprobs or [None] * len(result.token_ids)
        for row, entries in result.prompt_logprobs.items():
            prompt_logprobs.setdefault(row, []).extend(entries)
    wanted = logprobs if any(logprobs) else []
    return FinishedStep(RunnerOutput(step.step, token_ids, wanted, prompt_logprobs, num_sampled=num_sampled))


def single_tokens(step: SchedulerOutput) -> Iterator[SchedulerOutput]:
    """Steps of one token each, in the order of `step`'s; the first does what `step` does to the rows."""
    rows = msgspec.structs.replace(step, rows=[], num_computed_tokens=[], num_scheduled_tokens=[], samples=[])
    if not step.rows:
        yield rows
    for row, computed, count, samples in zip(
        step.rows, step.num_computed_tokens, step.num_scheduled_tokens, step.samples, strict=True
    ):
        for position in range(computed, computed + count):
            last = position == computed + count - 1
            yield msgspec.structs.replace(
                rows, rows=[row], num_computed_tokens=[position], num_scheduled_tokens=[1], samples=[samples and last]
            )
            rows = SchedulerOutput(step.step, [], [], [], [], [], [], [])
