"""Long prompts over latents: chunks give what one piece gives, and both what float64 gives, which is transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from h200_parts import long_latents
from h200_parts.long_latents import Exact, compare_chunks, config_of, write_model
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
    [([4096, 700], [512], 4), pytest.param([131_072, 4099], [2048], 1, marks=pytest.mark.slow)],
)
def test_chunks_one_piece_and_float64_agree(lengths: list[int], chunks: list[int], heads: int, tmp_path: Path) -> None:
    ok, said = checked(tmp_path, lengths, chunks, heads)
    assert ok, said


def test_rotated_parts_that_are_too_large_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine alone: cosines and sines that YaRN lets grow by a thousandth."""
    right = rotary.rope_table
    monkeypatch.setattr(long_latents, "rope_table", right)
    monkeypatch.setattr(rotary, "rope_table", lambda *given: right(*given) * 1.001)
    assert not checked(tmp_path, [300], [64], 2)[0]


def test_the_reference_is_transformers_model(tmp_path: Path) -> None:
    write_model(tmp_path, config_of(toy=True, heads=2) | {"num_experts_per_tok": 3}, "cpu")
    tokens = torch.randint(0, 512, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    theirs = transformers.DeepseekV2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens[:-1]])).logits[0, -40:]
    found = Exact(tmp_path, "cpu").sequence(tokens, 40).logits
    assert found.dtype == torch.float64
    assert (found - expected).norm() <= 2e-5 * expected.norm()
