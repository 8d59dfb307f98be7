"""Grammars of answers in channels, as gpt-oss writes them: <|channel|>final<|message|>Hello<|return|>.

Reasoning, words to the user and calls are messages of one answer there, which begins within a message's header.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.structured_outputs.grammar import Grammar, either, literal, repeated, sequence
from headrace.structured_outputs.lark import Rules, without

_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")


def in_channels(last: Grammar, special: Mapping[str, int], *, or_final: bool = False) -> Grammar:
    """Return the grammar of an answer that ends with `last`, a message with its header, after any reasoning.

    With `or_final` it may end with a message to the user instead.
    """
    rules = Rules(special)
    text = without(_MARKS)
    asides = [
        rules.rule(f"{rules.literal(f'<|channel|>{channel}<|message|>')} {rules.until(text, '<|end|>')}")
        for channel in ("analysis", "commentary")
    ]
    aside = rules.grammar(f"{rules.one_of(asides)} {rules.literal('<|start|>assistant')}")
    if or_final:
        said = rules.literal("<|channel|>final<|message|>")
        last = either(last, rules.grammar(f"{said} {rules.terminal(text)}?"))
    return sequence(repeated(aside), last)


def in_final(grammar: Grammar, special: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer whose message to the user follows a grammar."""
    return in_channels(sequence(literal("<|channel|>final<|message|>", special), grammar), special)
