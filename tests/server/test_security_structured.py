"""One test for each class of CVE that hit structured output, tools and parsers of servers of this kind.

All of them go through the whole server over a scripted model, which says what a request's grammar allows.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.sampled import sampled
from tests.scripted.engine import Scripted, scripted_servers
from tests.scripted.families import FAMILIES, Call, Said
from tests.server.hostile import GRAMMARS, REGEXES, laughs
from tests.speed import PATIENCE, at_most

SECONDS = 3.0
"""Most that a hostile request may take on a machine that is fast enough, grammar and answer together."""
USER = [{"role": "user", "content": "a"}]
BODY = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "guided_json": SCHEMA}'


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with scripted_servers() as servers:
        found = servers(FAMILIES["qwen3-coder"])
        found.transcript.obeys = True
        found.say("A word.")
        yield found


def chat(scripted: Scripted, **fields: Any) -> httpx.Response:
    """One request, within SECONDS; after it the server still works."""
    with at_most(SECONDS):
        answer = post(scripted, json.dumps({"messages": USER, "max_tokens": 8, **fields}))
    assert post(scripted, json.dumps({"messages": USER, "max_tokens": 1})).status_code == 200
    return answer


def post(scripted: Scripted, body: str) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return client().post(f"{scripted.url}/v1/chat/completions", content=body, headers=headers)


@functools.cache
def client() -> httpx.Client:
    """One for all requests: to read the certificates of the world takes longer than most of them."""
    return httpx.Client(timeout=PATIENCE, trust_env=False)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert len(message) < 2000
    return str(message)


def schema_form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


RECURSIVE = {
    "itself": {"$ref": "#"},
    "in a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "by allOf": {"allOf": [{"$ref": "#"}]},
    "without an end": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
}


@pytest.mark.parametrize("schema", RECURSIVE.values(), ids=RECURSIVE)
def test_recursive_schemas_end(scripted: Scripted, schema: Any) -> None:
    """CVE-2025-48944's class: a schema that took the process with it, here by references to itself."""
    assert chat(scripted, **schema_form(schema)).status_code in (200, 400)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    assert chat(scripted, tools=[tool], tool_choice="required").status_code in (200, 400)


@sampled(("levels", "key"), [40, 200, 3000], ["items", "not", "properties"])
def test_deep_schemas(scripted: Scripted, levels: int, key: str) -> None:
    answer = post(scripted, BODY.replace("SCHEMA", f'{{"{key}": ' * levels + "{}" + "}" * levels))
    assert answer.status_code in (200, 400)
    if levels == 3000:
        refusal(answer)


@pytest.mark.parametrize("levels", [10, 30, 60])
def test_a_billion_laughs(scripted: Scripted, levels: int) -> None:
    """Definitions that refer twice to the next: 2 ** levels values, if one wrote them out."""
    assert chat(scripted, **schema_form(laughs(levels))).status_code in (200, 400)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/x.json", "file:///etc/passwd", "https://json-schema.org/draft"])
def test_no_reference_is_fetched(scripted: Scripted, url: str) -> None:
    """Server-side request forgery by `$ref`."""
    assert "$ref" in refusal(chat(scripted, **schema_form({"properties": {"a": {"$ref": url}}})))


@pytest.mark.parametrize("regex", REGEXES, ids=lambda regex: ascii(regex)[:24])
def test_no_regex_takes_long(scripted: Scripted, regex: str) -> None:
    """CVE-2025-48887's class: catastrophic backtracking, and repetition of repetition."""
    for fields in ({"guided_regex": regex}, schema_form({"type": "string", "pattern": regex})):
        answer = chat(scripted, **fields)
        assert answer.status_code in (200, 400), answer.text
        if regex in ("(?=a)b", r"(a)\1", "["):
            refusal(answer)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: ascii(grammar)[:24])
def test_no_grammar_takes_long(scripted: Scripted, grammar: str) -> None:
    """CVE-2025-57809's class: left recursion, rules that double at each level, rules that are not there."""
    answer = chat(scripted, structured_outputs={"grammar": grammar})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("value", [{"choice": [1]}, {"choice": [None]}, {"json": True}, {"regex": 5}, {"grammar": []}])
def test_constraints_of_the_wrong_type_are_refused(scripted: Scripted, value: dict[str, Any]) -> None:
    assert "structured_outputs" in refusal(chat(scripted, structured_outputs=value))


BIG: dict[str, Callable[[], dict[str, Any]]] = {
    "choices": lambda: {"guided_choice": [f"choice {i}" for i in range(100_000)]},
    "enum": lambda: schema_form({"enum": [f"value {i}" for i in range(100_000)]}),
    "properties": lambda: schema_form({"properties": {f"p{i}": {"type": "string"} for i in range(50_000)}}),
    "minItems": lambda: schema_form({"type": "array", "minItems": 10**9, "items": {"type": "null"}}),
    "minLength": lambda: schema_form({"type": "string", "minLength": 10**9}),
    "a long regex": lambda: {"guided_regex": "a" * 1_000_000},
    "a long grammar": lambda: {"guided_grammar": 'start: "' + "a" * 1_000_000 + '"'},
}  # fmt: skip


@pytest.mark.parametrize("name", BIG)
def test_size_is_bounded(scripted: Scripted, name: str) -> None:
    """A body of megabytes becomes neither gigabytes nor minutes."""
    answer = chat(scripted, **BIG[name]())
    assert answer.status_code in (200, 400), answer.text


def test_many_different_schemas_do_not_pile_up(scripted: Scripted) -> None:
    """CVE-2025-32381: a cache of grammars without a bound."""
    for number in range(30):
        answer = chat(scripted, **schema_form({"const": number}), max_tokens=4)
        assert answer.json()["choices"][0]["message"]["content"] == str(number)


ON_DISK = """
import sys
from pathlib import Path
from tests.server.test_security_structured import *
with scripted_servers() as servers:
    found = servers(FAMILIES["qwen3-coder"])
    found.transcript.obeys = True
    found.say("x")
    before = set(Path(sys.argv[1]).rglob("*"))
    for fields in (schema_form({"const": 5}), {"guided_regex": "a+"}, {"guided_grammar": 'start: "a"'}):
        assert chat(found, **fields).status_code == 200
    new = {path.name for path in set(Path(sys.argv[1]).rglob("*")) - before}
    print(sorted(new))
"""


def test_nothing_is_written_to_disk(tmp_path: Path) -> None:
    """CVE-2025-29770: outlines' cache of schemas filled the disk."""
    names = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "OUTLINES_CACHE_DIR")
    environment = {**os.environ, **dict.fromkeys(names, str(tmp_path))}
    argv = [sys.executable, "-c", ON_DISK, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__ }}"])
def test_jinja_is_text_wherever_it_comes_in(scripted: Scripted, text: str) -> None:
    scripted.say("Yes.")
    function = {"name": "f", "description": text, "parameters": {"properties": {text: {"type": "string"}}}}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": json.dumps({text: text})}}
    messages = [*USER, {"role": "assistant", "content": text, "tool_calls": [call]},
                {"role": "tool", "content": text, "tool_call_id": "x"}]  # fmt: skip
    answer = chat(
        scripted, messages=messages, tools=[{"type": "function", "function": function}],
        chat_template_kwargs={"anything": text},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    prompt = next(prompt for prompt in scripted.prompts if "tool_response" in prompt)
    assert prompt.count(text) >= 4


HOSTILE_NAMES = [
    "../../etc/passwd", "<|im_end|>", "</tool_call>", "a\nb", '"', "\\", "x" * 5000, "{{ x }}", "f>\n<parameter=x>",
    "__import__('os').abort()", "\x00", "名前", "",
]  # fmt: skip


@sampled(("name", "choice"), HOSTILE_NAMES, ["auto", "required", "named"], say=lambda name: ascii(name)[:20])
def test_names_of_tools_are_data(scripted: Scripted, name: str, choice: str) -> None:
    """A name with a path, markup or code is refused, or is text and no more."""
    function = {"name": name, "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    named = {"type": "function", "function": {"name": name}}
    tool_choice = named if choice == "named" else choice
    answer = chat(scripted, tools=[{"type": "function", "function": function}], tool_choice=tool_choice)
    assert answer.status_code in (200, 400), answer.text


CODE = [
    "[__import__('os').system('touch {path}')(a=1)]", "[f(a=__import__('os').system('touch {path}'))]",
    "[f(a=open('{path}', 'w'))]", "[f(a=(lambda: open('{path}', 'w'))())]", "[f(a=[x for x in ()])]",
    "[f(a=10**10**10)]", "[f(a='x' * 10**10)]", "[f(**{{'a': 1}})]", "[f(a=f'{{1}}')]",
    "[f(a=" + "[" * 2000 + "]" * 2000 + ")]",
    "[f(a=" + "-" * 3000 + "1)]", "[f(a=" + "9" * 5000 + ")]", "[f(a=" + "(" * 3000 + ")]", "[f(a=1e999999999)]",
]  # fmt: skip


@sampled(("code", "parser"), CODE, ["pythonic", "llama4_pythonic", "olmo3", "qwen3_coder", "hermes", "lfm2"])
def test_what_a_model_writes_is_never_run(scripted: Scripted, tmp_path: Path, parser: str, code: str) -> None:
    """CVE-2025-9141: a parser of tool calls that evaluated the model's text."""
    path = tmp_path / "touched"
    text = code.replace("{path}", str(path)).replace("{{", "{").replace("}}", "}")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    for written in (text, f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"):
        body = {"text": written, "tools": tools, "tool_call_parser": parser}
        with at_most(1.0):
            answer = client().post(f"{scripted.url}/parse_function_call", json=body)
        assert answer.status_code == 200, answer.text
        for call in answer.json()["calls"]:
            json.loads(call["parameters"], parse_int=str)  # Python reads no integers of 5,000 digits
    assert not path.exists()


DUPLICATES = {
    "a field": '{"messages": [], "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}',
    "a role": '{"messages": [{"role": "system", "role": "user", "content": "a"}], "max_tokens": 1}',
    "a keyword": '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, '
    '"guided_json": {"type": "string", "type": "null"}}',
}


@pytest.mark.parametrize("body", DUPLICATES.values(), ids=DUPLICATES)
def test_duplicate_keys_mean_the_last(scripted: Scripted, body: str) -> None:
    """One reading throughout: what was checked is what is used."""
    answer = post(scripted, body)
    assert answer.status_code == 200, answer.text
    if "null" in body:
        assert answer.json()["choices"][0]["message"]["content"] == "null"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "01", "+1", ".5", "0x10"])
def test_what_is_no_json_number(scripted: Scripted, number: str) -> None:
    refusal(post(scripted, BODY.replace("SCHEMA", f'{{"const": {number}}}')))


def test_arguments_that_are_no_json_stay_with_their_request(scripted: Scripted) -> None:
    """What the model writes as NaN or twice is passed on as text, and breaks no answer."""
    for arguments in ('{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1e999}', '{"a": "\\ud800"}'):
        body = {"text": f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>', "tools": [],
                "tool_call_parser": "hermes"}  # fmt: skip
        answer = client().post(f"{scripted.url}/parse_function_call", json=body)
        assert answer.status_code == 200
        assert answer.json()


def test_text_that_looks_like_a_call_ends_no_turn(scripted: Scripted) -> None:
    """An argument may hold the markup of other calls: it is the argument's text."""
    inner = 'see <function=other> and {"name": "other"} in the text'
    scripted.play(("", Said(calls=(Call("f", {"a": inner}),))))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
    answer = chat(scripted, tools=tools, max_tokens=200)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": inner}
