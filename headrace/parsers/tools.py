"""Describes the tools of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FunctionTool:
    """Describes a function that the model may call."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON Schema of its arguments; {} if the request gave none."""
    strict: bool = False
    description: str = ""
