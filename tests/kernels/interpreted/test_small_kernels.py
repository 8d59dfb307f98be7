"""What small kernels must do beyond what the sweeps ask of them (test_table_kernels.py)."""

import pytest
import torch

from headrace.kernels.table import REFERENCE_KERNELS as REFERENCE
from headrace.kernels.table import TRITON_KERNELS as TRITON

DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
pytestmark = pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")


def assert_close(out, reference):
    assert out.shape == reference.shape
    assert out.dtype == reference.dtype
    error = (out.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    assert error <= DTYPES[out.dtype]


def test_norm_of_a_strided_view_and_of_three_dimensions():
    wide, weight = torch.randn(4, 80), torch.randn(32)
    assert_close(TRITON.rms_norm(wide[:, 16:48], weight, 1e-6), REFERENCE.rms_norm(wide[:, 16:48], weight, 1e-6))
    deep = torch.randn(2, 3, 32)
    assert_close(TRITON.rms_norm(deep, weight, 1e-6), REFERENCE.rms_norm(deep, weight, 1e-6))


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("planes", [1, 2])
def test_a_cache_of_keys_alone_and_keys_without_positions(planes, rotates):
    q, k, v = torch.randn(5, 8, 24).split((6, 1, 1), dim=1)
    angles, slots = torch.rand(64, 4) * 6, torch.tensor([3, -1, 7, 15, 0])
    table = (torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 64, (5,))) if rotates else (None, None)
    untouched = torch.randn(planes, 4, 4, 1, 24)
    cache, expected_cache = untouched.clone(), untouched.clone()
    v = v if planes == 2 else None
    out = TRITON.rotary_and_cache(q, k, v, *table, cache, slots)
    assert_close(out, REFERENCE.rotary_and_cache(q, k, v, *table, expected_cache, slots))
    assert_close(cache, expected_cache)
    assert torch.equal(out, q) != rotates
    assert torch.equal(cache.view(planes, 16, 24)[-1, 15], (k if v is None else v)[3, 0]) != (rotates and v is None)


@pytest.mark.parametrize("num_reqs", [1, 7, 150])
def test_settle_lengths(num_reqs):
    known = torch.randint(0, 60, (200,), dtype=torch.int32)
    rows = torch.randperm(200)[:num_reqs].int()
    ahead = torch.randint(0, 4, (num_reqs,), dtype=torch.int32)  # drafts that the host counts and that were rejected
    computed = (known[rows.long()] - 1).clamp(min=0)
    computed[::5] = computed[::5] // 2  # prompts under way, whose lengths the host knows
    ahead[::5] = 0
    samples = torch.randint(1, 4, (num_reqs,))
    offsets = torch.cat([torch.arange(count) for count in samples])
    sample_rows = rows.long().repeat_interleave(samples)
    positions = known[sample_rows].long() + offsets
    for kernels in (TRITON, REFERENCE):
        bounds, lengths = computed + ahead, computed + ahead + 4
        places = positions + ahead.repeat_interleave(samples)
        kernels.settle_lengths(bounds, lengths, rows, places, sample_rows, offsets, known)
        assert torch.equal(bounds, computed)
        assert torch.equal(lengths, computed + 4)
        assert torch.equal(places, positions)


def looked_up(tokens, num_drafts, least, most):
    """What the definition says, place by place."""
    best = None
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(most, end + 1) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= least and (best is None or length >= best[0]):
            best = (length, end + 1)
    period = tokens[best[1] :] if best else tokens[-1:]
    return [period[place % len(period)] for place in range(num_drafts)]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 4), (3, 3), (5, 8)])
def test_propose_ngram(least, most):
    known = torch.tensor([1, 2, 7, 40, 1500, 2048], dtype=torch.int32)  # longer than what one program compares
    table = torch.randint(0, 3, (6, 2048 + 4), dtype=torch.int32)
    table[3, :40] = torch.arange(40)  # nothing matches
    rows = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32)
    for kernels in (TRITON, REFERENCE):
        drafted = table.clone()
        kernels.propose_ngram(drafted, known, rows, 2048, 3, least, most)
        for row, count in enumerate(known.tolist()):
            tokens = table[row, :count].tolist()
            assert drafted[row, : count + 3].tolist() == tokens + looked_up(tokens, 3, least, most)
            assert torch.equal(drafted[row, count + 3 :], table[row, count + 3 :])


@each_dtype
@pytest.mark.parametrize("num_reqs", [1, 5, 90])
def test_commit_tokens_with_drafts(dtype, num_reqs):
    samples = torch.randint(1, 5, (num_reqs,))
    offsets = torch.cat([torch.arange(count) for count in samples])
    total = len(offsets)
    rows = torch.randperm(300)[:num_reqs].repeat_interleave(samples)
    positions = torch.randint(0, 30, (num_reqs,)).repeat_interleave(samples) + offsets
    token_ids, best = torch.randint(0, 2, (total,)), torch.randn(total).to(dtype)  # drafts are right half of the time
    raw_best = best.clone()
    best[5::9], raw_best[7::9] = float("-inf"), float("nan")
    start = torch.randint(0, 2, (301, 40), dtype=torch.int32)
    tables, knowns = [start.clone() for _ in range(2)], [torch.full((301,), 77, dtype=torch.int32) for _ in range(2)]
    outs = [torch.full((total,), -7) for _ in range(2)]
    for kernels, table, known, out in zip((TRITON, REFERENCE), tables, knowns, outs, strict=True):
        kernels.commit_tokens(
            out, table, token_ids, best, raw_best, rows, positions, -1, -2, known, offsets, 4, -3
        )  # fmt: skip
    assert torch.equal(*tables)
    assert torch.equal(*knowns)
    assert torch.equal(*outs)
    counts = True
    for index in range(total):  # one after the other, as without drafts
        row, position = int(rows[index]), int(positions[index])
        shown = int(token_ids[index])
        if not best[index] > float("-inf"):
            shown = -1
        if not raw_best[index].isfinite():
            shown = -2
        counts = counts or not offsets[index]
        assert outs[0][index] == (shown if counts else -3)
        if counts:
            assert tables[0][row, position] == token_ids[index]
            assert knowns[0][row] == position + 1 or outs[0][index + 1] != -3
        counts = counts and shown == int(start[row, position])
