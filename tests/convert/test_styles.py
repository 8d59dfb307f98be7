"""Words are laid out as the tools' own loops lay them, and config.json says what these tools read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.convert.rounding import INT4, round_to_nearest
from headrace.convert.schemes import find_scheme
from headrace.errors import ConfigError

WEIGHT = torch.randn(16, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float32).half()
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's: which output each of a word's eight codes is of"""


def as_words(codes: np.ndarray, order: tuple[int, ...] = (*range(8),)) -> np.ndarray:
    """codes [n, m] -> words [n, m / 8], as the tools do it: one code at a time is shifted into its word."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for column in range(words.shape[1]):
        for place, index in enumerate(order):
            words[:, column] |= codes[:, column * 8 + index].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def test_words_of_auto_gptq() -> None:
    scheme = find_scheme("w4a16", 32, "gptq")
    rounded = round_to_nearest(WEIGHT, 1, 32, INT4)
    made = {name: tensor.numpy() for name, tensor in scheme.written(rounded).items()}
    codes = (rounded.codes + 8).numpy()
    assert made.keys() == {"qweight", "qzeros", "scales", "g_idx"}
    np.testing.assert_array_equal(made["qweight"], as_words(codes).T)
    np.testing.assert_array_equal(made["qzeros"], as_words(np.full((2, 16), 8 - 1)))
    np.testing.assert_array_equal(made["scales"], rounded.scales.T.numpy())
    assert made["g_idx"].tolist() == [0] * 32 + [1] * 32
    assert made["g_idx"].dtype == np.int32


def test_words_of_auto_awq() -> None:
    scheme = find_scheme("w4a16", 32, "awq")
    rounded = round_to_nearest(WEIGHT, 1, 32, INT4)
    made = {name: tensor.numpy() for name, tensor in scheme.written(rounded).items()}
    assert made.keys() == {"qweight", "qzeros", "scales"}
    np.testing.assert_array_equal(made["qweight"], as_words((rounded.codes + 8).numpy().T, ORDER))
    np.testing.assert_array_equal(made["qzeros"], as_words(np.full((2, 16), 8), ORDER))
    np.testing.assert_array_equal(made["scales"], rounded.scales.T.numpy())


def test_names_that_awq_would_find_in_others_are_left_out() -> None:
    stated = find_scheme("w4a16_awq", None, "awq")
    config = stated.style.stated(stated, ["lm_head", "a.mlp.gate", "a.mlp.down"], ["a.mlp.gate_proj", "a.mlp.up_proj"])
    assert config["modules_to_not_convert"] == ["lm_head", "a.mlp.down"]


@pytest.mark.parametrize(
    ("name", "style", "kv", "said"),
    [
        ("fp8", "awq", False, "--format awq does not hold fp8; accepted: compressed-tensors, quark"),
        ("w4a16_gptq", "quark", False, "does not hold w4a16_gptq; accepted: compressed-tensors, awq, gptq"),
        ("int8", "quark", False, "does not hold int8; accepted: compressed-tensors"),
        ("w4a16", "gptq", True, "has no scales of a KV cache; accepted: compressed-tensors, quark"),
    ],
)
def test_what_a_style_does_not_hold_is_refused(name: str, style: str, kv: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_scheme(name, None, style, kv)
