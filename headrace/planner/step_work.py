"""What a scheduled step has to compute, in the numbers that its cost depends on.

Lists are summed by C code: an engine asks this of every step. Knows no rates.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import mul

from headrace.planner.cost import StepWork
from headrace.step import SchedulerOutput


def work_of(step: SchedulerOutput) -> StepWork:
    """Requests that run one token count as decodes; they come first in a step."""
    computed, counts = step.num_computed_tokens, step.num_scheduled_tokens
    decodes = bisect_right(counts, 1)
    if decodes == len(counts):
        return StepWork(decodes, sum(computed) / decodes + 1 if decodes else 0.0)
    keys = sum(computed[:decodes]) / decodes + 1 if decodes else 0.0
    chunks = counts[decodes:]
    tokens = sum(chunks)
    pairs = sum(map(mul, chunks, computed[decodes:])) + (sum(map(mul, chunks, chunks)) + tokens) / 2
    return StepWork(decodes, keys, tokens, pairs / tokens, len(chunks))
