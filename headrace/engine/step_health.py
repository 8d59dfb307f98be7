"""Whether steps succeed: an engine whose steps fail one after the other still steps, but serves nobody.

A step fails when it raises, or when the model gives every row that samples NaN or Inf logits. What a request does to
itself (by forbidding every token) is no failure of the step. Requests go on being tried, and one step that succeeds is
enough to be healthy again.
"""

from __future__ import annotations

import logging

from headrace.errors import HeadraceError
from headrace.step import LOGITS_NOT_FINITE, RunnerOutput

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""So many steps that fail one after the other are no accident."""


class StepHealth:
    def __init__(self, dtype: str) -> None:
        """`dtype`: what the engine computes in."""
        self.problem = ""
        """what is wrong, for /health; empty while steps succeed"""
        self._dtype = dtype
        self._failures = 0

    def finished(self, result: RunnerOutput) -> None:
        """A step that samples nothing (a part of a prompt) shows neither."""
        if not result.token_ids:
            return
        if any(token != LOGITS_NOT_FINITE for token in result.token_ids):
            if self.problem:
                logger.info("steps succeed again; /health is green")
            self._failures, self.problem = 0, ""
            return
        overflow = (
            "; the engine computes in float16, whose largest number is 65504: a model trained in bfloat16 often "
            "overflows it (--dtype bfloat16 or --dtype float32 would tell)"
            if self._dtype == "float16"
            else ""
        )
        self._count(f"the model gave every request NaN or Inf logits{overflow}")

    def failed(self, error: Exception) -> None:
        said = f": {error}" if isinstance(error, HeadraceError) else ""  # other words may name internals
        self._count(f"the last one with {type(error).__name__}{said}")

    def _count(self, what: str) -> None:
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return
        if not self.problem:
            logger.error("/health turns red: %d steps in a row failed: %s", self._failures, what)
        self.problem = f"the last {self._failures} steps failed: {what}"
