"""One test for each class of CVE that hit servers of this kind. What is common: limits come before allocation, and a
bad request harms itself alone."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, chat, complete, error_of, events, make_app, post, send
from tests.speed import PATIENCE, slowness

JSON = {"content-type": "application/json"}


def still_works(engine: FakeEngine) -> None:
    engine.delay = 0.0
    assert complete(make_app(engine)).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [[], []]])
def test_empty_prompt(prompt: Any) -> None:
    """CVE-2024-8768: an empty prompt killed the engine."""
    engine = FakeEngine()
    error_of(complete(make_app(engine), prompt=prompt), 400)
    assert not engine.requests
    still_works(engine)


@pytest.mark.parametrize("fields", [{"n": 10**9}, {"best_of": 10**9}, {"n": 128, "best_of": 10**9}])
def test_huge_n_and_best_of(fields: dict[str, int]) -> None:
    """CVE-2024-8939, CVE-2026-34756."""
    engine = FakeEngine()
    for route in (complete, chat):
        error_of(route(make_app(engine), **fields), 400)
    assert not engine.requests


@pytest.mark.parametrize("prompt", [["a"] * 1025, [[5]] * 1025, ["a"] * 9], ids=["texts", "ids", "times n"])
def test_prompt_list_fan_out(prompt: Any) -> None:
    """CVE-2026-73559: a list of prompts multiplies the work."""
    engine = FakeEngine()
    error = error_of(complete(make_app(engine), prompt=prompt, n=128), 400)
    assert "1024" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 1000, "bad_words": ["\u4e2d" * 256] * 64},
        {"n": 128, "bad_words": ["\u4e2d" * 256] * 64},
        {"n": 128, "allowed_token_ids": [5] * 100_000},
        {"allowed_token_ids": [5] * (2**20 + 1)},
    ],
    ids=["words x prompts", "words x n", "ids x n", "ids"],
)
def test_lists_that_each_choice_copies(fields: dict[str, Any]) -> None:
    """The same class: a body of kilobytes became gigabytes of token ids, and minutes of tokenizing."""
    engine = FakeEngine()
    error = error_of(complete(make_app(engine), **fields), 400)
    assert error["param"] in fields
    assert not engine.requests
    still_works(engine)


def test_lists_of_ids_are_counted_before_they_are_made() -> None:
    body = b'{"prompt": [' + b",".join([b"[5]"] * 1_000_000) + b"]}"
    app = make_app()
    post(app, "/v1/completions", {"prompt": "warm"})
    tracemalloc.start()
    error_of(send(app, "POST", "/v1/completions", content=body, headers=JSON), 400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(body)


@pytest.mark.parametrize("fields", [{"logprobs": 10**6}, {"prompt_logprobs": 10**6}, {"logprobs": -1}])
def test_huge_logprobs(fields: dict[str, int]) -> None:
    error_of(complete(make_app(), **fields), 400)


def test_logprob_of_ids_out_of_range() -> None:
    """CVE-2026-116173 and its like: token ids that no table has."""
    for fields in ({"stop_token_ids": [2**40]}, {"allowed_token_ids": [2**40]}, {"logit_bias": {str(2**40): 1}}):
        error_of(complete(make_app(), **fields), 400)
    error_of(complete(make_app(), prompt=[2**40]), 400)


def test_min_tokens_beyond_everything() -> None:
    """CVE-2026-114051."""
    error_of(complete(make_app(), min_tokens=2**31 - 1), 400)
    error_of(chat(make_app(), min_tokens=2**31 - 1), 400)


HOSTILE_KWARGS = [
    {"chat_template": "{{ x.__class__ }}"},
    {"tokenize": True},
    {"tools": []},
    {"add_generation_prompt": False},
    {"_private": 1},
    {"messages": "x"},
    {"eos_token": "x"},
    json.loads('{"a": ' + '{"a": ' * 200 + "1" + "}" * 200 + "}"),
]


@pytest.mark.parametrize("kwargs", HOSTILE_KWARGS, ids=lambda kwargs: str(kwargs)[:30])
def test_chat_template_kwargs(kwargs: dict[str, Any]) -> None:
    """CVE-2025-61620, CVE-2025-62426, CVE-2026-115918: kwargs that replace the template or block the loop."""
    engine = FakeEngine()
    error = error_of(chat(make_app(engine), chat_template_kwargs=kwargs), 400)
    assert error["param"] == "chat_template_kwargs"
    still_works(engine)


def test_template_of_a_request_is_never_run() -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"
    started = time.monotonic()
    assert "--chat-template" in error_of(chat(make_app(), chat_template=template), 400)["message"]
    assert time.monotonic() - started < PATIENCE  # rendered, it would be minutes


def test_jinja_in_messages_is_text() -> None:
    engine = FakeEngine()
    text = "{{ 7 * 7 }}{% for i in range(10**9) %}x{% endfor %}"
    assert chat(make_app(engine), messages=[{"role": "user", "content": text}], max_tokens=1).status_code == 200
    assert text in engine.requests[0]["prompt"]


@pytest.mark.parametrize(
    "field", ["guided_regex", "guided_grammar", "guided_json", "structured_outputs", "response_format"]
)
def test_broken_patterns_harm_nobody(field: str) -> None:
    """CVE-2025-48942, -48943, -48887, CVE-2026-105757. More of this kind: tests/structured_outputs/test_bounds.py."""
    for value in ("(" * 10_000, "(a+", {"type": "string", "pattern": "["}):
        for route in (complete, chat):
            assert error_of(route(make_app(), **{field: value}), 400)["param"] == field


def test_tools_are_data() -> None:
    """CVE-2025-48944, CVE-2025-9141: a wrong schema or hostile arguments are not looked into."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "something", "pattern": "["}}}]
    assert chat(make_app(), tools=tools, max_tokens=1).status_code == 200
    call = {"function": {"name": "f", "arguments": '{"x": "__import__(\'os\').abort()"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert chat(make_app(), messages=messages, max_tokens=1).status_code == 200


def test_no_url_is_ever_fetched() -> None:
    """CVE-2025-6242 and its like."""
    for part in ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
                 {"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}):  # fmt: skip
        assert "text only" in error_of(chat(make_app(), messages=[{"role": "user", "content": [part]}]), 400)["message"]


def test_request_id_is_no_address() -> None:
    """CVE-2026-116176: X-Request-Id reached a socket's connect."""
    engine = FakeEngine()
    headers = {"x-request-id": "tcp://169.254.169.254:80"}
    answer = post(make_app(engine), "/v1/completions", {"prompt": "a", "request_id": "ipc:///tmp/x"}, headers=headers)
    assert answer.status_code == 200
    assert engine.requests[0]["id"] == answer.json()["id"]
    assert engine.requests[0]["id"].startswith("cmpl-")


def test_cache_salt_reaches_the_engine() -> None:
    """CVE-2025-46570: tenants who must not see each other's cache send different salts."""
    engine = FakeEngine()
    chat(make_app(engine), cache_salt="tenant-1", max_tokens=1)
    assert engine.requests[0]["salt"] == "tenant-1"


@pytest.mark.parametrize("stream", [False, True])
def test_a_flood_of_bad_requests_leaves_nothing(stream: bool) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    for fields in ({"prompt": [512]}, {"n": 0}, {"temperature": -1}, {"prompt": ["a"] * 5000}, {"stop": [""]}):
        error_of(complete(app, **fields, stream=stream), 400)
    assert not engine.active
    assert not app.state.serving._running
    assert len(events(complete(app, stream=True))) == 17


@pytest.mark.parametrize(
    "field", ["unknown", "tools", "chat_template_kwargs", "stop", "logit_bias", "messages", "prompt"]
)
def test_deep_nesting_in_every_kind_of_field(field: str) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = b'{"prompt": "a", "messages": [], "%b": %b1%b}' % (field.encode(), opening * 20_000, closing * 20_000)
        for path in ("/v1/completions", "/v1/chat/completions"):
            error_of(send(make_app(), "POST", path, content=body, headers=JSON), 400)


@pytest.mark.parametrize(("count", "status"), [(50_000, 200), (500_000, 400)])
def test_wide_json_is_refused_or_ignored_in_time(count: int, status: int) -> None:
    body = b'{"prompt": "a", "max_tokens": 1, "unknown": [' + b",".join([b"{}"] * count) + b"]}"
    started = time.monotonic()
    assert send(make_app(), "POST", "/v1/completions", content=body, headers=JSON).status_code == status
    assert time.monotonic() - started < 2 * slowness()


WITHOUT_ASSERTS = """
from tests.server.fake_engine import FakeEngine, complete, make_app
engine = FakeEngine()
bad = [{"prompt": []}, {"n": 10**9}, {"prompt": [2**40]}, {"logprobs": 10**6}, {"stop": [""]}, {"temperature": -1}]
print(__debug__, *(complete(make_app(engine), **fields).status_code for fields in [*bad, {}]), len(engine.requests))
"""


def test_checks_do_not_go_away_with_python_O() -> None:
    argv = [sys.executable, "-O", "-c", WITHOUT_ASSERTS]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", *["400"] * 6, "200", "1"]
