"""Takes texts through the layers of the old checkpoint, and through those of the new one as soon as each is written.

Calibration text has gone through the new layers before, so that what is rounded makes up for what was rounded already.
Held-out text goes through either model by itself, which tells how far its hidden states have moved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headrace.convert.texts import Texts
from headrace.convert.walk import Layers
from headrace.convert.watch import Watch
from headrace.model_config import ModelConfig


class Calibration:
    """Holds the hidden states of all texts behind the latest layer."""

    def __init__(
        self, folder: Path, output: Path, config: ModelConfig, stated: dict[str, Any], texts: Texts,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`stated`: the new checkpoint's quantization_config. Raises ConfigError or UnsupportedModelError for a model
        whose layers cannot be computed one by one."""
        self.texts = texts
        self.before = Layers(folder, config, device)
        self.after = Layers(output, replace(config, quantization=stated), device)
        self.before.check()
        self.given = texts.calibration
        """[texts, length, hidden_size]: calibration text behind the new layers; at first its tokens"""
        self.exact = self.moved = texts.held_out
        """the same of held-out text, behind the old layers and behind the new ones"""
        self.layers = len(self.before.spec.layers)
        self.perplexity: list[float] = []
        """of the old model and of the new one, once the last layer is reached"""

    def watch(self, number: int, watch: Watch | None) -> list[float]:
        """Take held-out text through an old layer, and calibration text too if there is a `watch` for what its linears
        are given. Return the largest magnitudes of K and V of calibration text."""
        layer = self.before.load(number, None if watch is None else watch.attach)
        largest = [0.0, 0.0]
        if watch is not None:
            watch.switch(True)
            largest = layer.compute(self.given)[1].tolist()
            watch.switch(False)
        self.exact = layer.compute(self.exact)[0]
        if number == self.layers - 1 and len(self.exact):
            self.perplexity = [layer.perplexity(self.exact, self.texts.held_out)]
        return largest

    def follow(self, number: int) -> float | None:
        """Take all texts through a new layer, as its file holds it. Return how far held-out text has moved: the norm of
        the difference of hidden states over their norm; None where there is no such text."""
        layer = self.after.load(number)
        if number < self.layers - 1:
            self.given = layer.compute(self.given)[0]
        self.moved = layer.compute(self.moved)[0]
        if not len(self.moved):
            return None
        if number == self.layers - 1:
            self.perplexity.append(layer.perplexity(self.moved, self.texts.held_out))
        exact = self.exact.float()
        return float((self.moved.float() - exact).norm() / exact.norm())
