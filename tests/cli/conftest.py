from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.fake_llm import FakeLLM


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr("headrace.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    return FakeLLM


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    """config.json of a model that nobody loads."""
    record = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(record))
    return str(folder)
