"""Structured answers with instructor: its modes, and its loop, which gives a model that fails a check another try."""

from __future__ import annotations

from typing import Any

import openai
import pydantic
import pytest

from tests.clients.tasks import FOUR, imported_where_used
from tests.scripted.engine import Scripted
from tests.scripted.families import Call, Said
from tests.speed import PATIENCE

imported_where_used("instructor")

MODES = pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
ASK: list[Any] = [{"role": "user", "content": "Who is it?"}]


class Person(pydantic.BaseModel):
    """A person."""

    name: str
    age: int
    nicknames: list[str]

    @pydantic.field_validator("age")
    @classmethod
    def is_grown(cls, age: int) -> int:
        if age < 18:
            raise ValueError("must be of age")
        return age


def client_of(scripted: Scripted, mode: str) -> Any:
    import instructor

    sdk = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    return instructor.from_openai(sdk, mode=instructor.Mode[mode])


def said(scripted: Scripted, mode: str, function: str, **fields: Any) -> Said:
    thought = "A thought." if scripted.family.thinks else None
    if mode == "TOOLS":
        return Said("", (Call(function, fields),), thought, held=True)
    return Said(Person.model_construct(**fields).model_dump_json(), (), thought, held=True)


@FOUR
@MODES
def test_a_second_try(scripted: Scripted, mode: str) -> None:
    """Call, the check's complaint as its result, second call, answer."""
    wrong, right = ({"name": "Zoë", "age": age, "nicknames": ["Z", "O'Z"]} for age in (7, 41))
    scripted.play(
        ("", said(scripted, mode, "Person", **wrong)), ("must be of age", said(scripted, mode, "Person", **right))
    )
    found = client_of(scripted, mode).create(
        model=scripted.name, messages=ASK, response_model=Person, max_retries=2
    )  # fmt: skip
    assert found.model_dump() == right
    assert len(scripted.prompts) == 2


@FOUR
@MODES
def test_partial(scripted: Scripted, mode: str) -> None:
    """The object grows while it is streamed."""
    right = {"name": "Zoë " * 10, "age": 41, "nicknames": ["Z"] * 5}
    scripted.play(("", said(scripted, mode, "PartialPerson", **right)))
    with scripted.pace(0.001):
        seen = [*client_of(scripted, mode).create_partial(model=scripted.name, messages=ASK, response_model=Person)]
    assert seen[-1].model_dump() == right
    assert len({one.model_dump_json() for one in seen}) > 3
