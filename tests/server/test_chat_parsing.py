"""Reasoning and tool calls of a chat completion: shapes, finish reasons, and that a stream says what a whole answer
says, however its tokens come."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from starlette.applications import Starlette

from headrace.server import chat as chat_module
from tests.server.fake_engine import FakeEngine, chat, events, make_app, make_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}
    for name in ("look", "go")
]
NAMED = {"type": "function", "function": {"name": "look"}}
THINKS = "{{ messages[-1].content }}<think>"
LENGTH = 8192


def call_text(name: str, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def app_saying(text: str, *, template: str | None = None, special: tuple[str, ...] = (), **server: Any) -> Starlette:
    """A model that writes calls as hermes does and reasons between <think> and </think>."""
    engine = FakeEngine(text=text, tokenizer=make_tokenizer(template, special), max_model_len=LENGTH)
    engine.random_steps = random.Random(len(text))
    return make_app(engine, **{"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1", **server})


def whole(app: Starlette, **fields: Any) -> dict[str, Any]:
    answer = chat(app, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def without_ids(calls: list[dict[str, Any]] | None) -> Any:
    return None if calls is None else [(call["type"], call["function"]) for call in calls]


def joined(app: Starlette, index: int = 0, **fields: Any) -> dict[str, Any]:
    return put_together(events(chat(app, stream=True, **fields))[:-1], index)


def put_together(stream: list[Any], index: int = 0) -> dict[str, Any]:
    """A streamed choice, put together as a client does; the rules for deltas are checked on the way."""
    found: dict[str, Any] = {"content": None, "reasoning": None, "calls": [], "tokens": [], "ids": [], "finish": None}
    chunks = [chunk["choices"][0] for chunk in stream if chunk["choices"]]
    chunks = [chunk for chunk in chunks if chunk["index"] == index]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        found["tokens"] += [entry["token"] for entry in (chunk["logprobs"] or {"content": []})["content"]]
        found["ids"] += chunk.get("token_ids", [])
    for chunk in chunks[1:-1]:
        delta = chunk["delta"]
        assert chunk["finish_reason"] is None
        assert "role" not in delta
        assert delta
        assert all(delta.values())
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning"):
            if name in delta:
                found[name] = (found[name] or "") + delta[name]
        for call in delta.get("tool_calls", []):
            if call["index"] == len(found["calls"]):
                assert call["type"] == "function"
                assert call["id"]
                assert call["function"]["name"]
                assert call["function"]["arguments"] == ""
                found["calls"].append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                assert call["index"] == len(found["calls"]) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                found["calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    assert chunks[-1]["delta"] == {}
    found["finish"] = chunks[-1]["finish_reason"]
    return found


def test_calls_have_openais_shape() -> None:
    choice = whole(
        app_saying("Let me see. " + call_text("look", {"x": [1, "é"]}), reasoning_parser="none"), tools=TOOLS
    )
    message = choice["message"]
    assert re.fullmatch("chatcmpl-tool-[0-9a-f]{32}", message["tool_calls"][0].pop("id"))
    assert json.loads(message["tool_calls"][0]["function"].pop("arguments")) == {"x": [1, "é"]}
    assert message == {
        "content": message["content"], "role": "assistant", "refusal": None,
        "tool_calls": [{"type": "function", "function": {"name": "look"}}],
    }  # fmt: skip
    assert message["content"].strip() == "Let me see."
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_beside_nothing_but_calls() -> None:
    message = whole(app_saying("</think>" + call_text("go", {})), tools=TOOLS)["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "go", "arguments": "{}"}


def test_reasoning_has_both_names() -> None:
    message = whole(app_saying("hm, hm</think>Yes."))["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm, hm"
    assert message["content"] == "Yes."
    assert "tool_calls" not in message
    unthinking = whole(app_saying("Yes.", template="{{ messages[-1].content }}<think></think>"))["message"]
    assert (unthinking["reasoning"], unthinking["reasoning_content"], unthinking["content"]) == (None, None, "Yes.")


def test_reasoning_that_is_cut_leaves_no_content() -> None:
    choice = whole(app_saying("hm, hm, hm"), max_tokens=5)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "hm, h")
    assert choice["finish_reason"] == "length"


def random_text(choose: random.Random) -> str:
    words = ["sun", "é", "日本", "🙂", '"', "\\", "{", "}", "<", "<tool", "\n", "a < b", "</", "[1, 2]", "null", " "]
    return "".join(choose.choices(words, k=choose.randrange(12)))


def random_answer(choose: random.Random) -> str:
    """Reasoning, content and calls, or part of them."""

    def arguments() -> dict[str, Any]:
        return {"x": random_text(choose), random_text(choose): [1, {"y": None}]}

    calls = [call_text(choose.choice(["look", "go"]), arguments()) for _ in range(choose.randrange(3))]
    return f"{random_text(choose)}</think>{random_text(choose)}" + "\n".join(calls)


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_says_what_a_whole_answer_says(seed: int) -> None:
    choose = random.Random(seed)
    app = app_saying(random_answer(choose), special=("</think>", "<tool_call>") if seed % 2 else ())
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "n": 2}
    if seed % 3 == 0:
        fields["max_tokens"] = choose.randrange(1, 120)
    answer = chat(app, **fields).json()
    for index, choice in enumerate(answer["choices"]):
        stream = joined(app, index, **fields)
        message = choice["message"]
        assert (stream["content"] or None) == (message["content"] or None)
        assert stream["reasoning"] == message["reasoning"]
        assert without_ids(stream["calls"] or None) == without_ids(message.get("tool_calls"))
        assert stream["finish"] == choice["finish_reason"]
        assert stream["ids"] == choice["token_ids"]
        assert stream["tokens"] == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])


def test_plain_text_is_not_delayed() -> None:
    """Beside tools, every token of plain text is a delta of its own, at once."""
    engine = FakeEngine(text="Nothing to look at here.")
    found = events(chat(make_app(engine, tool_call_parser="hermes"), tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"].get("content") for chunk in found[1:-2]]
    assert deltas == list("Nothing to look at here.")


BOTH = call_text("look", {"x": 1}) + "\n" + call_text("go", {"x": 2})


@pytest.mark.parametrize(
    ("fields", "finish"),
    [
        ({}, "tool_calls"),
        ({"tool_choice": "auto"}, "tool_calls"),
        ({"max_tokens": 40}, "length"),
        ({"max_tokens": 3}, "length"),
        ({"tool_choice": "none"}, "stop"),
        ({"tools": None}, "stop"),
        ({"tools": []}, "stop"),
    ],
    ids=str,
)
def test_finish_reason(fields: dict[str, Any], finish: str) -> None:
    app = app_saying(BOTH, reasoning_parser="none")
    choice = whole(app, **{"tools": TOOLS, **fields})
    assert choice["finish_reason"] == joined(app, **{"tools": TOOLS, **fields})["finish"] == finish
    calls = choice["message"].get("tool_calls", [None])
    assert calls != []
    if finish == "stop":
        assert choice["message"]["content"] == BOTH


def test_a_stop_string_ends_an_answer_that_is_parsed() -> None:
    app = app_saying("hm</think>one STOP two")
    choice = whole(app, stop=["STOP"])
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("one ", "hm")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "STOP")
    assert joined(app, stop=["STOP"])["content"] == "one "


THOUGHT = "hm, " * 10 + "</think>Yes."


def test_reasoning_can_be_left_out() -> None:
    app = app_saying(THOUGHT)
    message = whole(app, include_reasoning=False)["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", None)
    stream = joined(app, include_reasoning=False, logprobs=True)
    assert (stream["content"], stream["reasoning"]) == ("Yes.", None)
    assert len(stream["tokens"]) == len(THOUGHT)


def test_reasoning_can_stay_in_the_content() -> None:
    assert whole(app_saying(THOUGHT), separate_reasoning=False)["message"]["content"] == THOUGHT


def test_reasoning_can_come_in_one_piece() -> None:
    found = events(chat(app_saying(THOUGHT), stream=True, stream_reasoning=False))
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["hm, " * 10]


def test_the_prompt_says_whether_reasoning_is_open() -> None:
    assert whole(app_saying(THOUGHT, template=THINKS))["message"]["reasoning"] == "hm, " * 10
    closed = "{{ messages[-1].content }}<think>\n\n</think>\n\n"
    assert whole(app_saying("Yes.", template=closed))["message"]["content"] == "Yes."


CONTINUED = "{% for m in messages %}|{{ m.content }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [("<think>hm", "more", None), ("<think>hm</think>Well, ", None, "more"), ("Well, ", None, "more")],
)
def test_an_answer_that_continues_a_message(said: str, reasoning: str | None, content: str | None) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": said}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    message = whole(app_saying("more", template=CONTINUED), **fields)["message"]
    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_usage_counts_reasoning_where_its_end_is_a_token() -> None:
    answer = chat(app_saying(THOUGHT, special=("</think>",)), n=2).json()["usage"]
    assert answer["completion_tokens_details"] == {"reasoning_tokens": 2 * len("hm, " * 10)}
    assert "completion_tokens_details" not in chat(app_saying(THOUGHT)).json()["usage"]
    assert "completion_tokens_details" not in chat(make_app()).json()["usage"]


def test_special_tokens_reach_the_parser_and_not_the_content() -> None:
    special = ("</think>", "<tool_call>", "<other>")
    text = "hm<other></think>Well<other>. " + call_text("go", {"x": "<other>"})
    app = app_saying(text, special=special)
    message = whole(app, tools=TOOLS)["message"]
    assert (message["reasoning"], message["content"].strip()) == ("hm", "Well.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": ""}
    stream = joined(app, tools=TOOLS)
    assert (stream["reasoning"], stream["content"].strip()) == ("hm", "Well.")
    assert "<other>" in whole(app, tools=TOOLS, skip_special_tokens=False)["message"]["content"]


def test_an_answer_without_anything_to_find_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(chat_module, "ChoiceParser")
    app = app_saying("Hello", reasoning_parser="none")
    assert whole(app)["message"] == {"content": "Hello", "role": "assistant", "refusal": None}
    assert whole(app, tools=TOOLS, tool_choice="none")["message"]["content"] == "Hello"
    assert len(events(chat(app, stream=True))) > 2


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.go <|constrain|>json<|message|>{"x": 1}'
)


@pytest.mark.parametrize("special", [(), CHANNELS])
def test_an_answer_in_channels(special: tuple[str, ...]) -> None:
    """One format reads all of it; what the request does not want is left out nevertheless."""
    flags = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    app = app_saying(HARMONY, special=special, **flags)
    choice = whole(app, tools=TOOLS)
    message, stream = choice["message"], joined(app, tools=TOOLS)
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("hm", "Wait.", "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "go", "arguments": '{"x": 1}'}
    assert (stream["reasoning"], stream["content"], stream["finish"]) == ("hm", "Wait.", "tool_calls")
    assert without_ids(stream["calls"]) == without_ids(message["tool_calls"])
    choice = whole(app)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Wait.")
    assert ("tool_calls" in choice["message"], choice["finish_reason"]) == (False, "stop")
    quiet = whole(app, tools=TOOLS, include_reasoning=False)["message"]
    assert (quiet["reasoning"], quiet["content"]) == (None, "Wait.")
