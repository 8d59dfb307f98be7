"""The filters' kernel against its reference: the same limits, to the last bit."""

import pytest
import torch

from headrace.kernels.table import REFERENCE_KERNELS as REFERENCE
from headrace.kernels.table import TRITON_KERNELS as TRITON
from tests.sampled import sampled

INF = float("inf")


def settings(rows):
    """(temperature, top_k, top_p, min_p) with each of the filters off in some rows"""
    temperature, top_p, min_p = torch.rand(rows) * 2 + 0.1, torch.rand(rows), torch.rand(rows) * 0.2
    top_k = torch.randint(-1, 60, (rows,), dtype=torch.int32)
    top_k[::3], top_p[1::4], min_p[::2] = 0, 1.0, 0.0
    temperature[5::7] = 0.0
    return temperature, top_k, top_p, min_p


def check(logits, params):
    expected = REFERENCE.filter_floor(logits, *params)
    found = TRITON.filter_floor(logits, *params)
    assert found.dtype == torch.float32
    assert found.tolist() == expected.tolist()
    return found


@sampled(("top_k", "top_p"), [-1, 0, 1, 2, 20, 299, 300, 301, 2**31 - 1], [0.0, 1e-6, 0.5, 0.999999, 1.0])
def test_edges(top_k, top_p):
    torch.seed()
    logits, rows = torch.randn(10, 300), 10
    logits[0] = 1.5  # all equal
    logits[1, 4:] = -INF  # fewer left than top_k
    logits[2] = logits[2].round()  # ties
    logits[3] *= 1e30  # weights of nothing
    logits[4, 7] = 3e38
    logits[5] = 0.0
    logits[5, ::2] = -0.0
    logits[6, 0] = INF
    logits[7, 1:] = -INF  # one left
    logits[8] = logits[8] * 1e-6 + 80
    ones = torch.ones(rows)
    params = ones * 0.7, torch.full((rows,), top_k, dtype=torch.int32), ones * top_p, ones * 0.0
    floor = check(logits, params)
    kept = (logits >= floor[:, None]).sum(1)
    assert (kept >= 1).all()
    if top_p == 1.0 and 0 < top_k < 300:
        assert kept[8] >= top_k
        assert kept[9] == top_k
    if not 0 < top_k < 300 and top_p == 1.0:
        assert (floor == -INF).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_nothing_usable_end_and_leave_their_neighbours_alone():
    torch.seed()
    logits, params = torch.randn(6, 500), settings(6)
    params = (torch.ones(6), torch.tensor([0, 9, 9, 0, 9, 9]), params[2] * 0.9, torch.full((6,), 0.01))
    expected = REFERENCE.filter_floor(logits, *params)
    logits[0], logits[2, 3], logits[3], logits[4, ::2] = float("nan"), float("nan"), -INF, float("nan")
    found = TRITON.filter_floor(logits, *params)
    assert found[[1, 5]].tolist() == expected[[1, 5]].tolist()


def test_parameters_may_be_columns_of_a_table_and_logits_rows_of_a_wider_one():
    torch.seed()
    wide, table = torch.randn(8, 600), torch.zeros(8, 6)
    params = settings(8)
    for column, values in zip((1, 3, 5), (params[0], params[2], params[3]), strict=True):
        table[:, column] = values
    top_k = params[1].repeat_interleave(6).view(8, 6)[:, 2]
    found = TRITON.filter_floor(wide[:, 40:540], table[:, 1], top_k, table[:, 3], table[:, 5])
    assert found.tolist() == REFERENCE.filter_floor(wide[:, 40:540].clone(), *params).tolist()
    assert TRITON.filter_floor(wide[:0], *(values[:0] for values in params)).shape == (0,)
