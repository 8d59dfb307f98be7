"""The task that every client's agent works on: it asks two tools, one after the other, and answers.

Names and numbers are fresh each time, with characters that formats of calls quote or escape.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pydantic
import pytest

from tests.scripted.engine import Scripted
from tests.scripted.families import Call, Family, Said

CITIES = ["Paris", "Zürich", "São Paulo", "北京", 'the "Old" Town', "Back\\slash", "O'Fallon", "A, B & C", "x < y > z"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The temperature in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer", "description": "Days ahead"},
                "exact": {"type": "boolean", "description": "To a tenth"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SUM: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "numbers": {"type": "array", "items": {"type": "number"}, "description": "Any"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Or null"},
            },
            "required": ["numbers"],
        },
    },
}
TOOLS = [WEATHER, SUM]
FOUR = pytest.mark.parametrize("scripted", ["qwen3", "gpt-oss", "qwen3-coder", "pythonic"], indirect=True)
"""With a family of each kind: thoughts or none, JSON, channels, tags or Python"""
ONE = pytest.mark.parametrize("scripted", ["qwen3"], indirect=True)


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int


def imported_where_used(client: str) -> None:
    """Skip a file of tests if its client is not installed. Tests import clients themselves: each takes seconds, and
    every process that shares the suite imports every file."""
    if find_spec(client) is None:
        pytest.skip(f"{client} is not installed", allow_module_level=True)


@dataclass(frozen=True)
class Task:
    """Two calls and an answer. `done`: the calls that a client's tools have received."""

    family: Family
    city: str
    temperature: int
    days: int
    done: list[Call] = field(default_factory=list)

    @classmethod
    def fresh(cls, family: Family) -> Task:
        draw = random.Random()
        return cls(family, draw.choice(CITIES), draw.randrange(-30, 45), draw.randrange(1, 10))

    @property
    def question(self) -> str:
        return f"What is the temperature of {self.city} in {self.days} days, plus one?"

    @property
    def calls(self) -> list[Call]:
        return [
            Call("get_weather", {"city": self.city, "days": self.days, "exact": True}),
            Call("add", {"numbers": [self.temperature, 1], "note": None}),
        ]

    @property
    def results(self) -> list[str]:
        return [f"it is {self.temperature} degrees", f"the sum is {self.temperature + 1}"]

    @property
    def answer(self) -> str:
        return f"{self.temperature + 1} degrees <b>in</b> {self.city}."

    @property
    def thoughts(self) -> list[str]:
        """What the model thinks in each turn, if its family does."""
        return ["First the weather of that city.", f"{self.temperature} and 1.", "That is it."]

    def turns(self) -> list[tuple[str, Said]]:
        """The transcript: each turn comes once the result before it is in the prompt."""
        thoughts = [*self.thoughts] if self.family.thinks else [None] * 3
        first, second = self.calls
        return [
            ("", Said(calls=(first,), reasoning=thoughts[0])),
            (self.results[0], Said(calls=(second,), reasoning=thoughts[1])),
            (self.results[1], Said(content=self.answer, reasoning=thoughts[2])),
        ]

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool. Raises AssertionError if the call is not the one that the model wrote next."""
        number = len(self.done)
        call = Call(name, arguments)
        assert call == self.calls[number]
        self.done.append(call)
        return self.results[number]

    def functions(self) -> list[Callable[..., str]]:
        """Its tools, for clients that read what a tool takes from a function."""

        def get_weather(city: str, days: int, exact: bool = False) -> str:
            """The temperature in a city."""
            return self.run("get_weather", {"city": city, "days": days, "exact": exact})

        def add(numbers: list[float], note: str | None = None) -> str:
            """Adds numbers."""
            return self.run("add", {"numbers": numbers, "note": note})

        return [get_weather, add]

    def run_json(self, name: str, arguments: str) -> str:
        return self.run(name, json.loads(arguments))

    def check(self, scripted: Scripted, answer: str | None) -> None:
        """The agent got its answer, and the model saw each of its calls, with the result, as it had written it."""
        assert answer == self.answer
        assert self.done == self.calls
        assert len(scripted.prompts) == 3
        for number, call in enumerate(self.calls):
            written = self.family.write(Said(calls=(call,)), number)
            for end in (*self.family.ends, "\n"):  # templates end a turn in their own way
                written = written.removesuffix(end)
            for prompt in scripted.prompts[number + 1 :]:
                assert written.strip("\n") in prompt
                assert self.results[number] in prompt
