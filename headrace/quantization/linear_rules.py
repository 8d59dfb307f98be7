"""Finds in which format a checkpoint holds a linear, by the linear's name. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

from headrace.quantization.formats import UNQUANTIZED, LinearFormat, WeightFormat

PARTS = ("attention", "dense", "experts")
"""the kinds of linears that a checkpoint may hold in different formats"""
_LINEARS = {
    "attention": ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_b_proj"),
    "dense": ("mlp.gate_proj", "mlp.shared_experts.gate_proj", "feed_forward.shared_expert.gate_proj"),
    "experts": ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1"),
}
"""Examples of each of PARTS: it is in the format of the first that a rule names, else in the default."""
_WILD = re.compile(r"[*?\[]")
Rules = tuple[tuple[str, LinearFormat], ...]
"""(name or pattern of linears, their format); the first that matches counts.

A name is some whole parts of a linear's name, one after the other, like `self_attn.q_proj` or `model.layers.3`; `*`
stands for any characters of a part or, where the pattern is for the whole name, of the name. `re:` begins a regular
expression, which is matched from the beginning of the first name alone."""


@dataclass(frozen=True)
class CheckpointFormat:
    """Says in which format a checkpoint holds each linear: `default`, unless a rule names the linear."""

    method: str = ""
    """`quant_method`: the tool that wrote the tensors; empty: weights are unquantized, and may be rounded at load"""
    default: LinearFormat = UNQUANTIZED
    rules: Rules = ()
    notes: tuple[str, ...] = ()
    """lines for the start-up log about what is served in another way than the checkpoint says"""

    def format_for(self, *names: str) -> LinearFormat:
        """Return the format of one linear, given its full name in the checkpoint, then further names for it. Further
        names are those of our fused linear that it is a part of, which some tools list."""
        found = min(self._places(names), default=None)
        return self.default if found is None else self.rules[found][1]

    def called(self, name_here: Callable[[str], str]) -> CheckpointFormat:
        """Return the same for a model that calls linears by other names than the checkpoint. Regular expressions stay
        as they are."""
        rules = ((name if name.startswith("re:") else name_here(name), found) for name, found in self.rules)
        return replace(self, rules=tuple(rules))

    @cached_property
    def formats(self) -> tuple[LinearFormat, ...]:
        """All formats that a linear may be in, that of most linears first."""
        counted = dict.fromkeys((self.main, self.default, *(found for _, found in self.rules)))
        return tuple(counted)

    @cached_property
    def main(self) -> LinearFormat:
        """The format of most linears: the default or, if that leaves them alone, the first of a rule that does not."""
        others = (found for _, found in self.rules if found != UNQUANTIZED)
        return self.default if self.default != UNQUANTIZED else next(others, UNQUANTIZED)

    def parts(self, num_layers: int) -> dict[str, WeightFormat]:
        """Return in which formats a layer in the middle of the model has those of PARTS that are in one."""
        prefix = f"model.layers.{num_layers // 2}"
        held = {}
        for part, linears in _LINEARS.items():
            found = [self.format_for(f"{prefix}.{linear}") for linear in linears]
            named = next((one for one in found if one != self.default), self.default)
            if named != UNQUANTIZED:
                held[part] = named.format
        return held

    def _places(self, names: tuple[str, ...]) -> Iterator[int]:
        """Yield the numbers of rules that match; thousands of plain names take one look-up each."""
        for name in names:
            parts = name.split(".")
            for start in range(len(parts)):
                for end in range(start + 1, len(parts) + 1):
                    place = self._plain.get(".".join(parts[start:end]))
                    if place is not None:
                        yield place
        for place, pattern in self._patterns:
            candidates = names[:1] if pattern.startswith("re:") else names
            if any(_matches(pattern, name) for name in candidates):
                yield place

    @cached_property
    def _plain(self) -> dict[str, int]:
        numbered = [(pattern, place) for place, (pattern, _) in enumerate(self.rules)]
        return {pattern: place for pattern, place in reversed(numbered) if not _is_pattern(pattern)}

    @cached_property
    def _patterns(self) -> list[tuple[int, str]]:
        return [(place, pattern) for place, (pattern, _) in enumerate(self.rules) if _is_pattern(pattern)]


def left_alone(patterns: Iterable[str]) -> Rules:
    """Return the rules that linears of these names and patterns are unquantized."""
    return tuple((pattern, UNQUANTIZED) for pattern in patterns)


def containing(text: str) -> str:
    """Return the pattern of names in which `text` occurs."""
    return f"re:.*{re.escape(text)}"


def _is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or _WILD.search(entry) is not None


def _matches(pattern: str, linear: str) -> bool:
    """Tell whether a pattern, not a plain name, matches `linear`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], linear) is not None
    wanted, parts = pattern.split("."), linear.split(".")
    return fnmatchcase(linear, pattern) or any(
        all(fnmatchcase(part, each) for part, each in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
