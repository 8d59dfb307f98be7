"""Renders chat messages into prompt text with a model's jinja template, in a sandbox bounded in time and size.

A template is data from a model's repository. It can read what it is given and nothing else, run for two seconds at
most, and write a bounded text. Knows nothing of tokens or of HTTP.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from headrace.errors import RequestError, clip, quoted

logger = logging.getLogger(__name__)

MAX_RENDERED_CHARS = 16 * 2**20
MAX_RENDER_SECONDS = 2.0
MAX_REPEAT = 10**6
"""Largest result of `text * n`, and largest result of `a ** b` in bits."""
MAX_PARTS = 2**18
"""Most parts of a text that is split. Splitting, like writing JSON, is one call during which no other thread can
run."""
MAX_JSON_CHARS = 2**22
"""Most characters of a value that is written as JSON."""
RESERVED_KWARGS = frozenset(
    "messages tools documents chat_template tokenize tokenizer add_generation_prompt "
    "conversation continue_final_message return_dict return_tensors padding truncation max_length "
    "tokenizer_kwargs return_assistant_tokens_mask".split()
)
"""Names that `chat_template_kwargs` of a request may not set."""
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, a tag that marks what training learns from and means nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Checks the clock wherever a template can spend time: in calls, products, and access to attributes and items."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._clock = threading.local()  # several threads may render at once

    def start_clock(self) -> None:
        self._clock.deadline = time.monotonic() + MAX_RENDER_SECONDS

    def check_clock(self) -> None:
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise jinja2.sandbox.SecurityError(f"rendering took more than {MAX_RENDER_SECONDS:g} s")

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check_clock()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and len(text) > MAX_PARTS and __obj.__name__ in ("split", "rsplit", "splitlines"):
            separators = [value for value in (*args, *kwargs.values()) if isinstance(value, str) and value]
            if not separators or text.count(separators[0]) >= MAX_PARTS:
                raise jinja2.sandbox.SecurityError(f"a text would be split into more than {MAX_PARTS} parts")
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        self.check_clock()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    _bounded(len(sequence) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bounded(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise jinja2.sandbox.SecurityError(f"{quoted(left)} asks for a wide text")
        return super().call_binop(context, operator, left, right)


def _bounded(size: int) -> None:
    if size > MAX_REPEAT:
        raise jinja2.sandbox.SecurityError(f"a product of size {size} is over the limit of {MAX_REPEAT}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON. Jinja's own filter would escape HTML, which a prompt is not."""
    if _characters(value) > MAX_JSON_CHARS:
        raise jinja2.sandbox.SecurityError(f"a value of more than {MAX_JSON_CHARS} characters would be written as JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_characters(key) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 1


class ChatTemplate:
    """Holds one compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises jinja2.TemplateError if `source` is not one."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        functions: dict[str, Any] = environment.globals
        functions |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = environment.from_string(source)
        tree = environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        """Names of all variables that the template reads."""
        self.keys = _keys(tree)
        """Names of all attributes and keys that it reads, whatever of."""
        self.tells_null_content = any(
            test.name == "none" and _key(test.node) == "content" for test in tree.find_all(jinja2.nodes.Test)
        )
        """Whether it asks if a message's content is null. Others may print null as a text, or fail at it."""
        self.reads_bare_calls = any(_of_numbered_call(node) for node in tree.find_all(jinja2.nodes.Getattr))
        """Whether it reads a call's name beside its `type`, where most have a `function` between."""
        self._environment = environment

    @cached_property
    def shows_late_system(self) -> bool:
        """Tell whether it shows a message of the system behind others. Many refuse one, or leave it out."""
        roles, mark = ("user", "system", "assistant", "user"), secrets.token_hex(16)
        try:
            return mark in self.render([{"role": role, "content": mark if role == "system" else "a"} for role in roles])
        except RequestError:
            return False

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a conversation; encode it with `add_special_tokens=False`.

        `kwargs` go to the template. With `continue_final_message` the prompt ends with the last message's text, which
        the model continues. Raises RequestError, naming the field: `messages`, if the template fails,
        `chat_template_kwargs` for a reserved name, or `continue_final_message`, if that is not possible.
        """
        if continue_final_message:
            return self._render_continued(messages, tools, add_generation_prompt, kwargs)
        for name in kwargs:
            if name in RESERVED_KWARGS or name in self._special_tokens or name.startswith("_"):
                raise RequestError(f"chat_template_kwargs may not set {quoted(name)}", "chat_template_kwargs")
        context = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        parts: list[str] = []
        size = 0
        self._environment.start_clock()
        try:
            for part in self._template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise jinja2.sandbox.SecurityError(f"the prompt has more than {MAX_RENDERED_CHARS} characters")
                self._environment.check_clock()
        except Exception as error:  # a template may fail in any way that Python code can
            logger.debug("chat template failed", exc_info=True)
            raise RequestError(f"chat template: {clip(_describe(error))}", "messages") from error
        return "".join(parts)

    def _render_continued(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> str:
        """Render up to the end of the last message's text. A random mark finds that place: the text itself may occur
        again in what the template writes behind it (`<` in `<|im_end|>`)."""
        name = "continue_final_message"
        if add_generation_prompt:
            raise RequestError(f"{name} needs add_generation_prompt to be false", name)
        content = messages[-1].get("content") if messages else None
        if not isinstance(content, str):
            raise RequestError(f"{name} needs a last message whose content is text", name)
        text = content.rstrip()
        space, mark = content[len(text) :], secrets.token_hex(16)
        marked = [*messages[:-1], {**messages[-1], "content": text + mark + space}]
        before, found, after = self.render(marked, tools, False, kwargs).rpartition(mark)
        if not text or not found:
            raise RequestError(f"{name}: the template does not show the last message's text", name)
        return before + space if after.startswith(space) else before


def _key(node: jinja2.nodes.Node | None) -> str | None:
    """Return the attribute or key that an expression reads: `content` of `message.content` and `message['content']`."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None


def _keys(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Return what is read (`a.b`, `a['b']`, `a.get('b')`) or looked for (`'b' in a`)."""
    found = {_key(node) for node in tree.find_all((jinja2.nodes.Getattr, jinja2.nodes.Getitem))}
    for call in tree.find_all(jinja2.nodes.Call):
        if _key(call.node) == "get" and call.args and isinstance(call.args[0], jinja2.nodes.Const):
            found.add(call.args[0].value)
    for compare in tree.find_all(jinja2.nodes.Compare):
        if isinstance(compare.expr, jinja2.nodes.Const) and compare.ops[0].op in ("in", "notin"):
            found.add(compare.expr.value)
    return frozenset(name for name in found if isinstance(name, str))


def _of_numbered_call(node: jinja2.nodes.Getattr) -> bool:
    """Return whether an expression is `message.tool_calls[0].name`."""
    call = node.node
    return node.attr == "name" and isinstance(call, jinja2.nodes.Getitem) and _key(call.node) == "tool_calls"


def _describe(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateError):
        return str(error.message or type(error).__name__)
    return f"{type(error).__name__}: {error}"
