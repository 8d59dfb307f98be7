"""Norms, activation, rotary + cache, batch preparation and sampling against their references."""

import itertools

import pytest
import torch
from arena import in_arena, neighbours_are_untouched

from headrace.kernels.table import REFERENCE_KERNELS as REFERENCE
from headrace.kernels.table import TRITON_KERNELS as TRITON

DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _fresh_inputs_and_poisoned_outputs():
    torch.seed()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty gives NaN
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(out, reference):
    assert out.shape == reference.shape
    assert out.dtype == reference.dtype
    error = (out.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    assert error <= DTYPES[out.dtype]


@each_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(3, 48), (1, 129), (0, 16)])
def test_norms(dtype, rows, hidden):
    x, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
    assert_close(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    delta, same = torch.randn(rows, hidden).to(dtype), x.clone()
    assert_close(TRITON.rms_norm(x, weight, 1e-5, delta), REFERENCE.rms_norm(same, weight, 1e-5, delta))
    assert torch.equal(x, same)  # the sum, rounded once


def test_norm_of_a_strided_view_and_of_three_dimensions():
    wide, weight = torch.randn(4, 80), torch.randn(32)
    assert_close(TRITON.rms_norm(wide[:, 16:48], weight, 1e-6), REFERENCE.rms_norm(wide[:, 16:48], weight, 1e-6))
    deep = torch.randn(2, 3, 32)
    assert_close(TRITON.rms_norm(deep, weight, 1e-6), REFERENCE.rms_norm(deep, weight, 1e-6))


@each_dtype
@pytest.mark.parametrize(("rows", "width"), [(5, 33), (1, 1100), (0, 8)])
def test_silu_and_mul(dtype, rows, width):
    x = torch.randn(rows, 2 * width).to(dtype) * 4
    assert_close(TRITON.silu_and_mul(x), REFERENCE.silu_and_mul(x))


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "norm"),
    [(6, 2, 8, 8, False), (3, 3, 24, 24, True), (5, 1, 32, 16, True), (4, 2, 10, 4, False), (2, 2, 96, 96, False)],
)
def test_rotary_and_cache(dtype, heads, kv_heads, dim, rotary_dim, norm):
    q, k, v = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype).split((heads, kv_heads, kv_heads), dim=1)
    angles, positions = torch.rand(64, rotary_dim // 2) * 6, torch.randint(0, 64, (5,))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    untouched = torch.randn(2, 4, 4, kv_heads, dim).to(dtype)
    cache, expected_cache = in_arena(untouched), in_arena(untouched)
    slots = torch.tensor([3, -1, 7, 15, 0])
    weights = [torch.randn(dim).to(dtype) if norm else None for _ in range(2)]
    out = TRITON.rotary_and_cache(q, k, v, cos_sin, positions, cache, slots, *weights)
    assert_close(out, REFERENCE.rotary_and_cache(q, k, v, cos_sin, positions, expected_cache, slots, *weights))
    assert_close(cache, expected_cache)
    unwritten = [slot for slot in range(16) if slot not in slots]
    assert torch.equal(cache.reshape(2, 16, -1)[:, unwritten], untouched.view(2, 16, -1)[:, unwritten])
    assert neighbours_are_untouched(cache)
    assert neighbours_are_untouched(expected_cache)


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


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 2, 140], [300]], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_prepare_batch(counts, block_size):
    tokens = torch.randint(0, 99, (6, 400), dtype=torch.int32)
    blocks = torch.randint(0, 2**31 - 1, (6, -(-400 // block_size)), dtype=torch.int32)
    rows = torch.randperm(6)[: len(counts)].int()
    computed = torch.randint(0, 90, (len(counts),), dtype=torch.int32)
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    arguments = (rows, computed, starts, tokens, blocks, block_size, sum(counts))
    for out, reference in zip(TRITON.prepare_batch(*arguments), REFERENCE.prepare_batch(*arguments), strict=True):
        assert out.dtype == reference.dtype
        assert torch.equal(out, reference)


@pytest.mark.parametrize("count", [0, 1, 7, 1024, 2500])
def test_copy_words(count):
    source = torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    copied = torch.full((count + 3,), 5, dtype=torch.int32)
    TRITON.copy_words(copied, source)
    assert torch.equal(copied[:count], source)
    assert copied[count:].tolist() == [5, 5, 5]


@pytest.mark.parametrize("count", [0, 1, 7, 512, 1300])
def test_scatter_words(count):
    index, values = torch.randperm(50 * 40)[:count], torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32)
    tables = [torch.full((50, 40), 9, dtype=torch.int32) for _ in range(2)]
    for kernels, table in zip((TRITON, REFERENCE), tables, strict=True):
        kernels.scatter_words(table, index, values)
    assert torch.equal(*tables)
    assert int((tables[0] == 9).sum()) >= 2000 - count


@each_dtype
@pytest.mark.parametrize("count", [0, 1, 5, 200])
def test_commit_tokens(dtype, count):
    rows, positions = torch.randperm(300)[:count], torch.randint(0, 40, (count,))
    token_ids, best = torch.randint(0, 2**31 - 1, (count,)), torch.randn(count).to(dtype)
    raw_best = best.clone()
    best[1::4], raw_best[2::4], raw_best[3::8], best[7::8] = float("-inf"), float("nan"), float("inf"), float("nan")
    tables = [torch.full((301, 40), 9, dtype=torch.int32) for _ in range(2)]
    outs = [torch.full((count,), -7) for _ in range(2)]
    for kernels, table, out in zip((TRITON, REFERENCE), tables, outs, strict=True):
        kernels.commit_tokens(out, table, token_ids, best, raw_best, rows, positions, -1, -2)
    assert torch.equal(*outs)
    assert torch.equal(*tables)
    told = (None, -1, -2, -2, None, -1, -2, -1)
    assert outs[0].tolist() == [told[i % 8] or token for i, token in enumerate(token_ids.tolist())]


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


@each_dtype
@pytest.mark.parametrize("vocab_size", [1, 37, 1500])
def test_gumbel_argmax(dtype, vocab_size):
    logits = torch.randn(6, vocab_size).to(dtype) * 3
    logits[2] = logits[2, 0]  # a greedy row of ties, and a sampled one
    logits[3] = float("-inf")
    logits[3, -1] = 0.0
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.7, 2.0, 1e-6])
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (6,)), torch.randint(0, 1 << 20, (6,))
    out = TRITON.gumbel_argmax(logits, temperature, seeds, positions)
    assert out.tolist() == REFERENCE.gumbel_argmax(logits, temperature, seeds, positions).tolist()
    assert out[2] == 0
    assert out[3] == vocab_size - 1
