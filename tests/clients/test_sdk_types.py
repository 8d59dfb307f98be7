"""Every body and every event of the Responses, Messages and embeddings APIs is what the SDKs' own types describe.

The SDKs build their objects without checking; here pydantic checks each against the type that it is read as.
"""

from __future__ import annotations

from typing import Any

import httpx
import openai.types
import openai.types.responses
import pydantic
import pytest

from tests.clients.tasks import FOUR, TOOLS, Task, imported_where_used
from tests.scripted.engine import Scripted
from tests.server.fake_engine import named_events
from tests.speed import PATIENCE

imported_where_used("anthropic")
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)


def post(scripted: Scripted, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the body of an answer, or the data of each event of a stream."""
    answer = httpx.post(f"{scripted.url}{path}", json={"model": scripted.name, **body}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return named_events(answer) if body.get("stream") else [answer.json()]


def known(model: pydantic.BaseModel) -> None:
    """No field of ours is one that the SDK's type does not have: such a field is a misspelling, or is said here."""
    ours = {  # of other versions
        "Response": {"user", "store"}, "ResponseFunctionCallArgumentsDoneEvent": {"name"},
        "Logprob": {"bytes"}, "LogprobTopLogprob": {"bytes"},
    }  # fmt: skip
    extra = set(model.model_extra or ()) - ours.get(type(model).__name__, set())
    assert not extra, (type(model).__name__, extra)
    for _, value in model:
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, pydantic.BaseModel):
                known(entry)


@FOUR
@pytest.mark.parametrize("summary", [None, "auto"])
def test_responses(scripted: Scripted, task: Task, stream: bool, summary: str | None) -> None:
    tools = [{"type": "function"} | one["function"] for one in TOOLS]
    reasoning = {"summary": summary} if summary else None
    said: list[Any] = [{"role": "user", "content": task.question}]
    for _ in range(3):
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        body = {"input": said, "tools": tools, "stream": stream, "reasoning": reasoning, **asked}
        found = post(scripted, "/v1/responses", body)
        last = found[-1]["response"] if stream else found[-1]
        for event in found if stream else ():
            known(EVENT.validate_python(event))
        whole = openai.types.responses.Response.model_validate(last)
        known(whole)
        calls = [item for item in whole.output if item.type == "function_call"]
        said += last["output"]
        for call in calls:
            result = task.run_json(call.name, call.arguments)
            said.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    stored = httpx.get(f"{scripted.url}/v1/responses/{last['id']}", timeout=PATIENCE).json()
    assert openai.types.responses.Response.model_validate(stored).output_text == whole.output_text


@FOUR
def test_messages(scripted: Scripted, task: Task, stream: bool) -> None:
    import anthropic.types

    event_type: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (tool["function"] for tool in TOOLS)
    ]
    body = {"messages": [{"role": "user", "content": task.question}], "tools": tools, "max_tokens": 2000}
    for found in post(scripted, "/v1/messages", body | {"stream": stream}):
        if found["type"] == "ping":
            continue
        shape = event_type.validate_python(found) if stream else anthropic.types.Message.model_validate(found)
        known(shape)
    (count,) = post(scripted, "/v1/messages/count_tokens", {name: body[name] for name in ("messages", "tools")})
    known(anthropic.types.MessageTokensCount.model_validate(count))
