"""Makes the one grammar that the answer to a chat request is held to: of its tools, its format and its reasoning."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from headrace.parsers.formats import ReasoningFormat, ToolFormat
from headrace.parsers.tools import FunctionTool
from headrace.server.chat_prompt import Rendered
from headrace.server.constraints import constraint_of
from headrace.server.output_formats import WITHOUT_FORMAT, OutputFormats
from headrace.server.protocol import ChatCompletionRequest
from headrace.server.serving import Serving
from headrace.server.tool_use import ToolUse
from headrace.structured_outputs.call_grammar import calls_grammar
from headrace.structured_outputs.grammar import Grammar, Rules, after_reasoning, either
from headrace.structured_outputs.harmony import in_final

MAX_KEPT = 64
"""Sets of tools whose grammars are kept: an agent sends the same ones in every turn, and twenty take 20 ms."""


def chat_grammar(
    serving: Serving,
    request: ChatCompletionRequest,
    use: ToolUse | None,
    rendered: Rendered,
    opened: bool,
) -> str:
    """Return the grammar as the engine takes it; "" if the answer is free. `opened`: the answer begins within
    reasoning. Raises RequestError for what no answer can be held to."""
    formats, tokenizer = serving.formats, serving.engine.tokenizer
    special: Mapping[str, int] = {} if tokenizer is None else tokenizer.marks
    reasoning = formats.reasoning
    in_channels = any(form is not None and form.whole_answer for form in (formats.tool, reasoning))
    asked = constraint_of(serving, request)
    if asked is not None and in_channels:
        asked = in_final(asked, special)
    calls = None if use is None else _calls(use, formats, special, beside=asked is not None)
    if calls is None:
        grammar = asked
    elif asked is None or (use is not None and use.forced):
        grammar = calls
    else:
        grammar = either(asked, calls)
    if reasoning is not None and not in_channels:  # channels have their reasoning in them
        state = _state(reasoning, rendered, opened, bool(request.continue_final_message))
        most = request.thinking_token_budget if bounds_thoughts(serving) else None
        if grammar is None and most is not None and state is not False:
            rules = Rules(special)
            grammar = rules.grammar(rules.anything(but=[mark for mark in reasoning.open if mark in special]))
        grammar = None if grammar is None else _behind(reasoning, grammar, rendered, state, special, most)
    return "" if grammar is None else grammar.to_text()


def bounds_thoughts(serving: Serving) -> bool:
    """Return whether a thought can be made to end: marks must begin and end it."""
    reasoning, tokenizer = serving.formats.reasoning, serving.engine.tokenizer
    if reasoning is None or tokenizer is None or not reasoning.open or reasoning.open[0] not in tokenizer.marks:
        return False
    return any(mark in tokenizer.marks for mark in reasoning.close)


def _calls(use: ToolUse, formats: OutputFormats, special: Mapping[str, int], beside: bool) -> Grammar | None:
    """Return the grammar of calls; None where the model may write what it likes. `beside`: calls are what the answer
    may be in place of the format that is asked for."""
    must = use.forced or beside
    if not must and not any(tool.strict for tool in use.tools):
        return None
    form = formats.tool or (WITHOUT_FORMAT if use.forced else None)
    if form is None:
        return None
    # Of a tool that no grammar holds, or that may not be called, the parameters do not matter.
    held = [(use.forced or tool.strict) and use.named in (None, tool.name) for tool in use.tools]
    tools = json.dumps(
        [(tool.name, tool.parameters if own else {}, tool.strict) for tool, own in zip(use.tools, held, strict=True)]
    )
    single = not use.parallel or use.named is not None
    return _calls_grammar(form, tools, must, single, use.named, use.forced, tuple(special.items()))


@functools.lru_cache(maxsize=MAX_KEPT)
def _calls_grammar(
    form: ToolFormat, tools: str, must: bool, single: bool, only: str | None, strict: bool,
    marks: tuple[tuple[str, int], ...],
) -> Grammar:  # fmt: skip
    """Return the grammar of calls. `tools`: their names, the parameters that are held, and whether they are strict, as
    JSON."""
    return calls_grammar(
        form,
        [FunctionTool(*fields) for fields in json.loads(tools)],
        at_least=1 if must else 0,
        at_most=1 if single else None,
        only=only,
        strict=strict,
        special=dict(marks),
    )


def _state(form: ReasoningFormat, rendered: Rendered, opened: bool, continued: bool) -> bool | None:
    """Return whether reasoning comes first: True, it must; False, thinking is off; None: as the model likes."""
    if opened:
        return True
    if continued:
        return False
    return False if _ends_with(rendered, form.close) or form.switch else None


def _behind(
    form: ReasoningFormat, grammar: Grammar, rendered: Rendered, state: bool | None, special: Mapping[str, int],
    most: int | None,
) -> Grammar:  # fmt: skip
    """Return reasoning, of at most so many tokens, and then a grammar. If reasoning must come and the prompt has not
    opened it, the model may."""
    opener = form.open[0]
    whole = after_reasoning(grammar, opener=opener, closers=form.close, is_open=state, special=special, most=most)
    if not state or _ends_with(rendered, form.open):
        return whole
    rules = Rules(special)
    inside = rules.placed(whole)
    # Some models write white space before they open a thought, as GLM does.
    return rules.grammar(rules.one_of([rules.joined(rules.space, rules.literal(opener), inside), inside]))


def _ends_with(rendered: Rendered, markup: tuple[str, ...]) -> bool:
    return rendered.text.rstrip().endswith(tuple(mark.strip() for mark in markup))
