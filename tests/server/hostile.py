"""Values and bodies that a server should refuse or survive: what the fuzzing draws from, class by class.

A body begins as one that clients send, with tools, schemas, grammars and history; then some of it is replaced, removed,
nested or damaged.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

REGEXES = [
    "(a+)+$", "(a|a)*b", "(x+x+)+y", r"(\w+\s?)*!", "a{1000}{1000}", "(a{1,1000}){1,1000}", "(?=a)b", r"(a)\1",
    "[", "(", "*", "a{2,1}", r"\p{Nonsense}", "(?<n>a)", "[^\\x00-\\U0010FFFF]",
    "((((((((((a?){9}){9}){9}){9}){9}){9})",
    "", ".*" * 500, "(" * 3000 + ")" * 3000, "a|" * 5000, "\\", "^$", "[z-a]", "(?i)straße", "\ud800", "a" * 20_000,
    "(?=(a?){300}b)" * 20, r"\b" * 500, "(?<=(a|b){1,60})b" * 9, "(?!(?=(?!a)))" * 99 + "(a|b){60}",
]  # fmt: skip
GRAMMARS = [
    "start: start", "start: start start | start", 'start: "a" undefined', "start: ", "", 'root ::= root "a"',
    'root ::= "a" | root root', "root ::= other\nother ::= root", "start: /(a+)+$/", 'start: "' + "a" * 20_000 + '"',
    "start: x0\n" + "\n".join(f"x{i}: x{i + 1} x{i + 1}" for i in range(40)) + '\nx40: "a"',
    'start: ("a" | "b"){1,100000}', "%import os",
    "%llguidance {}", 'start: %json {"type": "wrong"}', "start: <[99999999]>",
    "start: @other", "root ::= [^\\n]{0,1000000}", "root ::= (" * 500, "start: /(?=x)/", 'start: "\\ud800"', "\x00",
]  # fmt: skip


def deep(levels: int, key: str | None = None) -> Any:
    """An empty list or object below so many others."""
    value: Any = [] if key is None else {}
    for _ in range(levels):
        value = [value] if key is None else {key: value}
    return value


def fresh(value: Any) -> Any:
    return json.loads(json.dumps(value))


def laughs(levels: int) -> dict[str, Any]:
    """A schema whose definitions refer twice to the next one each: 2 ** levels values when written out."""
    pair = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": {**pair, f"d{levels}": {"type": "null"}}}


SCHEMAS: list[Any] = [
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"properties": {"a": {"$ref": "#"}}},
    {"$ref": "http://169.254.169.254/schema.json"}, {"$ref": "file:///etc/passwd"}, {"$ref": "#/nowhere"},
    {"$id": "http://x/y", "$schema": "http://localhost:1/meta"}, {"$dynamicRef": "#x"}, {"$ref": 5},
    {"type": "strin"}, {"type": 5}, {"type": []}, {"type": ["string", "string"]}, {"type": None}, {"properties": []},
    {"properties": {"a": 5}}, {"required": "a"}, {"required": [5]}, {"enum": []}, {"enum": 5}, {"const": deep(200)},
    {"enum": list(range(20_000))}, {"enum": ["a" * 1000] * 100}, {"minItems": 10**9}, {"minItems": -1},
    {"type": "array", "minItems": 5, "maxItems": 2}, {"minLength": 10**9, "type": "string"}, {"maxLength": "x"},
    {"type": "string", "minLength": 3, "maxLength": 1}, {"multipleOf": 0}, {"multipleOf": 1e-300, "type": "number"},
    {"minimum": 1e308, "maximum": -1e308, "type": "number"}, {"minimum": "x"}, {"type": "integer", "minimum": 10**400},
    {"not": {}}, {"if": {}, "then": {}}, {"patternProperties": {"(a+)+$": {}}}, {"propertyNames": {"pattern": "["}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
    {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(300)}, "additionalProperties": True},
    {"type": "object", "properties": {"\ud800": {}}}, {"type": "object", "properties": {"": {"type": "null"}}},
    {"type": "object", "properties": {"a" * 50_000: {"type": "null"}}}, {"format": "nonsense", "type": "string"},
    {"uniqueItems": True, "type": "array"}, {"dependentRequired": {"a": ["b"]}}, {"contains": {}, "type": "array"},
    deep(300, "items"), deep(60, "not"), deep(40, "anyOf"), {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "string"}] * 200}, laughs(12), laughs(60), True, False, [], "string", 5, {"type": "object"},
    *({"type": "string", "pattern": regex} for regex in REGEXES),
]  # fmt: skip
GOOD_SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"s": {"enum": ["x", "y"]}, "l": {"type": "array", "items": {"type": "number"}}}},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]},
    {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "boolean"}}},
    {},
]
NAMES = [
    "f", "get_weather", "../../etc/passwd", "<|im_end|>", "</tool_call>", "a b", "a\nb", "{{ 7 * 7 }}", "", "x" * 5000,
    "__class__", "'; drop", '"', "\\", "\x00", "\ud800", "名前", "f" * 64, "eval", "functions.f:0", "a=b>", None, 5, [],
]  # fmt: skip
MARKUP = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<|channel|>", "<|message|>", "<|call|>",
    "<|start|>assistant",
    '{"name": "f", "arguments": {', '"a": "', "\\", '"', "{", "}", "[", "]", "}}", "<function=",
    "<parameter=", "</", ">",
    "[TOOL_CALLS]", "[ARGS]", "<|tool_call_begin|>", "functions.f:0", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>",
    "f(", ")",
    "[f(a=", "__import__('os').abort()", "lambda: 0", "\n", " ", "null", "<arg_key>", "<arg_value>", "call:f{",
    "<escape>",
    "<invoke name=", "<|python_tag|>", "to=functions.f", "\ud83d\ude00", "é", "1e999", "NaN", "\x00", "```json\n", "'",
    "]<]minimax[>[", "<item>", "</f>", "<tool_sep>", "<tool_calls>",
]  # fmt: skip
KWARGS: list[Any] = [
    {"enable_thinking": False}, {"thinking": True}, {"enable_thinking": "x" * 1000}, {"thinking": []},
    {"__class__": 1}, {"self": 1}, {"messages": []}, {"tools": [1]}, {"chat_template": "{{ 1 }}"}, {"namespace": 0},
    {"range": 0}, {"raise_exception": "x"}, {"strftime_now": 1}, {"a.b": 1}, {"": 1}, {"loop": 1}, {"cycler": 0},
    {"documents": []}, {"bos_token": "x"}, {"reasoning_effort": deep(10)}, deep(100, "a"), [], "x", 5,
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, -(2**70), 1e308, float("nan"), float("inf"), "", " ", "a",
    "x" * 3000, "\ud800", "\x00", "{{ x }}", [], {}, [[]], [None], {"": None}, {"a": {}}, deep(40), deep(300, "a"),
    ["a"] * 300, "auto", "none", "required", "json_object", "text", "🎉", "0", "-5", "true",
]  # fmt: skip
PARSERS = [
    "hermes", "qwen3_coder", "openai", "mistral", "pythonic", "llama3_json", "llama4_pythonic", "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32", "kimi_k2", "glm45", "minimax_m2",
    "minimax_m3", "hy_v3", "granite", "phi4_mini_json", "internlm", "jamba", "xlam", "olmo3",
    "seed_oss", "step3", "ernie45", "hunyuan_a13b", "gemma4", "functiongemma", "cohere_command3", "lfm2", "longcat",
]  # fmt: skip
THOUGHTS = [
    "deepseek_r1", "qwen3", "glm45", "openai_gptoss", "mistral", "granite", "olmo3", "gemma4", "nemotron_v3",
    "minimax_m3", "hy_v3",
]  # fmt: skip
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT_TOKENS, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
PARSE, SEPARATE = "/parse_function_call", "/separate_reasoning"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GENERATES = {
    CHAT: 20, MESSAGES: 20, COUNT_TOKENS: 6, RESPONSES: 20, COMPLETIONS: 8, PARSE: 8, SEPARATE: 4, "/tokenize": 4,
    LOAD: 6, UNLOAD: 4,
}  # fmt: skip
"""Path of a server of a model that generates -> its weight in a draw"""
POOLS = {"/v1/embeddings": 4, "/pooling": 2, "/classify": 2, "/v1/score": 3, "/v1/rerank": 3}
"""the same of one that pools"""
PLACES = [
    "good", "good", "./good", "nothing", "odd", "pickled", "../good", "/etc", "/", "", ".", "..", "good/../../..",
    "good\0", "%2e%2e/good", "~root", "good/adapter_config.json", "linked", "x" * 5000, "\ud800", "file:///etc/passwd",
]  # fmt: skip
"""where an adapter might lie"""
TEXTS: list[Any] = [
    "a", "who are you?", "", " ", "x" * 300, "\x00", "\ud800", "\N{GRINNING FACE}" * 40, [], [5], [5, 6], [[5, 6]],
    ["a"], ["a", "b"], [["a"]], {"text": "a"}, [{"text": "a"}], [{}], [None], [True], [2**40], [-1], [[]], ["a"] * 300,
    "<|im_end|>", 0, None, {},
]  # fmt: skip


class Bodies:
    """Draws bodies. `of(path)` gives one as bytes; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def any(self, weights: Mapping[str, int]) -> tuple[str, bytes]:
        """A path and a body for it."""
        (path,) = self.draw.choices([*weights], [*weights.values()])
        return path, self.of(path)

    def of(self, path: str) -> bytes:
        draw = self.draw
        body = {
            CHAT: self._chat, MESSAGES: self._message, RESPONSES: self._response,
            COMPLETIONS: self._completion, PARSE: self._parse,
            SEPARATE: self._separate, COUNT_TOKENS: self._message,
            "/tokenize": self._tokenize, LOAD: self._load, UNLOAD: self._unload,
            **{one: partial(self._pooled, one) for one in POOLS},
        }[path]()  # fmt: skip
        for _ in range(draw.choice([0, 0, 1, 1, 2, 4])):
            self._mutate(body)
        text = json.dumps(body, ensure_ascii=True)
        if draw.random() < 0.05:  # twice the same key
            text = text[:-1] + ", " + json.dumps({draw.choice([*body, "tools"]): draw.choice(ODD)})[1:]
        data = text.encode()
        return self._damaged(data) if draw.random() < 0.05 else data

    def text(self) -> str:
        """Markup of all families in any order, sometimes the same again and again."""
        if self.draw.random() < 0.2:
            return "".join(self.draw.choices(MARKUP, k=3)) * self.draw.choice([5, 100, 1000])
        return "".join(self.draw.choices([*MARKUP, "word ", "12"], k=self.draw.randrange(40)))

    def schema(self) -> Any:
        return fresh(self.draw.choice(self.draw.choice([SCHEMAS, GOOD_SCHEMAS])))

    def constraint(self) -> dict[str, Any]:
        """Fields that ask for structured output, in one of the spellings."""
        draw = self.draw
        makers: list[Callable[[], dict[str, Any]]] = [
            lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": self.schema()}}},
            lambda: {"response_format": {"type": "json_object", "schema": self.schema()}},
            lambda: {"response_format": {"type": draw.choice(["text", "json_object", "xml", "regex", None])}},
            lambda: {"response_format": {"type": "structural_tag", "triggers": draw.choice([["<f"], [], [""], "x"]),
                                         "structures": [{"begin": "<f=", "schema": self.schema(), "end": ">"}]}},
            lambda: {"response_format": {"type": "structural_tag", "format": draw.choice([
                {"type": "const_string", "value": "x"}, {"type": "any_text"}, {"type": "nonsense"}, deep(50, "content"),
                {"type": "json_schema", "json_schema": self.schema()}, {"type": "sequence", "elements": []}])}},
            lambda: {"structured_outputs": {"json": self.schema(), **draw.choice([{}, {"regex": "a"}])}},
            lambda: {"structured_outputs": {"regex": draw.choice(REGEXES)}},
            lambda: {"structured_outputs": {"grammar": draw.choice(GRAMMARS)}},
            lambda: {"structured_outputs": {"choice": draw.choice([["a", "b"], [], [1], ["x"] * 5000, [""], "ab"])}},
            lambda: {"structured_outputs": {"json": self.schema(), "whitespace_pattern": draw.choice(REGEXES)}},
            lambda: {draw.choice(["guided_json", "json_schema"]): draw.choice([self.schema(), "{", "[1]"])},
            lambda: {"guided_json": json.dumps(self.schema())},
            lambda: {draw.choice(["guided_regex", "regex"]): draw.choice(REGEXES)},
            lambda: {draw.choice(["guided_grammar", "ebnf", "grammar"]): draw.choice(GRAMMARS)},
            lambda: {"guided_choice": draw.choice([["yes", "no"], [[]], [None]])},
        ]  # fmt: skip
        return draw.choice(makers)()

    def tool(self) -> Any:
        draw = self.draw
        function: dict[str, Any] = {"name": draw.choice(NAMES[:2]) if draw.random() < 0.7 else draw.choice(NAMES)}
        if draw.random() < 0.8:
            function["parameters"] = self.schema()
        if draw.random() < 0.3:
            function["strict"] = draw.choice([True, False, "x"])
        if draw.random() < 0.3:
            function["description"] = draw.choice(MARKUP)
        return {"type": "function", "function": function}

    def _common(self) -> dict[str, Any]:
        draw = self.draw
        body: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 4])}
        options = {
            "stream": True, "n": 2, "stop": [draw.choice(MARKUP)], "temperature": 0, "ignore_eos": True, "seed": 5,
            "min_tokens": 1, "stream_options": {"include_usage": True}, "skip_special_tokens": False,
            "logit_bias": {"5": 1.0}, "allowed_token_ids": [5, 6], "bad_words": ["{"], "prompt_logprobs": 0,
        }  # fmt: skip
        for name in draw.sample(sorted(options), draw.choice([0, 1, 2])):
            body[name] = options[name]
        if draw.random() < 0.5:
            body |= self.constraint()
        return body

    def _chat(self) -> dict[str, Any]:
        draw = self.draw
        body = self._common()
        messages: list[Any] = [{"role": draw.choice(["user", "system"]), "content": self.text() or "a"}]
        if draw.random() < 0.3:
            texts = ['{"a": 1}', "{", "", "null", "[" * 50, '{"a": NaN}', '{"a": 1, "a": 2}', self.text()]
            function = {"name": draw.choice(NAMES), "arguments": draw.choice(texts)}
            call = {"id": "x", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call], "reasoning": self.text()})
            messages.append({"role": "tool", "content": self.text(), "tool_call_id": draw.choice(["x", "y", None])})
        body["messages"] = messages
        if draw.random() < 0.6:
            body["tools"] = [self.tool() for _ in range(draw.choice([1, 1, 2, 5]))]
            named = {"type": "function", "function": {"name": draw.choice(NAMES[:6])}}
            body["tool_choice"] = draw.choice(["auto", "required", "none", named, named, "any", {}, {"function": 5}])
            if draw.random() < 0.3:
                body["parallel_tool_calls"] = draw.choice([True, False])
        extras = {
            "chat_template_kwargs": draw.choice(KWARGS), "reasoning_effort": draw.choice(["low", "none", "x" * 40, 5]),
            "include_reasoning": False, "logprobs": True, "continue_final_message": True, "enable_thinking": False,
            "add_generation_prompt": False, "thinking": draw.choice([True, {"type": "disabled"}, "x"]), "echo": True,
            "separate_reasoning": False, "thinking_token_budget": draw.choice([0, 1, 2**31, -1]),
        }  # fmt: skip
        for name in draw.sample(sorted(extras), draw.choice([0, 1, 2])):
            body[name] = extras[name]
        return body

    def _message(self) -> dict[str, Any]:
        draw = self.draw
        blocks: list[Any] = [{"type": "text", "text": self.text() or "a"}]
        body: dict[str, Any] = {"max_tokens": draw.choice([1, 2, 4]), "messages": [{"role": "user", "content": blocks}]}
        if draw.random() < 0.3:
            use = {"type": "tool_use", "id": "x", "name": draw.choice(NAMES), "input": draw.choice([{}, {"a": 1}, "x"])}
            thought = {"type": "thinking", "thinking": self.text(), "signature": "x"}
            result = {"type": "tool_result", "tool_use_id": "x", "content": draw.choice([self.text(), blocks, None])}
            body["messages"].append({"role": "assistant", "content": [thought, use]})
            body["messages"].append({"role": draw.choice(["user", "user", "system"]), "content": [result]})
        if draw.random() < 0.5:
            functions = [self.tool()["function"] for _ in range(draw.choice([1, 2]))]
            body["tools"] = [one | {"input_schema": one.pop("parameters", {"type": "object"})} for one in functions]
            kinds = [{"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": draw.choice(NAMES)}]
            body["tool_choice"] = draw.choice([*kinds, {}, {"type": []}])
        extras = {
            "stream": True, "system": draw.choice(["x", [{"type": "text", "text": "x"}], [{}]]), "top_k": 5,
            "thinking": draw.choice([{"type": "enabled", "budget_tokens": draw.choice([1, 5, 0])}, {"type": "x"}, {}]),
            "stop_sequences": [draw.choice(MARKUP)], "metadata": {"user_id": "x"},
            "output_config": {"format": {"type": "json_schema", "schema": self.schema()}},
        }  # fmt: skip
        for name in draw.sample(sorted(extras), draw.choice([0, 1, 2])):
            body[name] = extras[name]
        return body

    def _response(self) -> dict[str, Any]:
        draw = self.draw
        items: list[Any] = [{"role": draw.choice(["user", "developer"]), "content": self.text() or "a"}]
        if draw.random() < 0.3:
            items += [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": self.text()}]},
                {"type": "function_call", "call_id": "c", "name": draw.choice(NAMES), "arguments": self.text()},
                {"type": "function_call_output", "call_id": "c", "output": self.text()},
            ]
        body: dict[str, Any] = {"input": draw.choice([items, items, self.text() or "a"]), "max_output_tokens": 4}
        if draw.random() < 0.5:
            body["tools"] = [{"type": "function"} | self.tool()["function"] for _ in range(draw.choice([1, 2]))]
            if draw.random() < 0.2:
                body["tools"] = [{"type": "namespace", "name": draw.choice(NAMES), "tools": body["tools"]}]
            body["tool_choice"] = draw.choice(["auto", "required", {"type": "function", "name": draw.choice(NAMES)}])
        extras = {
            "stream": True, "instructions": self.text(), "store": draw.choice([True, False]), "background": True,
            "previous_response_id": "resp-1", "reasoning": draw.choice([{"effort": "low"}, {"summary": "auto"}, {}]),
            "text": {"format": {"type": "json_schema", "name": "x", "schema": self.schema()}}, "truncation": "auto",
            "metadata": {"a": "b"}, "top_logprobs": draw.choice([0, 2, 99]),
            "include": draw.choice([[], ["reasoning.encrypted_content"], ["message.output_text.logprobs"], ["x"]]),
        }  # fmt: skip
        for name in draw.sample(sorted(extras), draw.choice([0, 1, 2])):
            body[name] = extras[name]
        return body

    def _completion(self) -> dict[str, Any]:
        return {"prompt": self.draw.choice(["a", ["a", "b"], [5, 6], self.text() or "b"]), **self._common()}

    def _parse(self) -> dict[str, Any]:
        tools = [self.tool() for _ in range(self.draw.choice([0, 1, 2]))]
        return {"text": self.text(), "tools": tools, "tool_call_parser": self.draw.choice(PARSERS)}

    def _separate(self) -> dict[str, Any]:
        return {"text": self.text(), "reasoning_parser": self.draw.choice(THOUGHTS)}

    def _tokenize(self) -> dict[str, Any]:
        body = self._chat()
        names = ("messages", "tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
        return {name: body[name] for name in names if name in body}

    def _load(self) -> dict[str, Any]:
        name = self.draw.choice(["a", "b", "c", self.draw.choice(NAMES)])
        body = {"lora_name": name, "lora_path": self.draw.choice(PLACES)}
        return body | self.draw.choice([{}, {"load_inplace": True}, {"load_inplace": "x"}])

    def _unload(self) -> dict[str, Any]:
        return {"lora_name": self.draw.choice(["a", "b", "c", self.draw.choice(NAMES)])}

    def _pooled(self, path: str) -> dict[str, Any]:
        draw = self.draw
        given = {
            "/v1/score": {"text_1": "a", "text_2": ["a", "b"]}, "/v1/rerank": {"query": "a", "documents": ["a", "b"]},
        }  # fmt: skip
        body: dict[str, Any] = given.get(path, {"input": draw.choice(["a", ["a", "b"]])})
        extras = {
            "dimensions": draw.choice([1, 9, 60, 99, 0, -1, "9"]), "encoding_format": draw.choice(["base64", "int8"]),
            "truncate_prompt_tokens": draw.choice([-1, 0, 1, 64, 2**40]), "prompt_name": draw.choice(["query", "x"]),
            "task": draw.choice(["embed", "token_embed", "classify", "encode"]), "normalize": draw.choice([False, 5]),
            "top_n": draw.choice([1, 0, -1, 2**40, "x"]), "return_documents": draw.choice([False, "x"]),
            "instruction": draw.choice(["Judge.", "{query}", "x" * 300, 5]), "use_activation": False,
            "add_special_tokens": False, "activation": False, "priority": draw.choice([1, 2**70]), "model": "nobody",
            "request_id": draw.choice(["x", "x" * 5000, "\n"]), "queries": "a", "documents": ["a"],
        }  # fmt: skip
        for name in draw.sample(sorted(extras), draw.choice([0, 0, 1, 2])):
            body[name] = extras[name]
        if draw.random() < 0.3:
            body[draw.choice(sorted(body))] = fresh(draw.choice(TEXTS))
        return body

    def _mutate(self, body: dict[str, Any]) -> None:
        """Change one place of a body, however deep: another value, none, one level more, or a key more."""
        draw = self.draw
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return
            key = draw.choice(keys)
            if not isinstance(place[key], dict | list) or not place[key] or draw.random() < 0.3:
                break
            place = place[key]
        kind = draw.random()
        if kind < 0.6:
            place[key] = fresh(draw.choice(ODD))
        elif kind < 0.75:
            del place[key]
        elif kind < 0.85:
            place[key] = draw.choice([[place[key]], {"a": place[key]}, [place[key]] * 3])
        elif isinstance(place, dict):
            place[draw.choice(["type", "x", "\ud800", "$ref", "__proto__"])] = fresh(draw.choice(ODD))
        else:
            place.append(fresh(draw.choice(ODD)))

    def _damaged(self, data: bytes) -> bytes:
        at = self.draw.randrange(len(data) + 1)
        middle = self.draw.choice([b"", b"\xff", b"\x00", b"NaN", b"{", b'"', b"\\ud800", b",,", b"1e999", b"-"])
        return data[:at] + middle + data[at + self.draw.randrange(3) :]
