"""Says what the parts of published models are called here. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.text_model.", "model."),
)
"""how names begin in models of more than text -> in models of text alone"""
OF_TEXT = re.compile(r"(?:model\.)?(?:layers|embed_tokens|norm)\.|lm_head\.")
"""how these names begin there; the others' tensors are of other parts"""


def text_name(name: str, more_than_text: bool, names: Sequence[tuple[str, str]]) -> str:
    """Return the name that a tensor of a published model has in a model of text alone. `names`: ModelSpec's."""
    if more_than_text:
        name = next((ours + name[len(front) :] for front, ours in TEXT_PREFIXES if name.startswith(front)), name)
    return renamed(name, names)


def text_module(name: str, more_than_text: bool, names: Sequence[tuple[str, str]]) -> str:
    """Return the same of a module, whose tensors' names begin with its own and a dot."""
    return text_name(f"{name}.", more_than_text, names).removesuffix(".")


def renamed(name: str, names: Sequence[tuple[str, str]]) -> str:
    """Return a name with its parts renamed; those of `names` that begin with ^ only at the beginning."""
    for theirs, ours in names:
        if not theirs.startswith("^"):
            name = name.replace(theirs, ours)
        elif name.startswith(theirs[1:]):
            name = ours + name[len(theirs) - 1 :]
    return name
