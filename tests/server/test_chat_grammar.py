"""The one grammar that a chat answer is held to: calls that a request forces, functions that are strict, a format of
the answer, and reasoning before all of these."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, accepts, chat, make_app, make_tokenizer

NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
PROMPT = "{{ messages[-1].content }}"


class Asked:
    """A request, and what its answer may be."""

    def __init__(
        self, *, template: str = PROMPT, special: tuple[str, ...] = (), flags: Any = None, **fields: Any
    ) -> None:
        self.engine = FakeEngine(tokenizer=make_tokenizer(template, special), max_model_len=8192)
        flags = {"tool_call_parser": "hermes", "reasoning_parser": "none"} | (flags or {})
        answer = chat(make_app(self.engine, **flags), **fields, max_tokens=1)
        assert answer.status_code == 200, answer.text
        self.grammar = self.engine.requests[0]["grammar"]

    def takes(self, text: str) -> bool:
        return accepts(self.engine, self.grammar, text)


THINKS = {"reasoning_parser": "deepseek_r1"}


@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": NUMBER}, "12", "twelve"),
        ({"structured_outputs": {"regex": "[a-c]+"}}, "abc", "d"),
    ],
    ids=["json", "regex"],
)
def test_grammars_begin_where_reasoning_ends(
    special: tuple[str, ...], fields: dict[str, Any], right: str, wrong: str
) -> None:
    opened = Asked(template=PROMPT + "<think>\n", special=special, flags=THINKS, **fields)
    assert opened.takes(f"hm, {{</think>{right}")
    assert not opened.takes(f"hm</think>{wrong}")
    assert not opened.takes(right)
    closed = Asked(template=PROMPT + "<think>\n\n</think>\n\n", special=special, flags=THINKS, **fields)
    assert closed.takes(right)
    assert not closed.takes(wrong)
    assert not closed.takes(f"hm</think>{right}")


def test_a_model_that_opens_its_thoughts_itself_may() -> None:
    asked = Asked(special=("<think>", "</think>"), flags={"reasoning_parser": "mistral"}, response_format=NUMBER)
    assert asked.takes("12")
    assert asked.takes("[THINK]hm[/THINK]12")
    must = Asked(special=("<think>", "</think>"), flags=THINKS, response_format=NUMBER)
    assert must.takes("<think>hm</think>12")
    assert must.takes("hm</think>12")
