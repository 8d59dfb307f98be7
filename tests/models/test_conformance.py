"""Every registered architecture computes what transformers computes, prefilled and decoded, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import Driver
from tiny_configs import ALIKE, VARIANTS, save_tiny_model

from headrace.mixers import RecurrentState
from headrace.models.registry import SERVED
from headrace.models.served import describe

PROMPTS = [[5], [17, 3, 99], [8, 64, 22, 90, 41, 7, 7, 13, 50, 2, 77], list(range(20, 55))]
"""ragged, shortest first"""
NEW_TOKENS, MORE = 12, 32
"""More where states are kept, so that the longest ends beyond the second chunk of a scan, and where transformers takes
other angles for all that is no longer than 32."""
CASES = [
    pytest.param(name, variant, marks=pytest.mark.slow if turn and name in ALIKE else ())
    for name, variants in VARIANTS.items()
    for turn, variant in enumerate(variants)
]
"""Of families that are another's with another name or factor, one variant is in `make test`."""


def test_every_architecture_has_tiny_configs() -> None:
    assert set(SERVED) == set(VARIANTS)


@pytest.mark.parametrize(("architecture", "variant"), CASES, ids=lambda value: value)
def test_logits_and_greedy_tokens_equal_transformers(architecture: str, variant: str, tmp_path: Path) -> None:
    reference = save_tiny_model(architecture, variant, tmp_path)
    driver = Driver(tmp_path)
    has_states = any(isinstance(layer.mixer, RecurrentState) for layer in describe(driver.config).layers)

    generated = driver.greedy(
        PROMPTS, MORE if has_states or "longrope" in str(VARIANTS[architecture][variant]) else NEW_TOKENS
    )
    assert len({tuple(tokens) for tokens in generated}) > 1, "a model that ignores its prompt would pass"
    sequences = [prompt + ours for prompt, ours in zip(PROMPTS, generated, strict=True)]
    with torch.inference_mode():
        theirs = [reference(torch.tensor([sequence])).logits[0] for sequence in sequences]
    for prompt, ours, logits in zip(PROMPTS, generated, theirs, strict=True):
        assert ours == logits[len(prompt) - 1 : -1].argmax(-1).tolist()

    driver.start(len(sequences))
    whole, expected = driver.step(sequences), torch.cat(theirs)
    assert whole.shape == expected.shape
    assert (whole - expected).abs().max() <= 1e-4 * expected.abs().max()
