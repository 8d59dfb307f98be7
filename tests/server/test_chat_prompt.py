"""How conversations with tools and reasoning become prompts: as transformers renders them, with what clients send in
the form that templates expect."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from headrace.engine.tokenizer import Tokenizer
from headrace.server.fields import IGNORED_HEADER
from tests.published import tokenizer_folder
from tests.sampled import some_of
from tests.server.fake_engine import FakeEngine, chat, error_of, make_app, make_tokenizer, post

WORDS = ["city", "Zürich", "日本", "🙂", 'a "quote"', "<b>&amp;</b>", "back\\slash", "it's", "\n", "\u2028", "1.0", ""]


def random_schema(choose: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema with a description, without which gpt-oss's template fails."""
    kind = choose.choice(["string", "integer", "array", "object", "enum", "anyOf"] if depth else ["string", "number"])
    described = {"description": choose.choice(WORDS)}
    if kind == "object":
        names = choose.sample(WORDS, choose.randrange(4))
        return {"type": kind, "properties": {name: random_schema(choose, depth - 1) for name in names},
                "required": names[:1], **described}  # fmt: skip
    if kind == "array":
        return {"type": kind, "items": random_schema(choose, depth - 1), **described}
    if kind == "enum":
        return {"enum": [*choose.sample(WORDS, 3), None, 1, 1.5, True], **described}
    if kind == "anyOf":
        return {"anyOf": [random_schema(choose, depth - 1), {"type": "null"}], **described}
    return {"type": kind, **described}


def random_tools(choose: random.Random, depth: int = 3) -> list[dict[str, Any]]:
    parameters = [random_schema(choose, depth) | {"type": "object"} for _ in range(choose.randrange(1, 4))]
    return [
        {"type": "function", "function": {"name": f"tool_{i}", "description": choose.choice(WORDS), "parameters": one}}
        for i, one in enumerate(parameters)
    ]


def random_conversation(choose: random.Random, bare_calls: bool = False) -> list[dict[str, Any]]:
    """A question, a call, its result and an answer, with arguments as objects."""
    arguments = {choose.choice(WORDS): [choose.choice(WORDS), {"x": None}]}
    function = {"name": "tool_0", "arguments": arguments}
    call = {"id": "a1b2c3d4e", "type": "function", "function": function} | (function if bare_calls else {})
    return [
        {"role": "system", "content": choose.choice(WORDS)},
        {"role": "user", "content": "Look " + choose.choice(WORDS)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": choose.choice(WORDS), "tool_call_id": "a1b2c3d4e", "name": "tool_0"},
        {"role": "assistant", "content": "It is so."},
        {"role": "user", "content": "And now?"},
    ]


def as_clients_send_it(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Null content beside calls, arguments as text, content in parts."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            message["content"] = None
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if message["role"] == "tool":
            message["content"] = [{"type": "text", "text": message["content"]}]
    return sent


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], **fields: Any) -> str:
    engine = FakeEngine(tokenizer=tokenizer, max_model_len=2**20)
    engine.vocab_size = tokenizer.vocab_size
    answer = post(make_app(engine), "/tokenize", {"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False)


@pytest.mark.parametrize("name", some_of(["qwen3", "minimind", "gpt-oss", "phi3-mini"], 2))
def test_real_templates_with_tools_equal_transformers(name: str) -> None:
    folder = tokenizer_folder(name)
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for seed in range(6):
        choose = random.Random(seed)
        # gpt-oss's template, as it is there, reads bare calls and fails at objects within objects
        flat = name == "gpt-oss"
        tools, messages = random_tools(choose, 1 if flat else 3), random_conversation(choose, bare_calls=flat)
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        ids = theirs.encode(expected, add_special_tokens=False)
        for call in messages[2]["tool_calls"]:
            call.pop("name", None), call.pop("arguments", None)
        assert rendered(ours, as_clients_send_it(messages), tools=tools) == ours.decode(ids, False)


TEMPLATES = {
    "tojson": "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[-1].content }}",
    "indent": "{{ tools | tojson(indent=2) }}{{ messages[-1].content }}",
    "ascii": "{{ tools | tojson(ensure_ascii=True) }}{{ messages[-1].content }}",
    "sorted": "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}{{ messages[-1].content }}",
    "properties": """{% for t in tools %}{{ t.function.name }}({{ t.function.parameters.properties | length }})
        {%- for k, v in t.function.parameters.get('properties', {}).items() %}{{ k }}={{ v | tojson }}{% endfor %}
        {%- endfor %}""",
    "calls": """{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}{{ m.name }}
        {%- for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}{{ c.function.arguments | tojson }}
        {%- for k, v in c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_small_templates_with_tools_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = TEMPLATES[name]
    ours = make_tokenizer(source)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token="</s>")
    for seed in range(8):
        choose = random.Random(seed)
        tools, messages = random_tools(choose), random_conversation(choose)
        for tool in tools:
            tool["function"]["parameters"].setdefault("properties", {})
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, chat_template=source)
        assert rendered(ours, as_clients_send_it(messages), tools=tools) == expected


def prompt_of(template: str, **fields: Any) -> str:
    """What a chat request with these fields shows the model."""
    engine = FakeEngine(tokenizer=make_tokenizer(template))
    server = {"default_chat_template_kwargs": fields.pop("default", {})}
    answer = chat(make_app(engine, **server), max_tokens=1, **fields)
    assert answer.status_code == 200, answer.text
    prompt = engine.requests[0]["prompt"]
    assert isinstance(prompt, str)
    return prompt


CALLED = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            "{% if messages[0]['content'] is none %}null{% endif %}{{ messages[0].tool_calls[0].function.name }}",
            "nullf",
        ),
        ("{% if messages[0].content is not none %}text{% endif %}!", "!"),
        ("{{ '<' + messages[0].content + '>' }}", "<>"),
        ("{{ messages[0].tool_calls[0].name }}{{ messages[0].tool_calls[0].arguments | tojson }}", "f{}"),
    ],
)
def test_null_content_and_calls_are_what_the_template_reads(template: str, prompt: str) -> None:
    assert prompt_of(template, messages=[CALLED]) == prompt


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "5", "none at all"])
def test_an_agent_may_show_the_model_its_own_broken_arguments(arguments: str) -> None:
    """A template that goes through their keys is given one."""
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "What do you mean?"}]
    calls = "{% set args = messages[0].tool_calls[0].function.arguments %}"
    shows = calls + "{{ args if args is string else args | tojson }}"
    assert prompt_of(shows, messages=messages) == arguments
    assert prompt_of(calls + "{{ args | tojson }}", messages=messages) == json.dumps(arguments)
    lists = calls + "{% for key, value in args.items() %}{{ key }}={{ value }}{% endfor %}"
    assert prompt_of(lists, messages=messages) == f"arguments={arguments}"


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["m.reasoning", "m['reasoning_content']", "m.get('reasoning_content')"])
def test_reasoning_of_the_history_has_the_name_that_the_template_reads(sent: str, read: str) -> None:
    messages = [{"role": "assistant", "content": "Yes.", sent: "hm"}, {"role": "user", "content": "?"}]
    template = "{% for m in messages %}{{ " + read + " or '' }}|{{ m.content }}{% endfor %}"
    assert prompt_of(template, messages=messages) == "hm|Yes.|?"


def test_gpt_osss_third_name_of_reasoning_stands_beside_calls_alone() -> None:
    template = "{% for m in messages %}{{ m.thinking if 'thinking' in m else '-' }}{% endfor %}"
    assert prompt_of(template, messages=[{**CALLED, "reasoning": "hm"}]) == "hm"
    assert prompt_of(template, messages=[{"role": "assistant", "content": "Yes.", "reasoning": "hm"}]) == "-"


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
FIRST_SHOWN = (
    "{% for m in messages %}{% if loop.first or m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
SPEAKERS = ["system", "developer", "user", "system", "user", "assistant", "system", "developer", "assistant", "user"]


def test_what_the_system_says_later_is_shown_as_the_template_can() -> None:
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(SPEAKERS)]
    as_sent = "".join(f"<{role.replace('developer', 'system')}>{i}" for i, role in enumerate(SPEAKERS))
    assert prompt_of(TURNS, messages=messages) == as_sent
    moved = "<system>0\n\n1<user>2\n\n3\n\n4<assistant>5<user>6\n\n7<assistant>8<user>9"
    assert prompt_of(FIRST_ALONE, messages=messages) == prompt_of(FIRST_SHOWN, messages=messages) == moved
    assert prompt_of(FIRST_ALONE, messages=messages[:1] + messages[9:]) == "<system>0<user>9"


EFFORT = "{{ reasoning_effort | default('medium') }}{% if false %}{{ 'max' }}{% endif %}"


@pytest.mark.parametrize(
    ("effort", "shown"), [("low", "low"), ("minimal", "low"), ("none", "low"), ("xhigh", "high"), ("max", "max")]
)
def test_an_effort_that_the_template_does_not_name_is_the_nearest(effort: str, shown: str) -> None:
    assert prompt_of(EFFORT, reasoning_effort=effort) == shown
    assert prompt_of(EFFORT, chat_template_kwargs={"reasoning_effort": effort}) == effort


SWITCH = "{{ enable_thinking | default('unset') }}"
OTHER_SWITCH = "{% if thinking is not defined %}{% set thinking = 'unset' %}{% endif %}{{ thinking }}"


@pytest.mark.parametrize("template", [SWITCH, OTHER_SWITCH])
@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({}, "unset"),
        ({"enable_thinking": False}, "False"),
        ({"thinking": True}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "low"}, "unset"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "True"),
    ],
    ids=str,
)
def test_thinking_is_switched_by_the_name_that_the_template_has(template: str, fields: Any, value: str) -> None:
    assert prompt_of(template, **fields) == value


def test_thinking_is_switched_where_the_model_may_also_choose() -> None:
    template = "{{ thinking_mode | default('adaptive') }}"
    assert prompt_of(template) == "adaptive"
    assert prompt_of(template, thinking={"type": "enabled"}) == "enabled"
    assert prompt_of(template, enable_thinking=False) == "disabled"
    assert prompt_of(template, enable_thinking=False, chat_template_kwargs={"thinking_mode": "adaptive"}) == "adaptive"


def test_what_a_request_says_wins_over_the_servers_defaults() -> None:
    assert prompt_of(SWITCH, default={"enable_thinking": False}) == "False"
    assert prompt_of(SWITCH, default={"enable_thinking": False}, enable_thinking=True) == "True"
    fields = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 3}}
    assert prompt_of(SWITCH, default={"enable_thinking": False}, **fields) == "3"


@pytest.mark.parametrize("value", ["yes", 1, {"type": "maybe"}, {"type": ["enabled"]}, {}])
def test_thinking_that_is_no_switch(value: Any) -> None:
    assert error_of(chat(make_app(), thinking=value), 400)["param"] == "thinking"


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"enable_thinking": False}, "enable_thinking"),
        ({"thinking": True}, "thinking"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_a_switch_that_the_template_lacks_is_named(fields: Any, ignored: str) -> None:
    assert chat(make_app(), max_tokens=1, **fields).headers[IGNORED_HEADER] == ignored
    engine = FakeEngine(tokenizer=make_tokenizer(SWITCH))
    assert IGNORED_HEADER not in chat(make_app(engine), max_tokens=1, **fields).headers
