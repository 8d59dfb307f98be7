"""Grammars of answers in channels, as gpt-oss writes them: <|channel|>final<|message|>Hello<|return|>.

Reasoning, words to the user and calls are messages of one answer there, which begins within a message's header.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.structured_outputs.grammar import Grammar, Rules, without

_MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
_FINAL = "<|channel|>final<|message|>"


def in_channels(last: Grammar, special: Mapping[str, int], *, or_final: bool = False) -> Grammar:
    """Return the grammar of an answer that ends with `last`, a message with its header, after any reasoning.

    With `or_final` it may end with a message to the user instead.
    """
    rules = Rules(special)
    text = without(_MARKS)
    aside = rules.one_of(
        f"{rules.literal(f'<|channel|>{channel}<|message|>')} {rules.until(text, '<|end|>')}"
        for channel in ("analysis", "commentary")
    )
    ends = [rules.placed(last)]
    if or_final:
        ends.append(f"{rules.literal(_FINAL)} {rules.terminal(text)}?")
    return rules.grammar(f"({aside} {rules.literal('<|start|>assistant')})* {rules.one_of(ends)}")


def in_final(grammar: Grammar, special: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer whose message to the user follows a grammar."""
    rules = Rules(special)
    return in_channels(rules.grammar(f"{rules.literal(_FINAL)} {rules.placed(grammar)}"), special)
