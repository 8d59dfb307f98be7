"""Reads the texts with which a model is calibrated, and those on which it is measured, as rows of tokens.

Without a file they are stories that the embedded demo model told (stories.txt), and behind them the source text of this
package: English prose, and code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ConfigError

STORIES = Path(__file__).with_name("stories.txt")
"""one story a paragraph"""
PACKAGE = Path(__file__).parents[1]
LEAST_LENGTH = 16
"""tokens of a row"""


@dataclass(frozen=True)
class Texts:
    """Holds rows of tokens, none of which is in both parts."""

    calibration: Tensor
    """[rows, length] int64"""
    held_out: Tensor
    """[rows, length] int64: what perplexity is measured on"""

    @property
    def digest(self) -> str:
        """A text that tells these tokens from others."""
        tokens = [self.calibration.shape, self.held_out.shape, self.calibration.tolist(), self.held_out.tolist()]
        return hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]


def read_texts(
    file: Path | None, tokenizer: Tokenizer, vocab_size: int, length: int, rows: int, held_out: int
) -> Texts:
    """Return `rows` rows to calibrate with, or as many as there are, and `held_out` others: a file's last ones, but at
    most a quarter of it. `file`: text, or JSON of a document a line; None: the sample. Raises ConfigError where it
    cannot be read, or has too little text for one row each."""
    if file is None:
        first, more = STORIES.read_text(encoding="utf-8").split("\n\n"), _sources()
    else:
        first, more = [*_documents(file)], iter(())
    found = _rows(first, tokenizer, vocab_size, length, rows + held_out if file is not None else None)
    kept = min(held_out, len(found) // 4)
    calibration, measured = found[: len(found) - kept], found[len(found) - kept :]
    if len(calibration) < rows:
        calibration += _rows(more, tokenizer, vocab_size, length, rows - len(calibration))
    if not calibration or (held_out and not measured):
        least = f"{length} tokens" if not held_out else f"{4 * length} tokens"
        raise ConfigError(
            f"--calib-data {file or 'of the sample'} has too little text for --seq-len {length}; accepted: "
            f"at least {least}, or a smaller --seq-len"
        )
    shape = (-1, length)
    return Texts(
        torch.tensor(calibration[:rows], dtype=torch.int64).view(shape),
        torch.tensor(measured, dtype=torch.int64).view(shape),
    )


def _rows(
    documents: Iterable[str], tokenizer: Tokenizer, vocab_size: int, length: int, most: int | None
) -> list[list[int]]:
    """Return the documents one behind the other, as rows of `length` tokens: `most`, or all that are whole. Where the
    tokenizer puts a token in front of prompts, rows begin with it too."""
    begin = tokenizer.encode("")[:1]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows: list[list[int]] = []
    stream: list[int] = []
    for document in documents:
        stream += [*begin, *tokenizer.encode(document, add_special_tokens=False), *end]
        while len(stream) >= length - len(begin) and (most is None or len(rows) < most):
            rows.append([*begin, *stream[: length - len(begin)]])
            del stream[: length - len(begin)]
        if most is not None and len(rows) >= most:
            break
    if any(token >= vocab_size for row in rows for token in row):
        raise ConfigError(f"the tokenizer makes tokens beyond the model's vocabulary of {vocab_size}")
    return rows


def _documents(file: Path) -> Iterator[str]:
    """Yield the documents of a file: each a line of JSON, a text or an object with `text` or `messages`; or all of the
    file is one."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calib-data {file} cannot be read: {error}") from None
    if file.suffix not in (".jsonl", ".json"):
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _document(file, number, line)


def _document(file: Path, number: int, line: str) -> str:
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict):
        messages = found.get("messages")
        found = found.get("text")
        if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
            found = "\n".join(str(one.get("content", "")) for one in messages)
    if not isinstance(found, str):
        raise ConfigError(
            f"line {number} of --calib-data {file} is no document; accepted: a text, or an object with `text` or "
            "`messages`"
        )
    return found


def _sources() -> Iterator[str]:
    """Yield the modules of this package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield file.read_text(encoding="utf-8")
