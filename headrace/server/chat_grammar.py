"""Makes the one grammar that the answer to a chat request is held to: of its format and its reasoning."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.parsers.formats import ReasoningFormat
from headrace.sampling_params import SamplingParams
from headrace.server.chat_prompt import Rendered
from headrace.server.constraints import constraint_of
from headrace.server.protocol import ChatCompletionRequest
from headrace.server.serving import Serving
from headrace.structured_outputs.grammar import Grammar, after_reasoning, either, literal, sequence


def chat_grammar(
    serving: Serving, request: ChatCompletionRequest, params: SamplingParams, rendered: Rendered, opened: bool
) -> str:
    """Return the grammar as the engine takes it; "" if the answer is free. `opened`: the answer begins within
    reasoning. Raises RequestError for what no answer can be held to."""
    tokenizer, reasoning = serving.engine.tokenizer, serving.formats.reasoning
    grammar = constraint_of(serving, request, params)
    if grammar is None or tokenizer is None:
        return ""
    if reasoning is not None and not reasoning.whole_answer:
        state = _state(reasoning, rendered, opened, bool(request.continue_final_message))
        grammar = _behind(reasoning, grammar, rendered, state, tokenizer.marks)
    return grammar.to_text()


def _state(form: ReasoningFormat, rendered: Rendered, opened: bool, continued: bool) -> bool | None:
    """Return whether reasoning comes first: True, it must; False, thinking is off; None: as the model likes."""
    if opened:
        return True
    if continued:
        return False
    return False if _ends_with(rendered, form.close) or form.switch else None


def _behind(
    form: ReasoningFormat, grammar: Grammar, rendered: Rendered, state: bool | None, special: Mapping[str, int]
) -> Grammar:
    """Return reasoning and then a grammar. If reasoning must come and the prompt has not opened it, the model may."""
    opener = form.open[0]
    whole = after_reasoning(grammar, opener=opener, closers=form.close, is_open=state, special=special)
    if not state or _ends_with(rendered, form.open):
        return whole
    return either(sequence(literal(opener, special), whole), whole)


def _ends_with(rendered: Rendered, markup: tuple[str, ...]) -> bool:
    return rendered.text.rstrip().endswith(tuple(mark.strip() for mark in markup))
