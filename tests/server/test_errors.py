"""Every invalid input gets an OpenAI error object that names the field, the value and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import HeadraceError, StepsFailError
from tests.server.fake_engine import FakeEngine, chat, complete, error_of, events, make_app, post, send

JSON = {"content-type": "application/json"}
HUGE = 10**30
BAD_SAMPLING: list[tuple[str, Any, str]] = [
    # field, value, words that the message must have
    ("n", 0, "between 1 and 128"),
    ("n", 129, "129"),
    ("n", HUGE, "between 1 and 128"),
    ("n", "2", "expected `int"),
    ("n", True, "expected `int"),
    ("best_of", 2, "best_of must equal n (1)"),
    ("best_of", 10**9, "best_of"),
    ("temperature", -0.1, "-0.1"),
    ("temperature", 1000, "[0, 100]"),
    ("temperature", "hot", "'hot'"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.5, "1.5"),
    ("top_k", -2, "-2"),
    ("top_k", 1.5, "1.5"),
    ("min_p", 1.1, "[0, 1]"),
    ("presence_penalty", 3, "[-2, 2]"),
    ("frequency_penalty", -3, "[-2, 2]"),
    ("repetition_penalty", 0, "(0, 100]"),
    ("seed", HUGE, "seed"),
    ("stop", "", "non-empty"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", "x" * 257, "256"),
    ("stop", ["a", 5], "stop[1]: expected `str`, got `int` (5)"),
    ("stop_token_ids", [0] * 65, "at most 64"),
    ("stop_token_ids", [512], "512"),
    ("stop_token_ids", [2**40], "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", "5", "expected `array"),
    ("bad_words", ["x"] * 65, "at most 64"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "-1"),
    ("max_tokens", 1.5, "1.5"),
    ("max_tokens", HUGE, "max_tokens"),
    ("max_tokens", 252, "256"),
    ("min_tokens", 300, "min_tokens"),
    ("min_tokens", -1, "-1"),
    ("prompt_logprobs", 21, "20"),
    ("prompt_logprobs", -1, "-1"),
    ("logit_bias", {"5": 101}, "[-100, 100]"),
    ("logit_bias", {"512": 1}, "512"),
    ("logit_bias", {str(2**40): 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "a key of logit_bias must be a token id (an integer >= 0), got -1"),
    ("logit_bias", {"a": 1}, "key of logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "1024"),
    ("allowed_token_ids", [], "must not be empty"),
    ("allowed_token_ids", [512], "512"),
    ("allowed_token_ids", [2**40], "allowed_token_ids"),
    ("ignore_eos", "yes", "'yes'"),
    ("stream", "true", "expected `bool"),
    ("stream_options", {"include_usage": True}, "only allowed when stream is true"),
    ("response_format", {"type": "json_schema", "json_schema": {}}, "json_schema.schema"),
    ("response_format", {"type": "poem"}, "'poem'"),
    ("response_format", "json", "response_format"),
    ("structured_outputs", {"choices": ["a"]}, "the field is `choice`"),
    ("structured_outputs", {"regex": "a", "json": {}}, "exactly one"),
    ("structured_outputs", 5, "object"),
    ("guided_json", "{", "guided_json is not JSON"),
    ("guided_regex", "(?=a)", "look-around"),
    ("guided_choice", [], "1 to 10000 texts"),
    ("guided_grammar", "start: x", "guided_grammar: at"),
    ("ebnf", "a ::= b", "no rule `root`"),
    ("json_schema", {"type": "string", "pattern": "["}, "json_schema: unclosed"),
    ("grammar", "root ::= (", "is not closed"),
    ("truncate_prompt_tokens", 5, "not yet supported"),
    ("priority", 1, "--scheduling-policy"),
    ("priority", HUGE, "priority"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * 257, "256"),
]


def name(case: tuple[str, Any, str]) -> str:
    return f"{case[0]}={case[1]!r:.20}"


@pytest.mark.parametrize("case", BAD_SAMPLING, ids=name)
@pytest.mark.parametrize("route", [complete, chat], ids=["completions", "chat"])
def test_bad_parameter(route: Any, case: tuple[str, Any, str]) -> None:
    field, value, words = case
    engine = FakeEngine()
    error = error_of(route(make_app(engine), **{field: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == field
    assert words in error["message"]
    assert not engine.requests


BAD_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("prompt", "", "must not be empty"),
    ("prompt", [], "must not be empty"),
    ("prompt", [[]], "must not be empty"),
    ("prompt", [""], "must not be empty"),
    ("prompt", ["a", ""], "prompt[1] must not be empty"),
    ("prompt", [[1], []], "prompt[1] must not be empty"),
    ("prompt", None, "prompt: expected `str`, got `null`"),
    ("prompt", 5, "prompt: expected `str`, got `int`"),
    ("prompt", {"a": 1}, "prompt: expected `str`, got `object`"),
    ("prompt", [1, "a"], "prompt[1]: expected `int`, got `str` ('a')"),
    ("prompt", ["a", 1], "prompt[1]: expected `str`, got `int` (1)"),
    ("prompt", [[1], "a"], "prompt[1]: expected `array`, got `str` ('a')"),
    ("prompt", [[1, [2]]], "prompt[0][1]: expected `int`, got `array`"),
    ("prompt", [1.5], "prompt[0]: expected `int`, got `float` (1.5)"),
    ("prompt", [True], "prompt[0]: expected `int`, got `bool`"),
    ("prompt", [512], "512"),
    ("prompt", [-1], "-1"),
    ("prompt", [HUGE], "vocabulary"),
    ("prompt", [5] * 256, "256"),
    ("prompt", "x" * 300, "256"),
    ("logprobs", 21, "between 0 and 20"),
    ("logprobs", -1, "-1"),
    ("logprobs", True, "expected `int"),
    ("suffix", "x", "not yet supported"),
    ("prompt_embeds", "x", "not yet supported"),
]


@pytest.mark.parametrize("case", BAD_COMPLETIONS, ids=name)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion(case: tuple[str, Any, str], stream: bool) -> None:
    field, value, words = case
    engine = FakeEngine()
    error = error_of(complete(make_app(engine), **{field: value}, stream=stream), 400)
    assert error["param"].partition("[")[0] == field
    assert words in error["message"]
    assert not engine.requests


BAD_CHATS: list[tuple[str, Any, str]] = [
    ("top_logprobs", 2, "needs logprobs"),
    ("top_logprobs", 21, "between 0 and 20"),
    ("logprobs", 2, "expected `bool"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("chat_template", "{{ 1 }}", "--chat-template"),
    ("chat_template_kwargs", {f"k{i}": 1 for i in range(33)}, "32"),
    ("chat_template_kwargs", [], "expected `object"),
]


@pytest.mark.parametrize("case", BAD_CHATS, ids=name)
def test_bad_chat(case: tuple[str, Any, str]) -> None:
    field, value, words = case
    error = error_of(chat(make_app(), **{field: value}), 400)
    assert error["param"].partition("[")[0] == field
    assert words in error["message"]


def test_prompt_is_required() -> None:
    assert error_of(post(make_app(), "/v1/completions", {}), 400)["message"] == "prompt is required"
    assert error_of(post(make_app(), "/v1/chat/completions", {}), 400)["message"] == "messages is required"


BAD_BODIES = [
    b"",
    b"{",
    b"[1]",
    b"null",
    b'"prompt"',
    b'{"prompt": "a"',
    b'{"prompt": "a",}',
    b"{'prompt': 'a'}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "unknown": NaN}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b"prompt=a",
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: repr(body[:40]))
def test_wrong_json(body: bytes) -> None:
    error = error_of(send(make_app(), "POST", "/v1/completions", content=body, headers=JSON), 400)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
     {"content-type": "application/jsonp"}, {"content-type": "application/json", "content-encoding": "gzip"}],
)  # fmt: skip
def test_wrong_content_type(path: str, headers: dict[str, str]) -> None:
    answer = send(make_app(), "POST", path, content=b'{"prompt": "a"}', headers=headers)
    assert error_of(answer, 415)["code"] == "unsupported_media_type"


def test_content_type_with_charset() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert send(make_app(), "POST", "/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_huge_body(path: str) -> None:
    app = make_app(max_request_bytes=2048)
    body = b'{"prompt": "' + b"a" * 2048 + b'"}'
    error = error_of(send(app, "POST", path, content=body, headers=JSON), 413)
    assert "2048" in error["message"]

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    assert error_of(send(app, "POST", path, content=pieces(), headers=JSON), 413)["code"] == "request_too_large"


def test_unknown_model() -> None:
    for answer in (complete(make_app(), model="gpt-5"), chat(make_app(), model="gpt-5"),
                   send(make_app(), "GET", "/v1/models/gpt-5"),
                   post(make_app(), "/tokenize", {"model": "gpt-5", "prompt": "a"})):  # fmt: skip
        error = error_of(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-5" in error["message"]
        assert "tiny" in error["message"]


def test_unknown_route_and_method() -> None:
    for path in ("/v1", "/v1/images", "/v1/completions/", "//v1/completions", "/health/"):
        assert error_of(send(make_app(), "GET", path), 404)["code"] == "not_found"
    answer = send(make_app(), "GET", "/v1/completions")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    answer = send(make_app(), "POST", "/health")
    assert error_of(answer, 405)["message"] == "method not allowed: POST /health"
    assert answer.headers["allow"] == "GET, HEAD"


def test_dead_engine_is_503_before_the_first_byte() -> None:
    engine = FakeEngine()
    engine.dead = True
    for stream in (False, True):
        assert error_of(complete(make_app(engine), stream=stream), 503)["code"] == "engine_dead"
    assert error_of(send(make_app(engine), "GET", "/health"), 503)["message"].startswith("the engine is dead")


def test_health_says_why_steps_fail() -> None:
    engine = FakeEngine()
    engine.dead, engine.error = True, StepsFailError("the last 3 steps failed: NaN")
    error = error_of(send(make_app(engine), "GET", "/health"), 503)
    assert (error["code"], error["message"]) == ("steps_fail", "the last 3 steps failed: NaN")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_death_in_mid_stream_is_one_event_and_no_done(prompt: Any) -> None:
    engine = FakeEngine()
    engine.fail_at = 3
    found = events(complete(make_app(engine), prompt=prompt, stream=True))
    assert found[-1]["error"]["code"] == "engine_dead"
    assert sum("error" in event for event in found) == 1
    assert "[DONE]" not in found
    assert not engine.active


def test_death_of_a_whole_answer_is_503() -> None:
    engine = FakeEngine()
    engine.fail_at = 3
    error_of(complete(make_app(engine)), 503)


def test_one_bad_prompt_ends_its_request_and_no_other() -> None:
    engine = FakeEngine()
    engine.delay = 0.001
    app = make_app(engine)
    assert error_of(complete(app, prompt=[[5], [512]], stream=True), 400)["param"] == "prompt"
    assert not engine.active
    assert complete(app).status_code == 200


def test_unexpected_error_names_no_internals() -> None:
    engine = FakeEngine()
    engine.fail_at, engine.error = 0, ValueError("secret path /srv/model")
    for stream in (False, True):
        error = error_of(complete(make_app(engine), stream=stream), 500)
        assert error["message"] == "internal server error"
    engine.fail_at = 2
    assert events(complete(make_app(engine), stream=True))[-1]["error"]["type"] == "internal_server_error"
    engine.error = HeadraceError("step 7 failed")
    assert error_of(complete(make_app(engine)), 500)["message"] == "step 7 failed"
