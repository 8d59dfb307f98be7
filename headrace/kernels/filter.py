"""Computes what min_p, top_k and top_p leave of each row as one number: the lowest logit that may be sampled.

Probabilities are summed as 64-bit integers. So sums are exact, no order of summing, batch, rank or device family can
move a token over the edge of top_p, and Triton and torch agree to the last bit. Nothing is sorted: a histogram of the
row finds the bin that holds a limit, then bisection finds the limit within the bin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels._triton import next_power_of_2, tl, triton
from headrace.kernels.sampling import GREEDY_BELOW

_STEPS = 1 << 18
"""the steps to which probabilities are rounded, in an octave: 2.6e-6 from one to the next"""
_OCTAVES = 41
"""the octaves below the most probable token that count; tokens below them weigh nothing"""
_POLYNOMIAL = (1 << 30, 744257403, 257891463, 59375083, 9884647, 1014581)
"""2**(30 - f) for 0 <= f < 1, in powers of f with alternating signs; at most 9e-8 off, and monotone over all octaves"""
_STEPS_A_NAT = float(torch.tensor(_STEPS / math.log(2.0)))
_BINS = 4096
_GROUP, _CHUNK, _TILE = 128, 4096, 2048
_NOTES = 8
"""int32 numbers that a row's programs share: programs done with the histogram, programs done with gathering, logits
gathered, k_bin, first, last; two are free"""
_COLUMNS = ["top_k_ptr", "top_p_ptr", "temperature_ptr"]
"""may be columns of a table, so kernels are compiled for any alignment and stride"""


@triton.jit
def _weight(distance, steps):
    """Return 2**40 * exp(-distance / temperature) as int64, for fp32 distances >= 0; `steps` for a distance of 1."""
    step = tl.minimum(distance * steps, 41.0 * 262144).to(tl.int32)
    f = (step << 14).to(tl.uint32)
    r = 9884647 - tl.umulhi(tl.full(f.shape, 1014581, tl.uint32), f)
    r = 59375083 - tl.umulhi(r.to(tl.uint32), f)
    r = 257891463 - tl.umulhi(r.to(tl.uint32), f)
    r = 744257403 - tl.umulhi(r.to(tl.uint32), f)
    r = 1073741824 - tl.umulhi(r.to(tl.uint32), f)
    return (r.to(tl.int64) << 10) >> (step >> 18).to(tl.int64)


@triton.jit
def _distance(x, best):
    return tl.where(x == best, 0.0, best - x)  # inf is 0 from inf


@triton.jit
def _bin(x, best, scale, BINS: tl.constexpr):
    """Return x's bin, from the best down; always one of BINS, even for NaN."""
    return tl.maximum(tl.minimum(_distance(x, best) * scale, BINS - 1.0).to(tl.int32), 0)


@triton.jit
def _key(x):
    """Return an int32 that orders like fp32; the same bits, so transformed again, give x back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _params(row, top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr, stride, vocab_size, GREEDY_BELOW: tl.constexpr):
    """Return temperature, top_k, top_p, drop, by_count (top_k is on), by_mass (top_p is on), and if any is."""
    temperature = tl.load(temperature_ptr + row * stride)
    top_k = tl.load(top_k_ptr + row * stride).to(tl.int32)
    top_p = tl.load(top_p_ptr + row * stride)
    drop = tl.load(drop_ptr + row)
    sampled = temperature >= GREEDY_BELOW
    by_count = sampled & (top_k > 0) & (top_k < vocab_size)
    by_mass = sampled & (top_p < 1.0)
    return temperature, top_k, top_p, drop, by_count, by_mass, by_count | by_mass | (sampled & (drop > float("-inf")))


@triton.jit
def _extent(highest, lowest_ptr, groups, inside, temperature, drop, BINS: tl.constexpr):
    """Return a row's highest logit, the lowest that min_p keeps, and the bins for a distance of 1."""
    best = tl.max(highest, axis=0)
    lowest = tl.min(tl.load(lowest_ptr + groups, mask=inside, other=float("inf")), axis=0)
    width = tl.maximum(tl.minimum(best - lowest, temperature * 29.0), 1e-30)
    scale = tl.div_rn(tl.full((), BINS - 1.0, tl.float32), width)
    return best, tl.where(drop > float("-inf"), best + drop * temperature, float("-inf")), scale


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=_COLUMNS)
def _groups_kernel(
    notes_ptr, highest_ptr, lowest_ptr, counts_ptr, weights_ptr, logits_ptr,
    top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr,
    logits_stride, stride, vocab_size, num_groups,
    GREEDY_BELOW: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, BINS: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Store the highest and lowest finite logit of each group of neighbours; clear the histogram and the notes."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, _, _, _, wanted = _params(
        row, top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr, stride, vocab_size, GREEDY_BELOW
    )
    if wanted:
        group = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = token < vocab_size
        x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
        at = row * num_groups + group
        tl.store(highest_ptr + at, tl.max(x, axis=1), mask=group < num_groups)
        finite = tl.where(x > float("-inf"), x, float("inf"))
        tl.store(lowest_ptr + at, tl.min(finite, axis=1), mask=group < num_groups)
        cleared = chunk * CLEARED + tl.arange(0, CLEARED)
        tl.store(counts_ptr + row * BINS + cleared, tl.zeros((CLEARED,), tl.int32), mask=cleared < BINS)
        tl.store(weights_ptr + row * BINS + cleared, tl.zeros((CLEARED,), tl.int64), mask=cleared < BINS)
        if chunk == 0:
            tl.store(notes_ptr + row * 8 + tl.arange(0, 8), tl.zeros((8,), tl.int32))


@triton.jit
def _share(top_p, total):
    """Return the least weight, at least 1, that is not below top_p of `total`."""
    share = top_p.to(tl.float64) * total.to(tl.float64)
    whole = share.to(tl.int64)
    return tl.maximum(tl.where(whole.to(tl.float64) < share, whole + 1, whole), 1)


@triton.jit
def _note_bins(notes_ptr, counts_ptr, weights_ptr, top_k, top_p, by_count, by_mass, BINS: tl.constexpr):
    """Note, from the whole histogram, the bin k_bin of the k-th logit, and the bins first .. last that may hold top_p's
    limit: the total that top_p is a share of is known only to within k_bin until that is searched. BINS: no bin."""
    index = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + index, cache_modifier=".cg")
    weights = tl.load(weights_ptr + index, cache_modifier=".cg")
    k_bin = tl.min(tl.where(tl.cumsum(counts, axis=0) >= top_k, index, BINS), axis=0)
    k_bin = tl.where(by_count, k_bin, BINS)
    upto = tl.cumsum(weights, axis=0)
    least = tl.sum(tl.where(index < k_bin, weights, 0), axis=0)
    most = tl.sum(tl.where(index <= k_bin, weights, 0), axis=0)
    first = tl.min(tl.where(upto >= _share(top_p, least), index, BINS), axis=0)
    last = tl.min(tl.where(upto >= _share(top_p, most), index, BINS), axis=0)
    tl.store(notes_ptr + 3, k_bin)
    tl.store(notes_ptr + 4, tl.where(by_mass, first, BINS))
    tl.store(notes_ptr + 5, tl.where(by_mass, last, BINS))


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=_COLUMNS)
def _histogram_kernel(
    notes_ptr, counts_ptr, weights_ptr, highest_ptr, lowest_ptr, logits_ptr,
    top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr,
    logits_stride, stride, vocab_size, num_groups, steps_a_nat,
    GREEDY_BELOW: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count the logits in each bin and add up their weights, for logits high enough to matter. The last program of a
    row notes the bins that hold the limits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p, drop, by_count, by_mass, _wanted = _params(
        row, top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr, stride, vocab_size, GREEDY_BELOW
    )
    if by_count | by_mass:
        groups = tl.arange(0, GROUPS)
        known = groups < num_groups
        highest_ptr += row * num_groups
        highest = tl.load(highest_ptr + groups, mask=known, other=float("-inf"))
        best, floor, scale = _extent(highest, lowest_ptr + row * num_groups, groups, known, temperature, drop, BINS)
        if by_count:
            # Where k groups reach, at least k logits do: a lower bound, found by a few steps of bisection.
            low = tl.min(tl.where(highest > float("-inf"), highest, float("inf")), axis=0)
            if tl.sum((highest >= low).to(tl.int32), axis=0) >= top_k:
                high = best
                for _step in range(8):
                    middle = low + (high - low) * 0.5
                    reached = tl.sum((highest >= middle).to(tl.int32), axis=0) >= top_k
                    low = tl.where(reached, middle, low)
                    high = tl.where(reached, high, middle)
                floor = tl.maximum(floor, low)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        group_high = tl.load(highest_ptr + token // GROUP, mask=token < vocab_size, other=float("-inf"))
        matters = (token < vocab_size) & (group_high >= floor)
        x = tl.load(logits_ptr + row * logits_stride + token, mask=matters, other=float("-inf")).to(tl.float32)
        matters = (x >= floor) & (x > float("-inf"))
        at = row * BINS + _bin(x, best, scale, BINS)
        if by_count:
            tl.atomic_add(counts_ptr + at, tl.full((CHUNK,), 1, tl.int32), mask=matters, sem="relaxed")
        if by_mass:
            weight = _weight(_distance(x, best), tl.div_rn(steps_a_nat, temperature))
            tl.atomic_add(weights_ptr + at, weight, mask=matters & (weight > 0), sem="relaxed")
        tl.debug_barrier()  # all threads have added before the counter says so
        notes_ptr += row * 8
        if tl.atomic_add(notes_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            _note_bins(
                notes_ptr, counts_ptr + row * BINS, weights_ptr + row * BINS, top_k, top_p, by_count, by_mass, BINS
            )


@triton.jit
def _found(found_ptr, start, num_found, wanted_bin, floor, best, scale, BINS: tl.constexpr, TILE: tl.constexpr):
    """Load a tile of what was gathered: logits, and which of them are in the bin and not below `floor`."""
    at = start + tl.arange(0, TILE)
    x = tl.load(found_ptr + at, mask=at < num_found, other=float("-inf"))
    return x, (at < num_found) & (x >= floor) & (_bin(x, best, scale, BINS) == wanted_bin)


@triton.jit
def _lowest_reaching(
    goal, found_ptr, num_found, wanted_bin, floor, best, scale, steps,
    BY_MASS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the highest logit of the bin such that those not below it number (BY_MASS: weigh) at least `goal`."""
    low, high = tl.full((), 0x7FFFFFFF, tl.int64), tl.full((), -0x80000000, tl.int64)
    for start in range(0, num_found, TILE):
        x, inside = _found(found_ptr, start, num_found, wanted_bin, floor, best, scale, BINS, TILE)
        low = tl.minimum(low, tl.min(tl.where(inside, _key(x), 0x7FFFFFFF), axis=0).to(tl.int64))
        high = tl.maximum(high, tl.max(tl.where(inside, _key(x), -0x80000000), axis=0).to(tl.int64))
    while low < high:
        middle = low + (high - low + 1) // 2
        total = tl.zeros((), tl.int64)
        for start in range(0, num_found, TILE):
            x, inside = _found(found_ptr, start, num_found, wanted_bin, floor, best, scale, BINS, TILE)
            inside = inside & (_key(x) >= middle)
            value = _weight(_distance(x, best), steps) if BY_MASS else tl.full((TILE,), 1, tl.int64)
            total += tl.sum(tl.where(inside, value, 0), axis=0)
        reached = total >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    key = low.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    found_ptr, num_found, counts_ptr, weights_ptr, top_k, top_p, by_mass, k_bin, floor, best, scale, steps,
    BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the limit: the row's k-th logit, then the lowest that top_p keeps of those."""
    index = tl.arange(0, BINS)
    limit = floor
    kept = tl.sum(tl.where(index < k_bin, tl.load(weights_ptr + index), 0), axis=0)
    if k_bin < BINS:
        goal = top_k.to(tl.int64) - tl.sum(tl.where(index < k_bin, tl.load(counts_ptr + index), 0), axis=0)
        limit = _lowest_reaching(goal, found_ptr, num_found, k_bin, floor, best, scale, steps, False, BINS, TILE)
        if by_mass:
            for start in range(0, num_found, TILE):
                x, inside = _found(found_ptr, start, num_found, k_bin, limit, best, scale, BINS, TILE)
                kept += tl.sum(tl.where(inside, _weight(_distance(x, best), steps), 0), axis=0)
    if by_mass:
        weights = tl.load(weights_ptr + index)
        goal = _share(top_p, kept)
        p_bin = tl.min(tl.where(tl.cumsum(weights, axis=0) >= goal, index, BINS), axis=0)
        if p_bin < BINS:
            goal -= tl.sum(tl.where(index < p_bin, weights, 0), axis=0)
            limit = _lowest_reaching(goal, found_ptr, num_found, p_bin, limit, best, scale, steps, True, BINS, TILE)
    return limit


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=_COLUMNS)
def _limit_kernel(
    out_ptr, found_ptr, notes_ptr, counts_ptr, weights_ptr, highest_ptr, lowest_ptr, logits_ptr,
    top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr,
    logits_stride, stride, vocab_size, num_groups, steps_a_nat,
    GREEDY_BELOW: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Gather the logits of the bins in the notes; the last program of a row searches them for the limits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_k, top_p, drop, by_count, by_mass, wanted = _params(
        row, top_k_ptr, top_p_ptr, drop_ptr, temperature_ptr, stride, vocab_size, GREEDY_BELOW
    )
    limit = tl.full((), float("-inf"), tl.float32)
    finished = chunk == 0
    if wanted:
        groups = tl.arange(0, GROUPS)
        highest_ptr += row * num_groups
        highest = tl.load(highest_ptr + groups, mask=groups < num_groups, other=float("-inf"))
        best, limit, scale = _extent(
            highest, lowest_ptr + row * num_groups, groups, groups < num_groups, temperature, drop, BINS
        )
        if by_count | by_mass:
            notes_ptr += row * 8
            found_ptr += row * vocab_size
            k_bin, first, last = tl.load(notes_ptr + 3), tl.load(notes_ptr + 4), tl.load(notes_ptr + 5)
            deepest = tl.maximum(tl.where(k_bin < BINS, k_bin, -1), tl.where(last < BINS, last, -1))
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            group_high = tl.load(highest_ptr + token // GROUP, mask=token < vocab_size, other=float("-inf"))
            near = (token < vocab_size) & (_bin(group_high, best, scale, BINS) <= deepest)
            x = tl.load(logits_ptr + row * logits_stride + token, mask=near, other=float("-inf")).to(tl.float32)
            at = _bin(x, best, scale, BINS)
            needed = (x >= limit) & (x > float("-inf")) & ((at == k_bin) | ((at >= first) & (at <= last)))
            count = tl.sum(needed.to(tl.int32), axis=0)
            if count > 0:
                place = tl.atomic_add(notes_ptr + 2, count, sem="relaxed")
                tl.store(found_ptr + place + tl.cumsum(needed.to(tl.int32), axis=0) - 1, x, mask=needed)
            tl.debug_barrier()  # all threads have stored before the counter says so
            finished = tl.atomic_add(notes_ptr + 1, 1, sem="acq_rel") == tl.num_programs(1) - 1
            if finished:
                limit = _search(
                    found_ptr, tl.load(notes_ptr + 2, cache_modifier=".cg"), counts_ptr + row * BINS,
                    weights_ptr + row * BINS, top_k, top_p, by_mass, k_bin, limit, best, scale,
                    tl.div_rn(steps_a_nat, temperature), BINS, TILE,
                )  # fmt: skip
    if finished:
        tl.store(out_ptr + row, limit)


def filter_floor(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the lowest logit of each row that its filters let through # [n] fp32; -inf where no filter is on.

    logits [n, V] (any float type, last dim contiguous, V <= 2**22) before the division by temperature; temperature,
    top_p, min_p [n] fp32; top_k [n] int32 or int64. In this order: min_p, top_k, then top_p of what those left; logits
    equal to the last one kept are kept, and so is the best. A filter is off at min_p 0, top_k < 1 or >= V, top_p >= 1,
    and in greedy rows (temperature < 1e-5). A row's result depends on that row alone.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return out
    stride = temperature.stride(0)
    if not stride == top_k.stride(0) == top_p.stride(0):
        temperature, top_k, top_p, stride = temperature.contiguous(), top_k.contiguous(), top_p.contiguous(), 1
    chunks, num_groups = -(-vocab_size // _CHUNK), -(-vocab_size // _GROUP)
    highest, lowest = torch.empty((2, rows, num_groups), dtype=torch.float32, device=device)
    counts = torch.empty((rows, _BINS), dtype=torch.int32, device=device)
    weights = torch.empty((rows, _BINS), dtype=torch.int64, device=device)
    found = torch.empty((rows, vocab_size), dtype=torch.float32, device=device)
    notes = torch.empty((rows, _NOTES), dtype=torch.int32, device=device)
    params = (top_k, top_p, min_p.log(), temperature, logits.stride(0), stride, vocab_size, num_groups)
    common = {"GREEDY_BELOW": GREEDY_BELOW, "GROUP": _GROUP, "BINS": _BINS, "enable_fp_fusion": False}
    wide = {"CHUNK": _CHUNK, "GROUPS": max(16, next_power_of_2(num_groups)), "num_warps": 8, **common}
    _groups_kernel[(rows, chunks)](
        notes, highest, lowest, counts, weights, logits, *params,
        CHUNK=_CHUNK, CLEARED=next_power_of_2(-(-_BINS // chunks)), num_warps=4, **common,
    )  # fmt: skip
    _histogram_kernel[(rows, chunks)](notes, counts, weights, highest, lowest, logits, *params, _STEPS_A_NAT, **wide)
    _limit_kernel[(rows, chunks)](
        out, found, notes, counts, weights, highest, lowest, logits, *params, _STEPS_A_NAT, TILE=_TILE, **wide
    )
    return out


def weights_reference(distance: Tensor, temperature: Tensor) -> Tensor:
    """Return 2**40 * exp(-distance / temperature), rounded as the kernels do # int64; distance [n, V] fp32 >= 0."""
    steps = torch.full_like(temperature, _STEPS_A_NAT) / temperature
    step = (distance * steps[:, None]).clamp_max_(_OCTAVES * _STEPS).int()
    f = (step & (_STEPS - 1)).long()
    value = torch.full_like(f, _POLYNOMIAL[-1])
    for coefficient in reversed(_POLYNOMIAL[:-1]):
        value = coefficient - ((value * f) >> 18)
    return (value << 10) >> (step >> 18)


def filter_floor_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    sampled, vocab_size = temperature >= GREEDY_BELOW, logits.shape[1]
    temperature = torch.where(sampled, temperature, 1.0)
    nothing = torch.full_like(temperature, float("-inf"))
    ordered = logits.float().sort(dim=-1, descending=True).values
    best, drop = ordered[:, 0], min_p.log()
    limit = torch.where(drop > nothing, best + drop * temperature, nothing)
    by_count = (top_k > 0) & (top_k < vocab_size)
    kth = ordered.gather(1, torch.where(by_count, top_k, 1).long()[:, None] - 1)[:, 0]
    limit = torch.maximum(limit, torch.where(by_count, kth, nothing))
    distance = torch.where(ordered == best[:, None], 0.0, best[:, None] - ordered)
    kept = (ordered >= limit[:, None]) & (ordered > float("-inf"))
    upto = weights_reference(distance, temperature).mul_(kept).cumsum(-1)
    goal = (top_p.double() * upto[:, -1].double()).ceil().long().clamp_min(1)
    last = (upto < goal[:, None]).sum(-1, keepdim=True).clamp_max_(vocab_size - 1)
    limit = torch.maximum(limit, torch.where(top_p < 1.0, ordered.gather(1, last)[:, 0], nothing))
    return torch.where(sampled, limit, nothing)
