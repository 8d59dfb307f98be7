"""Tokenizers and templates as models publish them: the demo model's, and those of ../shared beside the repository,
where that folder is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.hub import DEMO_FOLDER
from tests.sampled import some_of

SHARED = Path(__file__).parents[2] / "shared"
TOKENIZERS = SHARED / "data" / "tokenizers"
OTHERS = [*sorted(TOKENIZERS.glob("*/")), *sorted((SHARED / "models").glob("stories260K/"))]
each_tokenizer = pytest.mark.parametrize(
    "folder", [pytest.param(DEMO_FOLDER, id="demo"), *some_of(OTHERS, 3, say=lambda folder: folder.name)]
)
"""Folders of all, of which a few run: they take seconds each."""


def tokenizer_folder(name: str) -> Path:
    """The folder of one of them, without which a test is skipped."""
    if not (TOKENIZERS / name).is_dir():
        pytest.skip(f"no folder ../shared/data/tokenizers/{name} beside the repository")
    return TOKENIZERS / name
