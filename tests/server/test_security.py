"""Classes of CVEs that hit servers of this kind. What is common: limits come before allocation, and a bad request harms
itself alone.

Empty prompts (CVE-2024-8768), huge n and best_of (CVE-2024-8939, CVE-2026-34756), token ids that no table has
(CVE-2026-116173), min_tokens beyond everything (CVE-2026-114051) and URLs (CVE-2025-6242) are rows of test_errors.py
and test_chat.py; patterns (CVE-2025-48942, -48943, -48887, CVE-2026-105757) are in test_security_structured.py.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, chat, complete, error_of, events, make_app, post, send
from tests.speed import at_most

JSON = {"content-type": "application/json"}


def still_works(engine: FakeEngine) -> None:
    engine.delay = 0.0
    assert complete(make_app(engine)).status_code == 200


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
    body = b'{"prompt": [' + b",".join([b"[5]"] * 200_000) + b"]}"
    app = make_app()
    post(app, "/v1/completions", {"prompt": "warm"})
    tracemalloc.start()
    error_of(send(app, "POST", "/v1/completions", content=body, headers=JSON), 400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(body)


HOSTILE_KWARGS = [
    {"chat_template": "{{ x.__class__ }}"},
    {"tokenize": True},
    {"tools": []},
    {"add_generation_prompt": False},
    {"_private": 1},
    {"messages": "x"},
    {"__class__": 1},
    {"self": 1},
    {"a.b": 1},
    {"a b": 1},
    {"": 1},
    {"eos_token": "x"},
    json.loads('{"a": ' + '{"a": ' * 200 + "1" + "}" * 200 + "}"),
]


@pytest.mark.parametrize("kwargs", HOSTILE_KWARGS, ids=lambda kwargs: str(kwargs)[:30])
def test_chat_template_kwargs(kwargs: dict[str, Any]) -> None:
    """CVE-2024-56201, CVE-2025-61620, CVE-2025-62426, CVE-2026-115918: kwargs that replace the template or what it is
    run with, or block the loop."""
    engine = FakeEngine()
    error = error_of(chat(make_app(engine), chat_template_kwargs=kwargs), 400)
    assert error["param"] == "chat_template_kwargs"
    still_works(engine)


def test_tools_are_data() -> None:
    """CVE-2025-48944, CVE-2025-9141: a wrong schema or hostile arguments are not looked into."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "something", "pattern": "["}}}]
    assert chat(make_app(), tools=tools, max_tokens=1).status_code == 200
    call = {"function": {"name": "f", "arguments": '{"x": "__import__(\'os\').abort()"}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert chat(make_app(), messages=messages, max_tokens=1).status_code == 200


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
    with at_most(2.0):
        assert send(make_app(), "POST", "/v1/completions", content=body, headers=JSON).status_code == status
