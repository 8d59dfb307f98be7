"""The batch-invariant matmul against the reference, and its two ways to sum against each other."""

from itertools import pairwise

import pytest
import torch

from headrace.kernels import matmul as module
from headrace.kernels.matmul import Tile, matmul, matmul_reference, num_parts, tree_sum
from tests.sampled import sampled

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles, parts and limits of a size that the interpreter can walk through."""
    few, many = Tile(16, 16, 4, 1), Tile(32, 32, 4, 1)
    monkeypatch.setattr(module, "FEW", {("cuda", size): few for size in (2, 4)})
    monkeypatch.setattr(module, "MANY", {("cuda", size): many for size in (2, 4)})
    monkeypatch.setattr(module, "BLOCK_K", {2: 16, 4: 16})
    monkeypatch.setattr(module, "FEW_TOKENS", 40)
    monkeypatch.setattr(module, "SHORTEST_PART", 32)
    monkeypatch.setattr(module, "GROUP_M", 2)
    num_parts.cache_clear()
    yield
    num_parts.cache_clear()


@sampled(("dtype", "sizes", "bias"), TOLERANCE, [(24, 32), (40, 64), (33, 100), (16, 129)], [False, True])
def test_equals_the_reference(dtype, sizes, bias):
    n, k = sizes
    weight, offset = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if bias else None
    for tokens in (1, 5, 40, 41, 101):
        x = torch.randn(tokens, 2 * k).to(dtype)[:, :k]
        expected = matmul_reference(x.double(), weight.double(), None if offset is None else offset.double())
        error = (matmul(x, weight, offset).double() - expected).norm() / expected.norm()
        assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("k", [256, 200])
def test_a_row_is_the_same_whether_parts_are_summed_together_or_apart(k):
    """Magnitudes so far apart that any other order would show."""
    assert num_parts(24, k, 4) > 1
    weight, x = torch.zeros(24, k), torch.zeros(90, k)
    weight[:, ::16] = torch.randn(24, len(range(0, k, 16))) * 10.0 ** torch.randint(-6, 6, (24, len(range(0, k, 16))))
    x[:, ::16] = torch.randn(90, len(range(0, k, 16)))
    whole = matmul(x, weight)
    for first, last in ((0, 1), (7, 8), (89, 90), (3, 43), (0, 89)):
        assert torch.equal(matmul(x[first:last], weight), whole[first:last])


def test_slices_are_summed_in_fp32_wherever_they_lie():
    """The slices that a rank holds give its branch of the tree, of which the branches of all ranks make the whole."""
    weight, x = torch.randn(24, 200).bfloat16(), torch.randn(3, 200).bfloat16()
    ends = [200 * number // 8 for number in range(9)]
    slices = [matmul(x[:, first:last], weight[:, first:last], dtype=torch.float32) for first, last in pairwise(ends)]
    whole = tree_sum(slices)
    assert (whole.double() - x.double() @ weight.double().T).norm() <= 1e-6 * whole.norm()
    for ranks in (2, 4):
        each, size = 8 // ranks, 200 // ranks
        branches = []
        for rank in range(ranks):
            own_x, own = x[:, rank * size :][:, :size], weight[:, rank * size :][:, :size].contiguous()
            places = pairwise(size * number // each for number in range(each + 1))
            branches.append(tree_sum([matmul(own_x[:, a:b], own[:, a:b], dtype=torch.float32) for a, b in places]))
        assert torch.equal(tree_sum(branches), whole)


def test_no_tokens():
    assert matmul(torch.empty(0, 8), torch.empty(4, 8)).shape == (0, 4)


def test_parts_depend_on_the_weight_alone():
    assert num_parts.__wrapped__(128256, 4096, 2) == 1
    parts = num_parts.__wrapped__(4096, 4096, 2)
    assert parts & (parts - 1) == 0
    assert 4096 // parts >= module.SHORTEST_PART
