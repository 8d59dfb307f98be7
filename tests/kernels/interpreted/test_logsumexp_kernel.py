"""The logsumexp kernel against torch: any dtype, rows that are all but impossible, and rows of a wider tensor."""

import pytest
import torch

from headrace.kernels import logsumexp as module
from headrace.kernels.logsumexp import logsumexp, logsumexp_reference


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 200])
def test_equals_torch_and_does_not_depend_on_other_rows(dtype, vocab_size):
    logits = (torch.randn(5, 300) * 8).to(dtype)[:, :vocab_size]
    out = logsumexp(logits)
    torch.testing.assert_close(out, logsumexp_reference(logits), rtol=2e-6, atol=2e-6)
    for row in range(5):
        assert torch.equal(logsumexp(logits[row : row + 1]), out[row : row + 1])


def test_infinities_and_nan():
    inf = float("inf")
    logits = torch.tensor([[-inf, 2.0, -inf], [-inf, -inf, -inf], [inf, 0.0, 1.0], [float("nan"), 0.0, 1.0]])
    torch.testing.assert_close(logsumexp(logits), logsumexp_reference(logits), equal_nan=True)
    assert logsumexp(logits[:0]).shape == (0,)
