"""Turns structural tags into the grammars of text in which some parts have a form, as xgrammar, vLLM and SGLang do.

The older form lists `structures` (begin, schema, end) that follow `triggers`; the newer one is a tree of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.parsers.written import WRITTEN, Tagged
from headrace.structured_outputs.alternatives import Schemas
from headrace.structured_outputs.argument_grammar import TaggedArguments
from headrace.structured_outputs.ebnf import lark_of_ebnf
from headrace.structured_outputs.grammar import TEXT, Grammar, JsonOptions, Rules, without
from headrace.structured_outputs.keywords import list_of, object_of
from headrace.structured_outputs.limits import MAX_DEPTH, MAX_FORMATS, check_text, decoded
from headrace.structured_outputs.regex import checked_regex
from headrace.structured_outputs.schema import checked_schema

Form = Mapping[str, Any]
_QWEN = WRITTEN["qwen3_coder"].arguments


def of_structural_tag(tag: Form, special: Mapping[str, int], options: JsonOptions, path: str) -> Grammar:
    """Return the grammar of a structural tag. `special`: the vocabulary's marks; `path`: names the tag in errors."""
    reader = _Reader(special, options)
    if "format" in tag:
        return reader.rules.grammar(reader.read(tag["format"], (), path + ".format"))
    if "structures" not in tag:
        raise _wrong(f"{path} must have `format`, or `structures` and `triggers`", path)
    tags = [
        {
            "type": "tag",
            "begin": object_of(one, f"{path}.structures[{index}]").get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end", ""),
        }
        for index, one in enumerate(list_of(tag["structures"], path + ".structures"))
    ]
    triggered = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return reader.rules.grammar(reader.read(triggered, (), path))


class _Reader:
    """Reads a tree of formats, and bounds its size."""

    def __init__(self, special: Mapping[str, int], options: JsonOptions) -> None:
        self.rules = Rules(special)
        self._options = options
        self._count = 0
        self._depth = 0
        self._readers: dict[str, Callable[[Form, tuple[str, ...], str], str]] = {
            "const_string": lambda form, ends, path: self._ended(self.rules.literal(_text(form, "value", path)), ends),
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml,
            "grammar": lambda form, ends, path: self._ended(
                self.rules.lark(lark_of_ebnf(_text(form, "grammar", path), path + ".grammar")), ends
            ),
            "regex": lambda form, ends, path: self._ended(
                self.rules.regex(checked_regex(_text(form, "pattern", path), path + ".pattern")), ends
            ),
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": lambda form, ends, path: self.rules.one_of(
                self.read(one, ends, f"{path}.elements[{i}]") for i, one in enumerate(_some(form, "elements", path))
            ),
            "optional": lambda form, ends, path: self._repeat(form, ends, path, 0, 1),
            "star": lambda form, ends, path: self._repeat(form, ends, path, 0, None),
            "plus": lambda form, ends, path: self._repeat(form, ends, path, 1, None),
            "repeat": self._bounded,
            "tag": lambda form, ends, path: self._ended(self._tag(form, path), ends),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def read(self, form: object, ends: tuple[str, ...], path: str) -> str:
        """Return what matches a format and the text in `ends` that follows it, if any: a format that takes any text
        ends where one of them begins."""
        fields = object_of(form, path)
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in self._readers:
            known = ", ".join(self._readers)
            raise _wrong(f"{path}.type must be one of {known}; got {quoted(kind)}", path)
        self._count += 1
        self._depth += 1
        if self._depth > MAX_DEPTH or self._count > MAX_FORMATS:
            raise _wrong(f"{path}: a structural tag may have {MAX_FORMATS} formats, {MAX_DEPTH} deep", path)
        found = self._readers[kind](fields, ends, path)
        self._depth -= 1
        return found or '""'

    def _ended(self, body: str, ends: Sequence[str]) -> str:
        return f"({body}) {self.rules.one_of(map(self.rules.literal, ends))}" if any(ends) else body

    def _up_to(self, ends: Iterable[str]) -> str:
        """Any text up to and with the first of these."""
        return self.rules.one_of(self.rules.until(TEXT, end) for end in ends)

    def _json_schema(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        style = form.get("style", "json")
        if style == "qwen_xml":
            return self._qwen_xml(form, ends, path)
        if style != "json":
            raise _wrong(f"{path}.style must be 'json' or 'qwen_xml', got {quoted(style)}", path)
        schema = checked_schema(form.get("json_schema"), path + ".json_schema", self._options)
        return self._ended(self.rules.json(schema, self._options), ends)

    def _qwen_xml(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        """What matches parameters as Qwen's coder models write them."""
        assert isinstance(_QWEN, Tagged)
        where = path + ".json_schema"
        schema = object_of(decoded(form.get("json_schema"), where), where)
        arguments = TaggedArguments(self.rules, _QWEN, self.rules.literal(_QWEN.before), ends)
        return self._ended(arguments.of(Schemas(schema, where)), ends)

    def _any_text(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        excluded = _texts(form.get("excludes") or [], path + ".excludes")
        if form.get("max_tokens") is not None:
            raise _wrong(f"{path}.max_tokens is not supported; max_chars is", path)
        most = form.get("max_chars")
        if most is not None:
            if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= 2**16 or excluded:
                raise _wrong(f"{path}.max_chars must be 0 to {2**16}, without excludes; got {quoted(most)}", path)
            return self._ended(self.rules.regex(f"(?s:.{{0,{most}}})"), ends)
        if any(ends) and (not excluded or [*excluded] == [*ends]):
            return self._up_to(ends)
        excluded += [end for end in ends if end and end not in self.rules.special]
        return self._ended(self.rules.terminal(without(excluded)), ends)

    def _sequence(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        elements = _some(form, "elements", path)
        kinds = [one.get("type") if isinstance(one, Mapping) else None for one in elements]
        found, index = [], 0
        while index < len(elements):
            where, following = f"{path}.elements[{index}]", (*elements[index + 1 : index + 2], None)[0]
            if kinds[index : index + 2] == ["any_text", "const_string"]:
                found.append(self.read(elements[index], (_text(object_of(following, where), "value", where),), where))
                index += 2
                if index == len(elements):
                    return self._ended(" ".join(found), ends)
                continue
            found.append(f"({self.read(elements[index], ends if following is None else (), where)})")
            index += 1
        return " ".join(found)

    def _repeat(self, form: Form, ends: tuple[str, ...], path: str, least: int, most: int | None) -> str:
        inner = self.read(form.get("content"), (), path + ".content")
        return self._ended(self.rules.repeated(inner, least, most), ends)

    def _bounded(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        bounds = form.get("min"), form.get("max")
        least, most = (one if type(one) is int and -1 <= one <= 4096 else None for one in bounds)
        if least is None or most is None:
            raise _wrong(f"{path}: min and max must be integers up to 4096, got {quoted(list(bounds))}", path)
        if least < 0 or -1 < most < least:
            raise _wrong(f"{path}: min must be at least 0 and at most max, got {least} and {most}", path)
        return self._repeat(form, ends, path, least, None if most == -1 else most)

    def _tag(self, form: object, path: str, skip: int = 0) -> str:
        """What matches a tag, without the first `skip` characters of its beginning."""
        fields = object_of(form, path)
        begin = _text(fields, "begin", path)[skip:]
        end = fields.get("end", "")
        ends = _texts([end] if isinstance(end, str) else end, path + ".end")
        inner = self.read(fields.get("content"), tuple(ends), path + ".content")
        return f"{self.rules.literal(begin)} ({inner})".strip()

    def _triggered_tags(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        triggers = _texts(form.get("triggers"), path + ".triggers")
        tags = list_of(form.get("tags"), path + ".tags")
        if not tags or not triggers or "" in triggers:
            raise _wrong(f"{path} needs at least one tag and one trigger, none of them empty", path)
        found: dict[str, list[str]] = {}
        for index, tag in enumerate(tags):
            where = f"{path}.tags[{index}]"
            begin = _text(object_of(tag, where), "begin", where)
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not fitting:
                raise _wrong(f"{where}.begin must begin with one of the triggers, got {quoted(begin)}", path)
            mark = max((mark for mark in self.rules.special if begin.startswith(mark)), key=len, default="")
            trigger = max([*fitting, mark], key=len)
            found.setdefault(trigger, []).append(self._tag(tag, where, len(trigger)))
        rules, inner = self.rules, {trigger: self.rules.one_of(tags) for trigger, tags in found.items()}
        direct = rules.one_of(f"{rules.literal(trigger)} ({one})" for trigger, one in inner.items())
        after_text = rules.one_of(f"{rules.until(TEXT, trigger)} ({one})" for trigger, one in inner.items())
        tail = self._up_to(ends) if any(ends) else TEXT
        if form.get("stop_after_first"):
            stopped = self._ended(direct if form.get("at_least_one") else after_text, ends)
            return stopped if form.get("at_least_one") else rules.one_of([stopped, tail])
        rest = f"{rules.repeated(after_text)} {tail}"
        return f"{direct} {rest}" if form.get("at_least_one") else rest

    def _tags_with_separator(self, form: Form, ends: tuple[str, ...], path: str) -> str:
        tags = _some(form, "tags", path)
        whole = one = self.rules.one_of(self._tag(tag, f"{path}.tags[{index}]") for index, tag in enumerate(tags))
        if not form.get("stop_after_first"):
            separator = check_text(form.get("separator", ""), path + ".separator")
            whole = f"({one}) ({self.rules.literal(separator)} ({one}))*"
        return self._ended(whole if form.get("at_least_one") else self.rules.repeated(whole, 0, 1), ends)


def _wrong(message: str, path: str) -> RequestError:
    return RequestError(message, path.partition(".")[0])


def _some(form: Form, key: str, path: str) -> list[Any]:
    found = list_of(form.get(key), f"{path}.{key}")
    if not found:
        raise _wrong(f"{path}.{key} must not be empty", path)
    return found


def _text(form: Form, key: str, path: str) -> str:
    return check_text(form.get(key), f"{path}.{key}")


def _texts(value: object, path: str) -> list[str]:
    return [check_text(text, f"{path}[{index}]") for index, text in enumerate(list_of(value, path))]
