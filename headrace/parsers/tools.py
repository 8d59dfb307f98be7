"""The tools of a request, and the types that their schemas give to text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON Schema of its arguments; {} if the request gave none."""
    strict: bool = False
    description: str = ""

    def property(self, name: str) -> dict[str, Any]:
        """The schema of one argument; {} where the tool says nothing of it."""
        properties = self.parameters.get("properties")
        found = properties.get(name) if isinstance(properties, dict) else None
        return found if isinstance(found, dict) else {}
