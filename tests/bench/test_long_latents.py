"""Long prompts over latents: chunks give what one piece gives, and both what transformers gives in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from h200_parts import long_latents
from h200_parts.long_latents import compare_chunks, config_of, exact_logits, write_model
from h200_parts.numerics import transformers_logits
from h200_parts.run import Run
from h200_parts.settings import Settings

from headrace.layers import rotary

BOUND = 1e-5
"""ten times what 2,048 tokens are off by"""


def checked(folder: Path, lengths: list[int], chunks: list[int], heads: int) -> tuple[bool, str]:
    run = Run(Settings(work=folder, smoke=True), None, "")
    compare_chunks(run, config_of(toy=True, heads=heads), lengths, chunks, "float32", BOUND)
    (case,) = run.cases
    return case["ok"], case["said"]


@pytest.mark.parametrize(
    ("lengths", "chunks", "heads"),
    [([2048, 700], [256], 4), pytest.param([131_072, 4099], [2048], 1, marks=pytest.mark.slow)],
)
def test_chunks_one_piece_and_float64_agree(lengths: list[int], chunks: list[int], heads: int, tmp_path: Path) -> None:
    ok, said = checked(tmp_path, lengths, chunks, heads)
    assert ok, said


def test_rotated_parts_that_are_too_large_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine alone: cosines and sines that YaRN lets grow by a thousandth."""
    right = rotary.rope_table
    monkeypatch.setattr(rotary, "rope_table", lambda *given: right(*given) * 1.001)
    assert not checked(tmp_path, [300], [64], 2)[0]


def test_the_reference_attends_in_blocks_as_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    settings = Settings(work=tmp_path, smoke=True)
    write_model(tmp_path, config_of(toy=True, heads=2) | {"num_experts_per_tok": 3})
    monkeypatch.setattr(long_latents, "MOST_SCORES", 5 * 2 * 90)
    (found,) = exact_logits(settings, tmp_path, [tokens], 40)
    given = "DeepseekV2ForCausalLM", tmp_path, "float64", [tokens], 40
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    (expected,) = transformers_logits(settings, *given, **eager)
    assert found.logits.dtype == torch.float64
    # what the model computes in float32 may be rounded to the other side here and there
    assert (found.logits - expected.logits).norm() <= 1e-5 * expected.logits.norm()
