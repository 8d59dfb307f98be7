"""Grammars of tool calls, in each model family's own way of writing them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from headrace.errors import RequestError, quoted
from headrace.parsers.formats import ToolFormat
from headrace.parsers.tools import FunctionTool
from headrace.parsers.written import SYNTAX, Json, Literals, Markup, Maybe, Pattern, Tagged, Written
from headrace.structured_outputs.alternatives import Schemas
from headrace.structured_outputs.argument_grammar import LiteralArguments, TaggedArguments
from headrace.structured_outputs.conversion import ANY_OBJECT, check
from headrace.structured_outputs.grammar import Grammar, either
from headrace.structured_outputs.harmony import in_channels
from headrace.structured_outputs.lark import Rules, escaped, without
from headrace.structured_outputs.limits import MAX_SCHEMA_CHARS
from headrace.structured_outputs.schema import grammar_of_schema

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_grammar(
    format: ToolFormat,
    tools: Sequence[FunctionTool],
    *,
    at_least: int,
    at_most: int | None,
    only: str | None = None,
    strict: bool = True,
    special: Mapping[str, int],
) -> Grammar:
    """Return the grammar of an answer that calls tools.

    With `at_least` 0, calls stand in free text; otherwise nothing stands around them. `at_most` may be 1 or None.
    `only` names the one tool that may be called. With `strict`, arguments follow the schema of every tool; otherwise
    those of strict tools do, and others are what the format takes. `special`: the vocabulary's marks.
    """
    chosen = [tool for tool in tools if only in (None, tool.name)]
    if not chosen:
        raise RequestError(f"tool_choice names the function {quoted(only)}, which is not in tools", "tool_choice")
    size = sum(len(json.dumps(tool.parameters)) for tool in chosen if strict or tool.strict)
    if size > MAX_SCHEMA_CHARS:
        raise RequestError(
            f"tools have schemas of {size} characters; at most {MAX_SCHEMA_CHARS} can be held by a grammar, as"
            f" tool_choice or strict wants it",
            "tools",
        )
    found = []
    for written in _ways(format, special):
        writer = _Writer(Rules(special), written, format)
        for place, tool in enumerate(tools):
            if tool in chosen:
                writer.add(tool, f"tools[{place}].function.parameters", strict or tool.strict)
        single = at_most == 1 or written.single
        free = not at_least and not format.whole_answer
        found.append(writer.rules.grammar(writer.free_text(single) if free else writer.calls(single)))
    whole = in_channels(either(*found), special, or_final=not at_least) if format.whole_answer else found[0]
    _check(whole, tools, special)
    return whole


def _check(grammar: Grammar, tools: Sequence[FunctionTool], special: Mapping[str, int]) -> None:
    """Refuse what llguidance does not take, naming the tool whose parameters it does not take alone."""
    try:
        check(grammar, special, "tools")
    except RequestError as error:
        for place, tool in enumerate(tools):
            path = f"tools[{place}].function.parameters"
            check(grammar_of_schema(tool.parameters, path), {}, path)
        message = f"the schemas of {len(tools)} tools can be held by a grammar one by one, but not all of them together"
        raise RequestError(f"tools: {message} ({error})", "tools") from None


def _ways(format: ToolFormat, special: Mapping[str, int]) -> list[Written]:
    """The ways of writing calls that a tokenizer has the marks for."""
    found = []
    written: Written | None = SYNTAX.get(format.name)
    while written:
        found += [written] if all(mark in special for mark in written.needs) else []
        written = written.instead
    if not found:
        raise RequestError(f"tool_choice: calls of the format {format.name} cannot be held by a grammar", "tool_choice")
    return found


class _Writer:
    """Writes the grammar of one answer."""

    def __init__(self, rules: Rules, written: Written, format: ToolFormat) -> None:
        self.rules = rules
        self.bodies: dict[str, str] = {}
        """Name -> what follows it in a call."""
        self._written = written
        self._openers = format.openers
        self._whole_answer = format.whole_answer
        self._starts = format.at_start
        self._silent = [mark for mark in format.silent if mark in rules.special]
        # What ends a call or the section: no argument that stands there as it is may hold it.
        self._stops = [*_tags(written.after), *_tags(written.end)]

    def add(self, tool: FunctionTool, field: str, strict: bool) -> None:
        """Add a tool that may be called: what a call of it is from the end of its name on."""
        written, name = self._written, tool.name
        if isinstance(written.middle, str) and written.middle.startswith('"'):
            name = json.dumps(name)[1:-1]
        rules = self.rules
        body = rules.joined(self._markup(written.middle), self._arguments(tool, field, strict))
        self.bodies[name] = rules.joined(body, rules.space if written.after else "", self._markup(written.after))

    @property
    def _call(self) -> str:
        """A call of any of the tools, from its name on."""
        named = (self.rules.joined(self.rules.literal(name), body) for name, body in self.bodies.items())
        return self.rules.one_of(named)

    def _arguments(self, tool: FunctionTool, field: str, strict: bool) -> str:
        schemas = Schemas(tool.parameters if strict and tool.parameters else NO_PARAMETERS, field)
        match self._written.arguments:
            case Tagged() as tags:
                tagged = TaggedArguments(self.rules, tags, self._stops)
                return tagged.of(schemas) if strict else tagged.any()
            case Literals() as literals:
                literal = LiteralArguments(self.rules, literals, self._stops)
                return literal.of(schemas) if strict else literal.any()
            case Json():
                return self.rules.json({"type": "object", **schemas.root} if strict else ANY_OBJECT)

    def calls(self, single: bool) -> str:
        """Calls with nothing around them but the markup of a section, and white space, as there is behind reasoning."""
        if self._whole_answer:
            return self._section(self._written.begin, self._written.before, single)
        mark = f"({self.rules.literal(self._written.mark)})?" if self._written.mark else ""
        return self.rules.joined(
            self.rules.space, mark, self.rules.space, self._section(self._written.begin, self._written.before, single)
        )

    def free_text(self, single: bool) -> str:
        """Free text in which what follows the markup that begins calls is held to them.

        All markup that would begin calls in another way is kept out. Where nothing but the answer's first character
        tells calls from text, text does not begin so.
        """
        written, rules = self._written, self.rules
        begin = written.mark or _lead(written.begin) or _lead(written.before)
        opener = max((one for one in self._openers if begin.startswith(one)), key=len, default="")
        if isinstance(written.arguments, Literals) and written.begin == "[":
            return self._bracketed(single)
        if not opener or written.mark:
            text = self._no_start()
            bare = f"{rules.terminal(text)} | {self._section(written.begin, written.before, single)}"
            if not opener:
                return bare
            section = self._section(written.begin, written.before, single)
            return f"{bare} | {rules.joined(rules.until(text, opener), section)}"
        section = self._section(
            _cut(written.begin, opener),
            written.before if written.begin else _cut(written.before, opener),
            single,
        )
        text = rules.terminal(without(self._openers))
        marks = f"({text} ({' | '.join(map(rules.literal, self._silent))}))*" if self._silent else ""
        one = rules.rule(rules.joined(marks, self._up_to(opener), section))
        return rules.joined(f"{one}{'?' if single else '*'}", marks, text)

    def _up_to(self, opener: str) -> str:
        """Text up to an opener and with it. The text of a mark, spelled by other tokens, begins calls too."""
        others = [one for one in self._openers if one != opener]
        heads = [self.rules.until(without(others), opener, spelled=True)]
        if opener in self.rules.special:
            heads.append(self.rules.until(without(self._openers), opener))
        return self.rules.one_of(heads)

    def _section(self, begin: Markup, before: Markup, single: bool) -> str:
        """A section of calls, of which `begin`, and `before` the first call's name, are still to be written."""
        opening = self.rules.joined(self._markup(begin), self.rules.space if self._written.begin else "")
        return self.rules.joined(opening, self._markup(before), self._call, self._rest(single))

    def _rest(self, single: bool) -> str:
        """What follows the first call of a section."""
        written, rules = self._written, self.rules
        again = rules.joined(self._markup(written.between), rules.space, self._markup(written.before), self._call)
        end = rules.joined(rules.space, self._markup(written.end)) if written.end else ""
        return rules.joined("" if single else f"({again})*", end)

    def _bracketed(self, single: bool) -> str:
        """Free text in which a bracket begins calls if a tool's name and a parenthesis follow it."""
        rules, mark = self.rules, self._written.mark
        names = "|".join(map(escaped, self.bodies))
        text = f"({without([mark] if mark else [])} & ~/(?s:.*)\\[\\s*({names})\\s*\\((?s:.*)/)"
        again = self._rest(single)
        found = [
            rules.joined(rules.until(text, f"[{name}("), body.removeprefix(rules.literal("(")).strip(), again)
            for name, body in self.bodies.items()
        ]
        if mark:
            section = self._section(self._written.begin, self._written.before, single)
            found.append(rules.joined(rules.until(text, mark), rules.space, section))
        return f"{rules.one_of(found)}{'?' if single else '*'} {rules.terminal(text)}"

    def _no_start(self) -> str:
        """Text that neither begins as a call does nor has markup of calls in it."""
        begin = _lead(self._written.begin) or _lead(self._written.before)
        first = {one[0] for one in (*self._starts, begin) if one}
        start = "".join("\\" + char for char in sorted(first))
        return f"(/[ \\t\\r\\n]*([^ \\t\\r\\n{start}](?s:.*))?/ & {without(self._openers)})"

    def _markup(self, markup: Markup) -> str:
        """Markup with the parts of it that the model makes up."""
        found = []
        for part in (markup,) if isinstance(markup, str) else markup:
            if isinstance(part, Pattern):
                found.append(self.rules.terminal(f"/{part.regex}/"))
            elif isinstance(part, Maybe):
                found.append(f"({self._markup(part.parts)})?")
            else:
                found.append(self.rules.loose(part))
        return self.rules.joined(*found)


def _tags(markup: Markup) -> list[str]:
    """The tags in markup."""
    parts = (markup,) if isinstance(markup, str) else markup
    return [tag for part in parts if isinstance(part, str) for tag in re.findall(r"<[^<>]*>", part)]


def _lead(markup: Markup) -> str:
    """Markup up to the first part of it that the model makes up."""
    parts = (markup,) if isinstance(markup, str) else markup
    return parts[0] if parts and isinstance(parts[0], str) else ""


def _cut(markup: Markup, opener: str) -> Markup:
    """Markup behind its opener."""
    if isinstance(markup, str):
        return markup[len(opener) :]
    return (_lead(markup)[len(opener) :], *markup[1:])
