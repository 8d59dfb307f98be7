"""Agents on the Responses API, written with openai's SDK: tools, streams, stored turns, formats, background."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.tasks import FOUR, ONE, TOOLS, Person, Task
from tests.scripted.engine import Scripted
from tests.scripted.families import Said
from tests.speed import PATIENCE, wait_until

FLAT: list[Any] = [{"type": "function"} | one["function"] for one in TOOLS]


@pytest.fixture
def client(scripted: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as sdk:
        yield sdk


def ask(client: openai.OpenAI, stream: bool, **fields: Any) -> Any:
    """Return the whole response, put together by the SDK from the events of a stream."""
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        numbers = [event.sequence_number for event in events]
        assert numbers == [*range(len(numbers))]
        return events.get_final_response()


@FOUR
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "sent-again"])
def test_agent(client: openai.OpenAI, scripted: Scripted, task: Task, stream: bool, stored: bool) -> None:
    before: dict[str, Any] = {}
    given: list[Any] = [{"role": "user", "content": task.question}]
    for turn in range(3):
        answer = ask(client, stream, model=scripted.name, input=given, tools=FLAT, store=stored, **before)
        assert answer.status == "completed"
        thoughts = [part.text.strip() for item in answer.output if item.type == "reasoning" for part in item.content]
        assert thoughts == ([task.thoughts[turn]] if scripted.family.thinks else [])
        results = [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": task.run_json(item.name, item.arguments),
            }
            for item in answer.output
            if item.type == "function_call"
        ]
        if stored:
            given, before = results, {"previous_response_id": answer.id}
        else:
            given = [*given, *(item.to_dict() for item in answer.output), *results]
    task.check(scripted, answer.output_text.strip())
    assert answer.usage.output_tokens > 0
    if scripted.family.name == "qwen3":  # gpt-oss's reasoning ends with no token of its own
        assert answer.usage.output_tokens_details.reasoning_tokens > 0


@ONE
def test_parsed_format_and_instructions(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted.answer('{"name": "Zoë", "age": 41}')
    answer = client.responses.parse(
        model=scripted.name, instructions="Be brief.", text_format=Person,
        input=[{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Who?"}],
    )  # fmt: skip
    assert answer.output_parsed == Person(name="Zoë", age=41)
    assert "Be brief.\n\nBe kind." in scripted.prompts[0]


@ONE
def test_a_summary_is_the_reasoning(client: openai.OpenAI, scripted: Scripted, stream: bool) -> None:
    scripted.play(("", Said(content="Yes.", reasoning="Because.")))
    answer = ask(client, stream, model=scripted.name, input="Is it?", reasoning={"summary": "auto"})
    (thought,) = [item for item in answer.output if item.type == "reasoning"]
    assert [part.text.strip() for part in thought.summary] == ["Because."]
    assert not thought.content


@FOUR
def test_logprobs_are_those_of_the_text_alone(client: openai.OpenAI, scripted: Scripted, stream: bool) -> None:
    scripted.say("It is: Zürich.", reasoning="It is." if scripted.family.thinks else None)
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    part = ask(client, stream, model=scripted.name, input="Which?", **asked).output[-1].content[0]
    assert part.text.strip() == "It is: Zürich."
    assert bytes(b for one in part.logprobs for b in one.bytes).decode() == part.text
    assert {len(one.top_logprobs) for one in part.logprobs} == {1}


@ONE
def test_stored_answers(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted.answer("Yes.")
    made = client.responses.create(model=scripted.name, input="Is it?")
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=scripted.name, input="And?", previous_response_id=made.id)
    unkept = client.responses.create(model=scripted.name, input="Is it?", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


@ONE
def test_background(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted.answer("Yes.")
    made = client.responses.create(model=scripted.name, input="Is it?", background=True)
    assert made.status == "queued"
    wait_until(lambda: client.responses.retrieve(made.id).status not in ("queued", "in_progress"))
    found = client.responses.retrieve(made.id)
    assert (found.status, found.output_text.strip()) == ("completed", "Yes.")
    assert client.responses.cancel(made.id).status == "completed"


@ONE
def test_the_end_of_tokens_is_told(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted.answer(json.dumps("word " * 50))
    answer = client.responses.create(model=scripted.name, input="Say it.", max_output_tokens=6)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@ONE
def test_built_in_tools_are_refused_by_name(client: openai.OpenAI, scripted: Scripted) -> None:
    with pytest.raises(openai.BadRequestError, match="'web_search'"):
        client.responses.create(model=scripted.name, input="Find it.", tools=[{"type": "web_search"}])
