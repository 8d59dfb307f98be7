"""Defines `Decision`: a setting as a record that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """Records the value of one setting, the reason, and the next best choice."""

    field: str
    value: Any
    reason: str
    runner_up: str = ""
    source: str = "derived"
    """user, derived or measured"""

    def __str__(self) -> str:
        other = f" (instead of {self.runner_up})" if self.runner_up else ""
        return f"{self.field} = {self.value}: {self.reason}{other}"
