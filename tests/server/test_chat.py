"""Shapes of /v1/chat/completions, whole and streamed, and how messages become a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import MODEL, TEXT, FakeEngine, chat, error_of, events, make_app


def prompt_of(messages: list[dict[str, Any]], **fields: Any) -> str:
    engine = FakeEngine()
    answer = chat(make_app(engine), messages=messages, max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[0]["prompt"]
    assert isinstance(prompt, str)
    return prompt


def test_answer_has_openai_shape() -> None:
    answer = chat(make_app(), max_tokens=4).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"content": "Once", "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    prompt_tokens = len("<|user|>Hello") + 1 + len("<|assistant|>")  # </s> is one token
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["total_tokens"] == prompt_tokens + 4


def test_template_is_rendered_and_not_given_special_tokens_again() -> None:
    engine = FakeEngine()
    chat(make_app(engine), max_tokens=1)
    assert engine.requests[0]["prompt"] == "<|user|>Hello</s><|assistant|>"
    assert engine.requests[0]["special"] is False


def test_without_max_tokens_the_context_is_the_limit() -> None:
    assert chat(make_app()).json()["choices"][0]["message"]["content"] == TEXT


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert chat(make_app(), max_tokens=9, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_roles_and_parts() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {
            "name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]  # fmt: skip
    assert prompt_of(messages) == (
        "<|system|>Be brief.</s><|user|>a\nb</s><|assistant|></s><|tool|>42</s><|assistant|>"
    )


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(messages, **fields) == "<|user|>Hi</s><|assistant|>Well, "
    assert error_of(chat(make_app(), continue_final_message=True), 400)["param"] == "continue_final_message"


@pytest.mark.parametrize("text", ["</", "s", "<", "|", "/s>", "  x", "x \n"])
def test_continue_final_message_whose_text_the_template_writes_too(text: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(messages, **fields) == f"<|user|>Hi</s><|assistant|>{text}"


def test_continue_final_message_needs_a_text() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  "}]
    answer = chat(make_app(), messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert "does not show the last message's text" in error_of(answer, 400)["message"]


def test_no_generation_prompt() -> None:
    assert prompt_of([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == "<|user|>Hi</s>"


def test_echo_repeats_the_assistants_last_message() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    fields = {"messages": messages, "echo": True, "max_tokens": 4}
    assert chat(make_app(), **fields).json()["choices"][0]["message"]["content"] == "Well, Once"
    found = events(chat(make_app(), stream=True, **fields))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found[:-1]) == "Well, Once"


def test_logprobs() -> None:
    content = chat(make_app(), max_tokens=2, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["O", "n"]
    assert [entry["bytes"] for entry in content] == [[79], [110]]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.0]
    alone = chat(make_app(), max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert alone == [{"token": "O", "logprob": -1.0, "bytes": [79], "top_logprobs": []}]


def test_no_top_logprobs_may_be_asked_for_without_logprobs() -> None:
    assert chat(make_app(), max_tokens=1, top_logprobs=0).json()["choices"][0]["logprobs"] is None


def test_prompt_logprobs() -> None:
    answer = chat(make_app(), max_tokens=1, prompt_logprobs=0, return_token_ids=True).json()
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 1


def test_stream() -> None:
    found = events(chat(make_app(), max_tokens=4, stream=True))
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    assert found[-1] == "[DONE]"
    assert choices[0] == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                          "finish_reason": None}  # fmt: skip
    assert [choice["delta"] for choice in choices[1:-1]] == [{"content": char} for char in "Once"]
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert {chunk["object"] for chunk in found[:-1]} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in found[:-1]}) == 1


def test_stream_of_several_choices_with_logprobs() -> None:
    found = events(chat(make_app(), max_tokens=2, n=2, stream=True, logprobs=True, top_logprobs=1))
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in found[:-1]:
        choice = chunk["choices"][0]
        seen[choice["index"]].append((choice["delta"].get("content"), choice["finish_reason"]))
        if choice["delta"].get("content"):
            assert len(choice["logprobs"]["content"]) == 1
    assert seen[0] == seen[1] == [("", None), ("O", None), ("n", None), (None, "length")]


def test_stream_usage() -> None:
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(chat(make_app(), max_completion_tokens=2, ignore_eos=True, stream=True, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in found[:-1]] == [0, 1, 2, 2, 2]
    assert found[-2]["choices"] == []
    plain = events(chat(make_app(), max_tokens=2, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] is None for chunk in plain[:-1]] == [True, True, True, True, False]
    assert plain[-2]["choices"] == []


BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "messages must not be empty"),
    ("hello", "messages: expected `array`, got `str` ('hello')"),
    ([{"content": "x"}], "messages[0].role is required"),
    ([{"role": "king", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content may be null for the assistant only"),
    ([{"role": "user"}], "messages[0].content may be null for the assistant only"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0] has no text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}], "text only"),
    ([{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "file:///x"}}]}], "text only"),
]


@pytest.mark.parametrize(("messages", "words"), BAD_MESSAGES, ids=str)
def test_bad_messages(messages: object, words: str) -> None:
    error = error_of(chat(make_app(), messages=messages), 400)
    assert words in error["message"]
    assert error["param"].startswith("messages")


def test_chat_needs_a_tokenizer() -> None:
    assert "without tokenizer" in error_of(chat(make_app(FakeEngine(with_tokenizer=False))), 400)["message"]
