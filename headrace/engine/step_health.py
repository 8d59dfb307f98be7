"""Tells whether steps fail one after the other: such an engine still runs its loop, but serves nobody.

A step fails if it raises, or if the model gives NaN or Inf logits to every row that samples. A request that forbids
every token harms itself alone; that is no failure of the step. Requests go on being tried, and after one step that
succeeds the engine is healthy again.
"""

from __future__ import annotations

import logging

from headrace.errors import HeadraceError
from headrace.step import LOGITS_NOT_FINITE, RunnerOutput

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""The engine is unhealthy after so many failed steps in a row."""


class StepHealth:
    """Counts the failed steps since the last one that succeeded."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the data type in which the model computes."""
        self.problem = ""
        """What is wrong, for /health; empty while the engine is healthy."""
        self._dtype = dtype
        self._failures = 0
        self._told = False
        """whether the log names float16 as a likely cause already"""

    def finished(self, result: RunnerOutput) -> None:
        """Take the result of a step. One that samples nothing, as a part of a prompt does, counts neither way."""
        if not result.token_ids:
            return
        overflow = (
            "; the engine computes in float16, whose largest number is 65504: a model trained in bfloat16 often "
            "overflows it (--dtype bfloat16 or --dtype float32 would tell)"
            if self._dtype == "float16"
            else ""
        )
        if overflow and not self._told and LOGITS_NOT_FINITE in result.token_ids:
            self._told = True
            logger.error("a request got NaN or Inf logits%s", overflow)
        if any(token != LOGITS_NOT_FINITE for token in result.token_ids):
            if self.problem:
                logger.info("steps succeed again; /health is green")
            self._failures, self.problem = 0, ""
            return
        self._count(f"the model gave every request NaN or Inf logits{overflow}")

    def failed(self, error: Exception) -> None:
        """Take the error of a step that raised one."""
        detail = f": {error}" if isinstance(error, HeadraceError) else ""  # other messages may name internals
        self._count(f"the last one with {type(error).__name__}{detail}")

    def _count(self, what: str) -> None:
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return
        if not self.problem:
            logger.error("/health turns red: %d steps in a row failed: %s", self._failures, what)
        self.problem = f"the last {self._failures} steps failed: {what}"
