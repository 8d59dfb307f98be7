"""Every registered architecture computes what transformers computes, prefilled and decoded, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from driver import Driver
from tiny_configs import CASES, VARIANTS, save_tiny_model

from headrace.models.registry import SERVED

PROMPTS = [[5], [17, 3, 99], [8, 64, 22, 90, 41, 7, 7, 13, 50, 2, 77], list(range(20, 55))]
"""ragged, shortest first"""
NEW_TOKENS = 64


def test_every_architecture_has_tiny_configs() -> None:
    assert set(SERVED) == set(VARIANTS)


@pytest.mark.parametrize(("architecture", "variant"), CASES, ids=lambda value: value)
def test_logits_and_greedy_tokens_equal_transformers(architecture: str, variant: str, tmp_path: Path) -> None:
    reference = save_tiny_model(architecture, variant, tmp_path)
    driver = Driver(tmp_path)

    generated = driver.greedy(PROMPTS, NEW_TOKENS)
    for prompt, ours in zip(PROMPTS, generated, strict=True):
        assert ours == reference_greedy(reference, prompt, NEW_TOKENS)
    assert len({tuple(tokens) for tokens in generated}) > 1, "a model that ignores its prompt would pass"

    sequences = [prompt + ours for prompt, ours in zip(PROMPTS, generated, strict=True)]
    driver.start(len(sequences))
    ours = driver.step(sequences)
    with torch.inference_mode():
        theirs = torch.cat([reference(torch.tensor([sequence])).logits[0] for sequence in sequences])
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@torch.inference_mode()
def reference_greedy(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> list[int]:
    tokens, cache, inputs = [], None, torch.tensor([prompt])
    for _ in range(new_tokens):
        output = model(inputs, past_key_values=cache, use_cache=True)
        cache, inputs = output.past_key_values, output.logits[:, -1:].argmax(-1)
        tokens.append(int(inputs))
    return tokens
