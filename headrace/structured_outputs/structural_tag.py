"""Turns structural tags into the grammars of text in which some parts have a form, as xgrammar, vLLM and SGLang do.

The older form lists `structures` (begin, schema, end) that follow `triggers`; the newer one is a tree of formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import RequestError, quoted
from headrace.structured_outputs import schema as schemas
from headrace.structured_outputs.ebnf import lark_of_ebnf
from headrace.structured_outputs.grammar import (
    Grammar,
    any_text,
    either,
    literal,
    of_lark,
    of_regex,
    of_text,
    repeated,
    sequence,
    up_to,
)
from headrace.structured_outputs.limits import MAX_DEPTH, MAX_FORMATS, check_text
from headrace.structured_outputs.regex import checked_regex

Form = Mapping[str, Any]


def of_structural_tag(tag: Form, special: Mapping[str, int], options: schemas.JsonOptions, path: str) -> Grammar:
    """Return the grammar of a structural tag. `special`: the vocabulary's marks; `path`: names the tag in errors."""
    reader = _Reader(special, options)
    if "format" in tag:
        return reader.read(_object(tag["format"], path + ".format"), (), path + ".format")
    if "structures" not in tag:
        raise _wrong(f"{path} must have `format`, or `structures` and `triggers`", path)
    structures = _list(tag["structures"], path + ".structures")
    tags = [
        {
            "type": "tag",
            "begin": _object(one, f"{path}.structures[{index}]").get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end", ""),
        }
        for index, one in enumerate(structures)
    ]
    return reader.read({"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, (), path)


class _Reader:
    """Reads a tree of formats, and bounds its size."""

    def __init__(self, special: Mapping[str, int], options: schemas.JsonOptions) -> None:
        self._special = special
        self._options = options
        self._count = 0
        self._depth = 0
        self._readers: dict[str, Callable[[Form, tuple[str, ...], str], Grammar]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "qwen_xml_parameter": self._qwen_xml,
            "grammar": lambda form, ends, path: self._ended(
                of_lark(lark_of_ebnf(_text(form, "grammar", path), path + ".grammar")), ends
            ),
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": lambda form, ends, path: either(
                *(self.read(one, ends, f"{path}.elements[{i}]") for i, one in enumerate(_elements(form, path)))
            ),
            "optional": lambda form, ends, path: self._repeat(form, ends, path, 0, 1),
            "star": lambda form, ends, path: self._repeat(form, ends, path, 0, None),
            "plus": lambda form, ends, path: self._repeat(form, ends, path, 1, None),
            "repeat": self._bounded,
            "tag": lambda form, ends, path: self._ended(self._tag(form, path), ends),
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def read(self, form: object, ends: tuple[str, ...], path: str) -> Grammar:
        """Return the grammar of a format and of the text in `ends` that follows it, if any: a format that takes any
        text ends where one of them begins."""
        fields = _object(form, path)
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
        return found

    def _literal(self, text: str) -> Grammar:
        return literal(text, self._special)

    def _ended(self, grammar: Grammar, ends: tuple[str, ...]) -> Grammar:
        return sequence(grammar, either(*map(self._literal, ends))) if any(ends) else grammar

    def _const_string(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        return self._ended(self._literal(_text(form, "value", path)), ends)

    def _json_schema(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        style = form.get("style", "json")
        if style == "qwen_xml":
            return self._qwen_xml(form, ends, path)
        if style != "json":
            raise _wrong(f"{path}.style must be 'json' or 'qwen_xml', got {quoted(style)}", path)
        found = schemas.grammar_of_schema(form.get("json_schema"), path + ".json_schema", self._options)
        return self._ended(found, ends)

    def _qwen_xml(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        """Return the grammar of parameters as Qwen's coder models write them: text as it is, other values as JSON."""
        where = path + ".json_schema"
        whole = schemas.checked_schema(form.get("json_schema"), where, self._options)
        required, found = whole.get("required", []), []
        space = of_regex(r"\s{0,8}")
        for name, value in whole.get("properties", {}).items():
            opening = sequence(self._literal(f"<parameter={name}>"), space)
            kind = value.get("type") if isinstance(value, dict) else None
            if kind == "string" and "enum" in value:
                body = sequence(either(*map(of_text, value["enum"])), space, self._literal("</parameter>"))
            elif kind == "string":
                body = up_to("</parameter>", self._special)
            else:
                definitions: dict[str, Any] = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
                inner = schemas.grammar_of_checked({**definitions, **(value if isinstance(value, dict) else {})})
                body = sequence(inner, space, self._literal("</parameter>"))
            found.append(repeated(sequence(opening, body, space), int(name in required), 1))
        return self._ended(sequence(*found), ends)

    def _regex(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        return self._ended(of_regex(checked_regex(_text(form, "pattern", path), path + ".pattern")), ends)

    def _any_text(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        excluded = _texts(form.get("excludes") or [], path + ".excludes")
        if form.get("max_tokens") is not None:
            raise _wrong(f"{path}.max_tokens is not supported; max_chars is", path)
        most = form.get("max_chars")
        if most is not None:
            if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= 2**16 or excluded:
                raise _wrong(f"{path}.max_chars must be 0 to {2**16}, without excludes; got {quoted(most)}", path)
            return self._ended(of_regex(f"(?s:.{{0,{most}}})"), ends)
        if not any(ends):
            return any_text(excluded)
        if not excluded or [*excluded] == [*ends]:
            return either(*(up_to(end, self._special) for end in ends))
        return self._ended(any_text([*excluded, *(end for end in ends if end not in self._special)]), ends)

    def _sequence(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        elements = _elements(form, path)
        found, index = [], 0
        while index < len(elements):
            where = f"{path}.elements[{index}]"
            following = elements[index + 1] if index + 1 < len(elements) else None
            if _type(elements[index]) == "any_text" and _type(following) == "const_string":
                found.append(self.read(elements[index], (_text(_object(following, where), "value", where),), where))
                index += 2
                if index == len(elements):
                    return self._ended(sequence(*found), ends)
                continue
            found.append(self.read(elements[index], ends if following is None else (), where))
            index += 1
        return sequence(*found)

    def _repeat(self, form: Form, ends: tuple[str, ...], path: str, least: int, most: int | None) -> Grammar:
        return self._ended(repeated(self.read(form.get("content"), (), path + ".content"), least, most), ends)

    def _bounded(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        least, most = form.get("min"), form.get("max")
        for value in (least, most):
            if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= 4096:
                raise _wrong(f"{path}: min and max must be integers up to 4096, got {quoted(value)}", path)
        assert isinstance(least, int)
        assert isinstance(most, int)
        if least < 0 or -1 < most < least:
            raise _wrong(f"{path}: min must be at least 0 and at most max, got {least} and {most}", path)
        return self._repeat(form, ends, path, least, None if most == -1 else most)

    def _tag(self, form: object, path: str, skip: int = 0) -> Grammar:
        """Return the grammar of a tag, without the first `skip` characters of its beginning."""
        fields = _object(form, path)
        begin = _text(fields, "begin", path)[skip:]
        end = fields.get("end", "")
        ends = (end,) if isinstance(end, str) else tuple(_texts(end, path + ".end"))
        for one in ends:
            check_text(one, path + ".end")
        inner = self.read(fields.get("content"), ends, path + ".content")
        return sequence(self._literal(begin), inner) if begin else inner

    def _triggered_tags(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        triggers = _texts(form.get("triggers"), path + ".triggers")
        tags = _list(form.get("tags"), path + ".tags")
        if not tags or not triggers or "" in triggers:
            raise _wrong(f"{path} needs at least one tag and one trigger, none of them empty", path)
        found: dict[str, list[Grammar]] = {}
        for index, tag in enumerate(tags):
            where = f"{path}.tags[{index}]"
            begin = _text(_object(tag, where), "begin", where)
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if not fitting:
                raise _wrong(f"{where}.begin must begin with one of the triggers, got {quoted(begin)}", path)
            mark = max((mark for mark in self._special if begin.startswith(mark)), key=len, default="")
            trigger = max([*fitting, mark], key=len)
            found.setdefault(trigger, []).append(self._tag(tag, where, len(trigger)))
        direct = either(*(sequence(self._literal(trigger), either(*inner)) for trigger, inner in found.items()))
        after_text = either(
            *(sequence(up_to(trigger, self._special), either(*inner)) for trigger, inner in found.items())
        )
        tail = either(*(up_to(end, self._special) for end in ends)) if any(ends) else any_text()
        if form.get("stop_after_first"):
            first = direct if form.get("at_least_one") else after_text
            stopped = self._ended(first, ends)
            return stopped if form.get("at_least_one") else either(stopped, tail)
        rest = sequence(repeated(after_text), tail)
        return sequence(direct, rest) if form.get("at_least_one") else rest

    def _tags_with_separator(self, form: Form, ends: tuple[str, ...], path: str) -> Grammar:
        tags = _list(form.get("tags"), path + ".tags")
        if not tags:
            raise _wrong(f"{path}.tags must not be empty", path)
        one = either(*(self._tag(tag, f"{path}.tags[{index}]") for index, tag in enumerate(tags)))
        whole = one
        if not form.get("stop_after_first"):
            separator = form.get("separator", "")
            check_text(separator, path + ".separator")
            whole = sequence(one, repeated(sequence(self._literal(separator), one)))
        return self._ended(whole if form.get("at_least_one") else repeated(whole, 0, 1), ends)


def _wrong(message: str, path: str) -> RequestError:
    return RequestError(message, path.partition(".")[0])


def _type(form: object) -> object:
    return form.get("type") if isinstance(form, Mapping) else None


def _object(value: object, path: str) -> Form:
    if not isinstance(value, Mapping):
        raise _wrong(f"{path} must be an object, got {quoted(value)}", path)
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(f"{path} must be a list, got {quoted(value)}", path)
    return value


def _elements(form: Form, path: str) -> Sequence[Any]:
    elements = _list(form.get("elements"), path + ".elements")
    if not elements:
        raise _wrong(f"{path}.elements must not be empty", path)
    return elements


def _text(form: Form, key: str, path: str) -> str:
    value = form.get(key)
    check_text(value, f"{path}.{key}")
    return str(value)


def _texts(value: object, path: str) -> list[str]:
    for index, text in enumerate(_list(value, path)):
        check_text(text, f"{path}[{index}]")
    return list(value) if isinstance(value, list) else []
