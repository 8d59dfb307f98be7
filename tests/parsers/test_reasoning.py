"""Reasoning told from content: marked, unmarked, opened by the prompt, never closed, and with calls behind it."""

from __future__ import annotations

import pytest

from headrace.parsers.output_parser import Answer, OutputParser
from headrace.parsers.reasoning import begins_open
from headrace.parsers.table import REASONING_FORMATS
from tests.parsers.reading import answer, called

MARKED = sorted(name for name, row in REASONING_FORMATS.items() if not row.as_content and not row.whole_answer)
CALL = '{"name": "f", "arguments": {"a": 1}}'


def thought(name: str, text: str, opened: bool | None = None, *, tool: str | None = None, cut: bool = False) -> Answer:
    return answer(tool, text, reasoning=name, opened=opened, cut=cut)


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("opened", [None, True, False])
def test_marked_reasoning_is_reasoning_whatever_the_prompt_says(name: str, opened: bool | None) -> None:
    format = REASONING_FORMATS[name]
    for open in format.open:
        for close in format.close:
            result = thought(name, f"{open}First <b> {{x}}.\n\nThen.{close}The answer </b>", opened)
            assert result == Answer("First <b> {x}.\n\nThen.", "The answer </b>")


@pytest.mark.parametrize("name", MARKED)
def test_what_the_prompt_opened_is_closed_by_the_answer(name: str) -> None:
    close = REASONING_FORMATS[name].close[0]
    assert thought(name, f"So it is.{close}Yes.", True) == Answer("So it is.", "Yes.")
    assert thought(name, "So it i", True, cut=True) == Answer("So it i", None)
    assert thought(name, "Yes.", False) == Answer(None, "Yes.")


def test_text_without_any_markup() -> None:
    """Where nothing is known of the prompt, by the family."""
    for name in ("deepseek_r1", "kimi_k2", "minimax_m2", "step3", "seed_oss"):
        assert thought(name, "Words.") == Answer("Words.", None)
    for name in (
        "deepseek_v3",
        "mistral",
        "granite",
        "glm45",
        "qwen3",
        "hunyuan_a13b",
        "nemotron_v3",
        "cohere_command3",
    ):
        assert thought(name, "Words.") == Answer(None, "Words.")
    assert thought("qwen3", "Words.", True) == Answer("Words.", None)


def test_a_closing_marker_alone_makes_reasoning_of_what_stands_before_it() -> None:
    for name in ("qwen3", "olmo3", "glm45", "nemotron_v3"):
        assert thought(name, " Hm.\n</think>\n\nYes.") == Answer(" Hm.\n", "\n\nYes.")
    assert thought("olmo3", "</think>\n\nYes.") == Answer(None, "\n\nYes.")


def test_only_the_first_closing_marker_counts() -> None:
    assert thought("deepseek_r1", "a</think>b</think>c") == Answer("a", "b</think>c")


def test_an_opening_marker_within_a_thought_says_nothing() -> None:
    for name in ("qwen3", "deepseek_r1", "minimax_m2"):
        assert thought(name, "a<think>b<think></think>c", True) == Answer("ab", "c")


def test_content_may_speak_of_thinking() -> None:
    assert thought("qwen3", "<think>a</think>Write <think> first.") == Answer("a", "Write <think> first.")
    assert thought("mistral", "A[THINK]b[/THINK]C[THINK]d[/THINK]E[/THINK]") == Answer("bd", "ACE")


def test_coheres_fourth_commands_end_a_thought_that_the_prompt_began() -> None:
    """Behind it stands an answer between marks of its own, or an action."""
    said = "plan<|END_THINKING|><|START_TEXT|>answer<|END_TEXT|>"
    assert thought("cohere_command4", said) == thought("cohere_command4", said, True) == Answer("plan", "answer")
    assert thought("cohere_command4", "<|START_TEXT|>direct<|END_TEXT|>") == Answer(None, "direct")
    action = 'plan<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]'
    found = thought("cohere_command4", action + "<|END_ACTION|>", tool="cohere_command4")
    assert (found.reasoning, found.content, called(found)) == ("plan", None, [("f", {"a": 1})])


def test_granite_marks_reasoning_with_words() -> None:
    text = "Here is my thought process: one\ntwo Here is my response: three"
    assert thought("granite", text) == Answer(" one\ntwo ", " three")
    assert thought("granite", "Here is my thought on it.") == Answer(None, "Here is my thought on it.")


def test_markup_around_content_is_left_out() -> None:
    assert thought("hunyuan_a13b", "<think>\na\n</think>\n<answer>\nb\n</answer>") == Answer("a", "b")
    assert thought("ernie45", "a\n</think>\n\n<response>\nb\n</response>\n", True) == Answer("a", "b")
    text = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>"
    assert thought("cohere_command3", text) == Answer("a", "b")


def test_minimax_keeps_reasoning_in_content_on_demand() -> None:
    assert thought("minimax_m2_append_think", "a</think>b") == Answer(None, "<think>a</think>b")


def test_calls_are_read_from_content_and_not_from_reasoning() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    result = thought("qwen3", f"<think>I could write {call}.</think>\n\n{call}", tool="hermes")
    assert (result.reasoning, result.content) == (f"I could write {call}.", None)
    assert called(result) == [("f", {"a": 1})]
    assert thought("deepseek_r1", f"Hm {call}", tool="hermes") == Answer(f"Hm {call}", None)


def test_a_call_in_reasoning_that_is_never_closed_is_a_call() -> None:
    for opened, begin in ((True, ""), (None, "<think>")):
        result = thought("qwen3", f"{begin}I call. <tool_call>{CALL}</tool_call>", opened, tool="hermes")
        assert (result.reasoning, result.content, called(result)) == ("I call. ", None, [("f", {"a": 1})])
    text = 'functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    result = thought("kimi_k2", f"I call.<|tool_calls_section_begin|><|tool_call_begin|>{text}", tool="kimi_k2")
    assert (result.reasoning, result.content, called(result)) == ("I call.", None, [("f", {"a": 1})])


def test_white_space_between_reasoning_and_a_call_is_no_content() -> None:
    result = thought("qwen3", f"<think>a</think>\n\n<tool_call>{CALL}</tool_call>\n", tool="hermes")
    assert result.content is None
    assert called(result) == [("f", {"a": 1})]


def test_reasoning_comes_as_it_is_written() -> None:
    parser = OutputParser(None, REASONING_FORMATS["deepseek_r1"], (), True)
    said = [
        [event.text for event in parser.feed(piece)] for piece in ("One", " two </th", "ree", "</think", ">", "Yes")
    ]
    assert said == [["One"], [" two "], ["</three"], [], [], ["Yes"]]


QWEN = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{%- endif %}"


@pytest.mark.parametrize(
    ("name", "prompt", "template", "kwargs", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n", QWEN, {}, True),
        ("qwen3", "<|im_start|>assistant\n", QWEN, {"enable_thinking": True}, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", QWEN, {"enable_thinking": False}, False),
        ("qwen3", "<|im_start|>assistant\n", "a template without the switch", {}, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", {}, True),
        ("deepseek_r1", "<｜Assistant｜>", "", {}, True),
        ("deepseek_r1", "<｜Assistant｜>", "", {"thinking": False}, True),
        ("kimi_k2", "<|im_assistant|>", "{% if thinking %}", {"thinking": False}, False),
        ("kimi_k2", "<|im_assistant|>", "{% if thinking %}", {}, True),
        ("deepseek_v3", "<｜Assistant｜><think>", "", {"thinking": True}, True),
        ("deepseek_v3", "<｜Assistant｜></think>", "", {}, False),
        ("granite", "<|start_of_role|>assistant<|end_of_role|>", "", {}, False),
        ("gemma4", "<|turn>model\n", "enable_thinking", {}, False),
        ("hunyuan_a13b", "<think>\n\n</think>\n", "", {}, False),
    ],
)
def test_whether_an_answer_begins_inside_reasoning(
    name: str, prompt: str, template: str, kwargs: dict[str, bool], expected: bool
) -> None:
    assert begins_open(REASONING_FORMATS[name], prompt, template, kwargs) is expected
