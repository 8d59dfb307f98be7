"""Makes grammars of tool calls, in each model family's own way of writing them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from headrace.errors import RequestError, quoted
from headrace.parsers.formats import ToolFormat
from headrace.parsers.tools import FunctionTool
from headrace.parsers.written import WRITTEN, Json, Literals, Markup, Maybe, Pattern, Tagged, Written
from headrace.structured_outputs.alternatives import Schemas
from headrace.structured_outputs.argument_grammar import TaggedArguments
from headrace.structured_outputs.conversion import ANY_OBJECT, checked
from headrace.structured_outputs.grammar import Grammar, Rules, either, escaped, without
from headrace.structured_outputs.harmony import in_channels
from headrace.structured_outputs.limits import MAX_SCHEMA_CHARS
from headrace.structured_outputs.literal_grammar import LiteralArguments
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
    held = [tool for tool in chosen if strict or tool.strict]
    size = sum(len(json.dumps(tool.parameters)) for tool in held)
    if size > MAX_SCHEMA_CHARS:
        raise RequestError(
            f"tools have schemas of {size} characters; at most {MAX_SCHEMA_CHARS} can be held by a grammar, as"
            f" tool_choice or strict wants it",
            "tools",
        )
    paths = {tool.name: f"tools[{place}].function.parameters" for place, tool in enumerate(tools)}
    found = []
    for written in _ways(format, special):
        writer = _Writer(Rules(special), written, format)
        for tool in chosen:
            writer.add(tool, paths[tool.name], tool in held)
        single = at_most == 1 or written.single
        free = not at_least and not format.whole_answer
        found.append(writer.rules.grammar(writer.free_text(single) if free else writer.calls(single)))
    whole = in_channels(either(*found), special, or_final=not at_least) if format.whole_answer else found[0]
    try:
        return checked(whole, special, "tools")
    except RequestError as error:
        for tool in held:  # the one that llguidance does not take alone, if there is one
            checked(grammar_of_schema(tool.parameters, paths[tool.name]), {}, paths[tool.name])
        message = f"the schemas of {len(held)} tools cannot be held by one grammar all together ({error})"
        raise RequestError(f"tools: {message}", "tools") from None


def _ways(format: ToolFormat, special: Mapping[str, int]) -> list[Written]:
    """The ways of writing calls that a tokenizer has the marks for."""
    found = []
    written: Written | None = WRITTEN.get(format.name)
    while written:
        found += [written] if all(mark in special for mark in written.needs) else []
        written = written.instead
    if not found:
        raise RequestError(f"tool_choice: calls of the format {format.name} cannot be held by a grammar", "tool_choice")
    return found


_BRACKETS = ("[", "{")
"""Openers that other text has in it too."""


class _Writer:
    """Writes the grammar of one answer."""

    def __init__(self, rules: Rules, written: Written, format: ToolFormat) -> None:
        self.rules = rules
        self.bodies: dict[str, str] = {}
        """Name -> what follows it in a call."""
        self._written = written
        self._openers = format.openers
        self._whole_answer = format.whole_answer
        self._bare = format.bare
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
                tagged = TaggedArguments(self.rules, tags, self._markup(tags.before), self._stops)
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
        space, mark = self.rules.space, self._written.mark
        marked = f"({self.rules.literal(mark)} {space})?" if mark else ""
        return self.rules.joined(space, marked, self._section(self._written.begin, self._written.before, single))

    def free_text(self, single: bool) -> str:
        """Free text in which what follows the markup that begins calls is held to them.

        All markup that would begin calls in another way is kept out.
        """
        written, rules = self._written, self.rules
        begin = _lead(written.begin) or _lead(written.before)
        opener = self._opener_of(begin)
        if opener in _BRACKETS:
            return self._among_brackets(single)
        if not opener:
            return f"{rules.terminal(self._no_start())} | {self._section(written.begin, written.before, single)}"
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
        if self.rules.at_mark(opener)[1]:
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

    def _among_brackets(self, single: bool) -> str:
        """Free text in which a bracket begins calls only with what must follow it there: a tool's name and a
        parenthesis, or a key that calls have."""
        rules, rest = self.rules, self._rest(single)
        if isinstance(self._written.arguments, Literals):
            names = "|".join(map(escaped, self.bodies))
            kept_out = rf"\[\s*({names})\s*\("
            found = [
                (rf"\[\s*{escaped(name)}\s*\(", body.removeprefix(rules.literal("(")))
                for name, body in self.bodies.items()
            ]
        else:
            kept_out = r"\{\s*\"(name|parameters|arguments|type|id|function)\"\s*:"
            found = [(r"\{\s*\"name\"\s*:\s*\"", self._call)]
        mark = self._written.mark
        text = f"({without([one for one in self._openers if one not in _BRACKETS])} & ~/(?s:.*){kept_out}(?s:.*)/)"
        calls = [rules.joined(rules.until_pattern(text, head), call.strip(), rest) for head, call in found]
        if mark:
            section = self._section(self._written.begin, self._written.before, single)
            calls.append(rules.joined(rules.until(text, mark), rules.space, section))
        return f"{rules.rule(rules.one_of(calls))}{'?' if single else '*'} {rules.terminal(text)}"

    def _no_start(self) -> str:
        """Text that neither begins with a bracket, as calls do there, nor has markup of calls in it."""
        start = "".join("\\" + one for one in self._bare)
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
                opener = self._opener_of(part)
                found += [self.rules.literal(opener), self.rules.loose(part[len(opener) :])]
        return self.rules.joined(*found)

    def _opener_of(self, text: str) -> str:
        """The opener that a text begins with, or "". It is written as it is, white space too."""
        return max((one for one in self._openers if text.startswith(one)), key=len, default="")


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
