"""Routing, sorting and the experts' products against their references: odd sizes, ties, few and many tokens."""

import random
from dataclasses import replace

import pytest
import torch

from headrace.kernels import moe, moe_route
from headrace.kernels.cases import Inputs, made_up_expert_adapters
from headrace.kernels.fp8 import Rounding, quantize_per_token_reference
from headrace.kernels.moe import Experts, Joined, SwigluClamp, fused_moe, fused_moe_reference
from headrace.kernels.moe_config import MoeConfig, Tile
from headrace.kernels.moe_route import Scoring, max_tiles, route, route_reference
from headrace.kernels.norm import HalfNormed, half_norm_reference, rms_norm_reference
from headrace.kernels.tiled import tile
from tests.kernels.coded_weights import OF_EXPERTS, random_coded
from tests.sampled import sampled

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}
FEW = MoeConfig(1, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1, group=4))
MANY = MoeConfig(16, Tile(16, 16, 4, 1), Tile(16, 32, 4, 1))
SWAPPED = MoeConfig(16, Tile(16, 32, 4, 1, swap=True), Tile(16, 16, 4, 1, swap=True))
WAYS = {"one by one": FEW, "tiles": MANY, "swapped": SWAPPED}
# for tiled weights
ALONE = MoeConfig(1, Tile(16, 128, 2, 2), Tile(16, 128, 4, 1, group=2))
ALONE_WIDE = MoeConfig(1, Tile(32, 128, 2, 1), Tile(64, 128, 2, 1, group=4))
SORTED = MoeConfig(16, Tile(32, 256, 4, 1), Tile(128, 128, 4, 1, split=2))
pytestmark = pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")


def assert_same_routing(found, expected):
    assert torch.equal(found.ids, expected.ids)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-6, atol=0)
    assert torch.equal(found.order, expected.order)
    used = expected.tiles[2] > 0
    assert torch.equal(found.tiles[2], expected.tiles[2])
    assert torch.equal(found.tiles[:, used], expected.tiles[:, used])


@sampled(
    ("size", "block_m", "half"),
    [(1, 8, 2), (5, 60, 4), (33, 12, 3), (70, 5, 5), (64, 1, 1)], [0, 1, 16], [torch.float16, torch.bfloat16],
)  # fmt: skip
def test_routes_and_sorts(size, block_m, half):
    num_tokens, num_experts, top_k = size
    wide = torch.randn(num_tokens, num_experts + 3)
    wide[num_tokens // 2] = 1.5  # ties
    wide[-1, 1:3] = -float("inf")
    logits = wide[:, :num_experts]
    renormalize = bool(torch.rand(()) < 0.5)
    expected = route_reference(logits, top_k, renormalize, block_m)
    assert_same_routing(route(logits, top_k, renormalize, block_m), expected)
    bias = torch.randn(num_experts)
    factors = torch.rand(num_experts) + 0.5
    several = Scoring(True, None, 2.5), Scoring(True, bias, 2.5, factors=factors), Scoring(False, bias)
    finite = logits.clamp(min=-9.0)  # a softmax over experts of which none has any weight would be none
    for scoring, given in (*((each, logits) for each in several), (Scoring(near=0.4, factors=factors), finite)):
        expected = route_reference(given, top_k, renormalize, block_m, scoring)
        assert_same_routing(route(given, top_k, renormalize, block_m, scoring), expected)
    rounded = logits.to(half)
    assert_same_routing(route(rounded, top_k, True, block_m), route_reference(rounded, top_k, True, block_m))


@sampled(("size", "dtype"), [(12, 4, 1), (60, 5, 2), (33, 3, 2), (256, 8, 4)], [torch.float32, torch.bfloat16])
def test_routes_within_the_best_groups(size, dtype):
    num_experts, groups, used = size
    logits = torch.randn(9, num_experts).to(dtype)
    logits[3] = 0.5  # ties: of equal groups the first
    logits[4, 1::2] = logits[4, ::2][: num_experts // 2]  # within groups too
    for scoring in (
        Scoring(False, None, 1.5, groups, used),
        Scoring(True, torch.randn(num_experts), 2.5, groups, used),
    ):
        expected = route_reference(logits, 3, True, 8, scoring)
        assert_same_routing(route(logits, 3, True, 8, scoring), expected)
        size = num_experts // groups
        assert max(len({expert // size for expert in row}) for row in expected.ids.tolist()) <= used


@pytest.mark.parametrize("num_tokens", [401, 1003, 3000])  # a block, two, and more than a large one
@pytest.mark.parametrize("block_m", [16, 128])
def test_sorts_many_pairs(num_tokens, block_m):
    num_experts, logits = 9, torch.randn(num_tokens, 9)
    logits[:, 5] = -float("inf")  # nobody's
    logits[:, 2] += 2.0
    expected = route_reference(logits, 3, True, block_m)
    found = expected._replace(order=torch.empty_like(expected.order), tiles=torch.empty_like(expected.tiles))
    moe_route._sort(found, num_experts, block_m)
    assert_same_routing(found, expected)


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_one_launch_routes_like_several(num_tokens):
    x, experts, _, _ = make_layer(num_tokens, 96, 6, 16, 2, torch.float32, True)
    for block_m in (0, 16):
        routing, logits, normed = moe_route.norm_and_route(
            x, experts.norm_weight, experts.eps, experts.router, 6, 2, experts.renormalize, block_m
        )
        torch.testing.assert_close(normed, rms_norm_reference(x, experts.norm_weight, experts.eps))
        torch.testing.assert_close(logits, torch.nn.functional.linear(normed, experts.router), rtol=1e-5, atol=1e-5)
        assert_same_routing(routing, route_reference(logits[:, :6], 2, experts.renormalize, block_m))
    assert not moe_route._arrivals(x.device).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_launch_rounds_norms_by_the_type_of_their_weight(dtype):
    """Once or twice: the other way a quarter of the numbers differs."""
    x, experts, _, _ = make_layer(5, 96, 6, 16, 2, torch.bfloat16, True)
    weight = torch.rand(96).to(dtype) + 0.5
    normed = moe_route.norm_and_route(x, weight, experts.eps, experts.router, 6, 2, experts.renormalize, 0)[2]
    assert (normed != rms_norm_reference(x, weight, experts.eps)).float().mean() < 0.02


def test_all_tokens_on_one_expert_and_no_logit_that_orders():
    logits = torch.zeros(40, 6)
    logits[:, 4] = 9.0
    expected = route_reference(logits, 1, False, 16)
    assert_same_routing(route(logits, 1, False, 16), expected)
    assert expected.tiles[:, expected.tiles[2] > 0].tolist() == [[4, 4, 4], [0, 16, 32], [16, 16, 8]]
    broken = route(torch.full((3, 6), float("nan")), 2, True, 16)
    assert ((broken.ids >= 0) & (broken.ids < 6)).all()
    assert sorted(broken.order.tolist()) == list(range(6))


def test_tiles_never_outgrow_their_bound():
    """Nor do those of any expert reach where the next one's begin."""
    for pairs, experts, block_m in ((7, 3, 16), (1000, 128, 16), (64, 128, 64), (4096, 8, 32), (300, 64, 1)):
        spread = torch.randint(experts, (pairs,)).bincount(minlength=experts).tolist()
        skewed = (torch.rand(pairs) ** 3 * experts).long().bincount(minlength=experts).tolist()
        for counts in ([pairs], [1] * min(pairs, experts - 1) + [max(0, pairs - experts + 1)], spread, skewed):
            assert sum(-(-count // block_m) for count in counts) <= max_tiles(pairs, experts, block_m)
            first = 0
            for expert, count in enumerate(counts):
                begin, first = max_tiles(first, expert, block_m), first + count
                assert begin + -(-count // block_m) <= max_tiles(first, expert + 1, block_m)


def make_layer(num_tokens, hidden, num_experts, n, top_k, dtype, has_shared, **options):
    """(x, experts, shared, residual). `has_shared` without a gate: the router is a sigmoid's, with all its quirks."""
    x, shared, residual = torch.randn(3, num_tokens, hidden).to(dtype)
    router = torch.randn(num_experts + (has_shared is True), hidden).to(dtype) * 0.4
    w13, w2 = torch.randn(num_experts, 2 * n, hidden) * hidden**-0.5, torch.randn(num_experts, hidden, n) * n**-0.5
    norm = (torch.rand(hidden) + 0.5).to(dtype)
    options = {"renormalize": bool(torch.rand(()) < 0.5), "scales_input": bool(torch.rand(()) < 0.5), **options}
    if has_shared == "without a gate":
        options["scoring"] = Scoring(True, torch.randn(num_experts), 2.5)
    experts = Experts(norm, 1e-3, router, w13.to(dtype), w2.to(dtype), top_k, **options)
    return x * 3, experts, shared if has_shared else None, residual


def in_float32(experts):
    """The same with all tensors of 16 bits widened."""
    wide = {name: tensor.float() for name, tensor in vars(experts).items()
            if isinstance(tensor, torch.Tensor) and tensor.itemsize == 2}  # fmt: skip
    return replace(experts, **wide)


def run(num_tokens, hidden, num_experts, n, top_k, config, dtype=torch.float32, has_shared=False, **options):
    x, experts, shared, residual = make_layer(num_tokens, hidden, num_experts, n, top_k, dtype, has_shared, **options)
    # copies, for the residual is written over
    wide = [None if tensor is None else tensor.to(torch.float32, copy=True) for tensor in (x, shared, residual)]
    expected, expected_ids = fused_moe_reference(wide[0], in_float32(experts), *wide[1:])
    out, ids = fused_moe(x, experts, shared, residual, config)
    assert out is residual
    same = (ids == expected_ids).all(dim=1)  # a rounded logit may choose another expert
    assert same.float().mean() >= (1.0 if dtype == torch.float32 else 0.4)
    error = (out[same].double() - expected[same].double()).norm() / expected[same].double().norm()
    assert error <= TOLERANCE[dtype]


@sampled(
    ("config", "size", "has_shared"),
    WAYS,
    [(1, 32, 8, 32, 2), (3, 48, 5, 20, 3), (21, 33, 3, 17, 2), (37, 16, 4, 16, 1)],
    [False, True, "without a gate"],
)
def test_layers(config, size, has_shared):
    num_tokens, *rest = size
    if config == "one by one":
        num_tokens = min(num_tokens, 4)
    config = WAYS[config]
    run(num_tokens, *rest, config, has_shared=has_shared)


def with_shared_behind(experts, count):
    """The same with shared experts `count` times as wide, in fp8 if the others are, right behind them in memory."""
    n, hidden, dtype, names = experts.inner_size, experts.w13.shape[2], experts.router.dtype, Joined._fields[1:]
    w13, w2 = torch.randn(1, 2 * count * n, hidden) * hidden**-0.5, torch.randn(1, hidden, count * n) * n**-0.5
    wide = replace(experts, w13=w13.to(dtype), w2=w2.to(dtype))
    wide = in_fp8(wide) if experts.kind == "fp8" else wide
    changed, behind = {}, dict.fromkeys(names)
    for name in names:
        routed, own = getattr(experts, name), getattr(wide, name)
        if routed is not None:
            first, both = routed.numel(), torch.cat((routed.flatten(), own.flatten()))
            changed[name], behind[name] = both[:first].view(routed.shape), both[first:].view(own[0].shape)
    return replace(experts, joined=Joined(count, **behind), **changed)


def feed_forward(x, joined):
    """What the shared experts make of x [tokens, hidden], a plain feed-forward."""
    gate, up = (x @ joined.w13.float().T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ joined.w2.float().T


@sampled(
    ("config", "count", "has_gate", "dtype"), WAYS, [1, 2, 3], [True, "without a gate"], [torch.float32, torch.bfloat16]
)
def test_shared_experts_behind_the_others_are_further_experts(config, count, has_gate, dtype):
    """However many tokens there are, however a router weighs, and however many times as wide they are."""
    tokens, config = (4 if config == "one by one" else 21), WAYS[config]
    options = {"scales_input": False} if has_gate is True else {}
    x, experts, _, residual = make_layer(tokens, 48, 5, 20, 3, dtype, has_gate, **options)
    experts = with_shared_behind(experts, count)
    wide = in_float32(replace(experts, joined=None))
    normed = rms_norm_reference(x.float(), wide.norm_weight, wide.eps)
    shared = feed_forward(normed, experts.joined)
    expected, chosen = fused_moe_reference(x.float(), wide, shared, residual.clone().float())
    out, ids = fused_moe(x, experts, None, residual, config)
    same = (ids == chosen).all(dim=1)
    assert same.float().mean() >= (1.0 if dtype == torch.float32 else 0.4)
    assert (out - expected)[same].double().norm() <= 3 * TOLERANCE[dtype] * expected[same].double().norm()
    alike = fused_moe_reference(x, experts)[0] - fused_moe_reference(x, experts, shared.to(dtype))[0]
    assert alike.norm() <= 2 * TOLERANCE[dtype] * expected.norm()


@sampled(("config", "count"), WAYS, [1, 2])
def test_shared_experts_in_fp8_are_further_experts(config, count):
    tokens, config = (4 if config == "one by one" else 21), WAYS[config]
    x, experts, _, residual = make_layer(tokens, 48, 5, 20, 3, torch.float32, "without a gate")
    experts = with_shared_behind(in_fp8(experts), count)
    expected = fused_moe_reference(x, experts, None, residual.clone(), config)[0]
    out = fused_moe(x, experts, None, residual, config)[0]
    assert (out - expected).norm() <= (TOLERANCE[torch.float32] + 2e-2 * (config.block_m > 1)) * expected.norm()


def test_shared_experts_that_tiles_would_read_too_often_are_computed_apart(monkeypatch):
    x, experts, given, _ = make_layer(17, 48, 5, 20, 2, torch.float32, True, scales_input=False)
    experts, calls = with_shared_behind(experts, 2), []

    def shared(normed):
        calls.append(normed)
        return feed_forward(normed, experts.joined)

    together = fused_moe(x, experts, shared, None, MANY)[0]
    assert not calls
    monkeypatch.setattr(moe, "READ_AGAIN", 0)
    fused_moe(x[:16], experts, shared, None, MANY)  # one tile
    assert not calls
    apart = fused_moe(x, experts, shared, None, MANY)[0]
    assert len(calls) == 1
    assert (together - apart).norm() <= 2 * TOLERANCE[torch.float32] * apart.norm()
    alone = replace(experts, joined=None)
    assert torch.equal(fused_moe(x, experts, given, None, MANY)[0], fused_moe(x, alone, given, None, MANY)[0])


@pytest.mark.parametrize(("config", "top_k"), [("one by one", 1), ("tiles", 1), ("one by one", 3), ("swapped", 3)])
def test_weights_of_experts_are_factors_of_what_they_are_given(config, top_k):
    config = WAYS[config]
    run(4, 48, 5, 20, top_k, config, has_shared="without a gate", scales_input=True)
    x, experts, *_ = make_layer(4, 48, 5, 20, top_k, torch.float32, False, scales_input=True)
    sums = [fused_moe(x, replace(experts, scales_input=scaled), None, None, config)[0] for scaled in (True, False)]
    if top_k > 1:  # of one expert the softmax may be near one
        assert (sums[0] - sums[1]).norm() > 0.05 * sums[1].norm()


@pytest.mark.parametrize(("config", "form"), [("one by one", "plain"), ("tiles", "plain"), ("tiles", "fp8")])
def test_ranks_that_hold_some_of_the_experts_add_up_to_all(config, form):
    """With tokens none of whose experts are on a rank."""
    tokens, num_experts, first = 4 if config == "one by one" else 21, 7, 3
    x, experts, *_ = make_layer(tokens, 32, num_experts, 20, 2, torch.float32, False)
    experts = in_fp8(experts) if form == "fp8" else experts
    whole, ids = fused_moe(x, experts, None, None, WAYS[config])
    parts = []
    for begin, end in ((0, first), (first, num_experts)):
        own = {name: getattr(experts, name)[begin:end] for name in ("w13", "w2")}
        own |= {name: scale[begin:end] for name in ("w13_scale", "w2_scale")
                if (scale := getattr(experts, name)) is not None}  # fmt: skip
        held = replace(experts, place=(begin, num_experts), **own)
        out, same = fused_moe(x, held, None, None, WAYS[config])
        assert torch.equal(same, ids), "each rank says what all chose"
        expected = fused_moe_reference(x, held, None, None, WAYS[config])[0]
        assert (out - expected).norm() <= (2e-2 if form == "fp8" else 2e-6) * whole.norm()
        nothing = ((ids < begin) | (ids >= end)).all(dim=1)
        assert not out[nothing].any()
        is_token = torch.arange(tokens + 2) % 3 > 0  # of more rows than there are
        masked, same = fused_moe(x, replace(held, is_token=is_token), None, None, WAYS[config])
        assert torch.equal(same, ids)
        is_token = is_token[:tokens]
        assert torch.equal(masked[is_token], out[is_token])
        assert not masked[~is_token].any()
        reference = fused_moe_reference(x, replace(held, is_token=is_token), None, None, WAYS[config])[0]
        assert not reference[~is_token].any()
        assert (masked - reference).norm() <= (2e-2 if form == "fp8" else 2e-6) * whole.norm()
        parts.append(out)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def some_of(weights, begin, end, num_experts):
    """The adapters of some experts."""
    a, b = (one.unflatten(1, (num_experts, -1))[:, begin:end].flatten(1, 2) for one in weights[:2])
    return weights._replace(a=a, b=b)


@pytest.mark.parametrize("form", ["plain", "swapped", "input", "fp8", "int4 zeros"])
def test_adapters_of_experts(form):
    """Tokens with different ones or none, also where ranks hold some of the experts."""
    dtype, tokens = (torch.float16 if form == "int4 zeros" else torch.float32), random.choice((1, 6))
    config = {"swapped": SWAPPED, "int4 zeros": SORTED}.get(form, MANY)
    options = {"scales_input": form == "input"}
    size = (64, 3, 48, 2) if form == "int4 zeros" else (40, 5, 20, 2)
    x, experts, shared, _ = make_layer(tokens, *size, dtype, True, **options)
    experts, wide = tiled(experts, form) if form == "int4 zeros" else (experts, experts)
    experts = wide = in_fp8(experts) if form == "fp8" else experts
    adapters = made_up_expert_adapters(Inputs(dtype, x.device, random.randrange(999)), tokens, experts, 16)
    out, ids = fused_moe(x, experts, shared, None, config, adapters)
    expected, expected_ids = fused_moe_reference(x, wide, shared, None, config, adapters)
    same = (ids == expected_ids).all(dim=1)
    # now and then one value that is rounded to fp8 comes to lie one step away; else there are three times the sums
    bound = 2e-2 if form == "fp8" else 8 * TOLERANCE[dtype]
    assert (out - expected)[same].norm() <= bound * expected.norm()
    plain = fused_moe(x, experts, shared, None, config)[0]
    without = adapters.slots < 0
    assert torch.equal(out[without], plain[without])
    if form == "plain":
        parts = []
        for begin, end in ((0, 2), (2, 5)):
            own = {name: value[begin:end] for name, value in vars(experts).items() if name.startswith(("w13", "w2"))
                   and isinstance(value, torch.Tensor)}  # fmt: skip
            held = adapters._replace(w13=some_of(adapters.w13, begin, end, 5), w2=some_of(adapters.w2, begin, end, 5))
            parts.append(fused_moe(x, replace(experts, place=(begin, 5), **own), None, None, config, held)[0])
        alone = fused_moe(x, experts, None, None, config, adapters)[0]
        assert (parts[0] + parts[1] - alone).norm() <= TOLERANCE[dtype] * alone.norm()


def test_of_large_logits_the_larger_is_chosen_though_their_sigmoids_are_one():
    logits = torch.tensor([[20.0, 30.0, 40.0, -3.0], [-200.0, -150.0, -120.0, -130.0]])
    for found in (route, route_reference):
        routing = found(logits, 2, False, 0, Scoring(True))
        assert routing.ids.tolist() == [[2, 1], [2, 3]]
        torch.testing.assert_close(routing.weights, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
def test_a_router_with_a_norm_of_its_own_and_factors_and_another_activation(config):
    """As in Gemma 4; none may be left out."""
    own = {"router_norm": torch.rand(48) + 0.5, "scoring": Scoring(factors=torch.rand(5) + 0.5)}
    run(4, 48, 5, 20, 3, config, activation="gelu_tanh", **own)
    x, experts, *_ = make_layer(4, 48, 5, 20, 3, torch.float32, False, activation="gelu_tanh", **own)
    out = fused_moe_reference(x, experts)[0]
    for usual in ({"router_norm": None}, {"scoring": moe.SOFTMAX}, {"activation": "silu"}):
        other = fused_moe_reference(x, replace(experts, **usual))[0]
        assert (other - out).norm() > 0.01 * out.norm()


@sampled(("dtype", "config"), [torch.float16, torch.bfloat16], WAYS)
def test_half_precision(dtype, config):
    run(4, 64, 6, 32, 2, WAYS[config], dtype, has_shared=True)


def in_fp8(experts):
    """The same with both weights in fp8, a scale an output; outputs differ in size."""
    changed = {}
    for name in ("w13", "w2"):
        weight = getattr(experts, name)
        sizes = torch.rand(weight.shape[:2]) * 2 + 0.1
        rows = (weight.float() * sizes[..., None]).flatten(0, 1)
        values, scales, *_ = quantize_per_token_reference(rows, torch.float8_e4m3fn)
        changed[name], changed[f"{name}_scale"] = values.view(weight.shape), scales.view(weight.shape[:2])
    return replace(experts, **changed)


@sampled(
    ("config", "size", "has_shared", "dtype"),
    WAYS,
    [(1, 32, 8, 32, 2), (3, 48, 5, 20, 3), (21, 33, 3, 17, 2), (37, 16, 4, 16, 1)],
    [False, True],
    [torch.float32, torch.bfloat16],
)
def test_weights_in_fp8(config, size, has_shared, dtype):
    """Tiles round what comes in, with scales of tokens or given ones; a token by itself does not: so it is with the
    reference."""
    num_tokens, *rest = size
    if config == "one by one":
        num_tokens = min(num_tokens, 4)
    config = WAYS[config]
    x, plain, shared, residual = make_layer(num_tokens, *rest, dtype, has_shared)
    experts = in_fp8(plain)
    if dtype == torch.float32 and random.random() < 0.5:  # large numbers are cut off
        given = [Rounding(torch.float8_e4m3fn, given=torch.tensor([scale, 0.0])) for scale in (0.004, 0.01)]
        experts = replace(experts, w13_rounding=given[0], w2_rounding=given[1])
    expected, expected_ids = fused_moe_reference(x, experts, shared, residual.clone(), config)
    out, ids = fused_moe(x, experts, shared, residual.clone(), config)
    same = (ids == expected_ids).all(dim=1)
    assert same.float().mean() >= (1.0 if dtype == torch.float32 else 0.4)
    error = (out[same].double() - expected[same].double()).norm() / expected[same].double().norm()
    rounds = config.block_m > 1  # now and then one value of a row comes to lie one step away
    assert error <= TOLERANCE[dtype] + 2e-2 * rounds
    exact = fused_moe_reference(x, experts, shared, residual.clone(), FEW)[0]
    assert torch.equal(exact, expected) != rounds


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_the_tables_choice_in_fp8(num_tokens):
    x, experts, _, _ = make_layer(num_tokens, 64, 4, 32, 2, torch.float32, False)
    experts = in_fp8(experts)
    config = moe.pick_moe_config(num_tokens, 2, 4, "fp8", moe.DEVICE_FAMILY)
    out, expected = fused_moe(x, experts)[0], fused_moe_reference(x, experts, None, None, config)[0]
    assert (out - expected).norm() <= (2e-2 if num_tokens > 2 else 1e-5) * expected.norm()


def with_biases(experts, dtype=torch.float32):
    """The same with biases, and gated as gpt-oss gates; most gates and ups are beyond the limit now and then."""
    num_experts, rows, hidden = *experts.w13.shape[:2], experts.w13.shape[2]
    biases = {"router_bias": torch.randn(num_experts).to(dtype), "w13_bias": torch.randn(num_experts, rows).to(dtype),
              "w2_bias": torch.randn(num_experts, hidden).to(dtype)}  # fmt: skip
    return replace(experts, clamp=SwigluClamp(1.702, 0.8), **biases)


def tiled(experts, kind):
    """The same with other weights, tiled, and what they are widened to."""
    held = {name: random_coded(*getattr(experts, name).shape, **OF_EXPERTS[kind]) for name in ("w13", "w2")}
    wide = {name: weight.dequantize(torch.float32) for name, weight in held.items()}
    own = {name: tile(weight, experts.router.dtype, gated=name == "w13") for name, weight in held.items()}
    return replace(experts, **own), replace(in_float32(experts), **wide)


@pytest.mark.parametrize("kind", OF_EXPERTS)
def test_tiled_weights(kind):
    """They give what widened weights give, also where blocks and tiles end beyond the weight, where programs share an
    output's inputs, and whether pairs are sorted or each is by itself."""
    ways = (
        (ALONE, (1, 160, 4, 40, 3), torch.bfloat16), (ALONE_WIDE, (1, 136, 4, 36, 3), torch.float16),
        (SORTED, (5, 96, 3, 144, 1), torch.float16),
    )  # fmt: skip
    config, (num_tokens, *rest), dtype = random.choice(ways)
    biased = random.random() < 0.5
    x, experts, shared, residual = make_layer(num_tokens, *rest, dtype, not biased)
    experts = replace(experts, activation=random.choice(("silu", "gelu_tanh")))  # of no account to a clamp
    experts, wide = tiled(with_biases(experts, dtype) if biased else experts, kind)
    plain = [None if tensor is None else tensor.float() for tensor in (x, shared, residual)]
    expected, expected_ids = fused_moe_reference(plain[0], wide, *plain[1:])
    out, ids = fused_moe(x, experts, shared, residual, config)
    assert out is residual
    assert not experts.w13.arrived.any()
    same = (ids == expected_ids).all(dim=1)
    error = (out[same].double() - expected[same].double()).norm()
    assert error <= TOLERANCE[dtype] * expected[same].double().norm(), (config, dtype, experts.clamp)


def test_tiled_weights_of_an_expert_that_all_tokens_or_none_choose():
    """It is the last, whose steps end beyond the weight."""
    x, experts, _, _ = make_layer(19, 64, 3, 32, 1, torch.float16, False)
    bias = torch.tensor([-9.0, -99.0, 99.0]).half()
    experts, wide = tiled(replace(experts, router_bias=bias), "nvfp4")
    out, ids = fused_moe(x, experts, config=SORTED)
    assert (ids == 2).all()
    torch.testing.assert_close(out.float(), fused_moe_reference(x.float(), wide)[0], rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("config", [ALONE, SORTED], ids=["alone", "sorted"])
def test_tiled_weights_leave_the_next_norm_half_done(config):
    x, experts, shared, residual = make_layer(2, 96, 3, 40, 2, torch.bfloat16, True)
    experts, _ = tiled(replace(experts, next_norm=(torch.rand(96) + 0.5).bfloat16()), "mxfp4")
    plain = fused_moe(x, replace(experts, next_norm=None), shared, residual.clone(), config)[0]
    half = fused_moe(x, experts, shared, residual, config)[0]
    assert half.x is residual
    assert torch.equal(half.x, plain)
    expected = half_norm_reference(plain, experts.next_norm)
    assert torch.equal(half.scaled, expected.scaled)
    torch.testing.assert_close(half.squares.sum(1), expected.squares.sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17])
def test_the_tables_choice_and_a_strided_input(num_tokens):
    run(num_tokens, 32, 6, 16, 2, None)
    x, experts, _, _ = make_layer(num_tokens, 32, 4, 16, 2, torch.float32, False)
    wide = torch.cat((x, x), dim=1)[:, :32]
    out, expected = fused_moe(wide, experts)[0], fused_moe_reference(x, experts)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["one by one", "tiles"])
def test_the_residual_may_be_the_input(config):
    x, experts, _, _ = make_layer(3, 32, 4, 16, 2, torch.float32, False)
    expected = x + fused_moe_reference(x, experts)[0]
    assert fused_moe(x, experts, None, x, config)[0] is x
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [FEW, MANY], ids=["one by one", "tiles"])
def test_what_comes_in_may_be_normed_already(config):
    x, experts, shared, _ = make_layer(3, 32, 4, 16, 2, torch.float32, True)
    experts = replace(experts, norm_weight=None)
    expected = fused_moe_reference(x, experts, shared)[0]
    torch.testing.assert_close(fused_moe(x, experts, shared, None, config)[0], expected, rtol=1e-5, atol=1e-5)


@sampled(("config", "dtype"), ["one by one", "tiles"], [torch.float32, torch.bfloat16])
def test_the_next_norm_is_left_half_done(config, dtype):
    config = WAYS[config]
    x, experts, shared, residual = make_layer(3, 300, 4, 16, 2, dtype, True)
    experts = replace(experts, next_norm=(torch.rand(300) + 0.5).to(dtype))
    assert not isinstance(fused_moe(x, experts, shared, None, config)[0], HalfNormed)
    plain = fused_moe(x, replace(experts, next_norm=None), shared, residual.clone(), config)[0]
    half = fused_moe(x, experts, shared, residual, config)[0]
    assert half.x is residual
    assert torch.equal(half.x, plain)
    assert half.squares.shape[1] > 1  # parts of a row
    expected = half_norm_reference(plain, experts.next_norm)
    assert torch.equal(half.scaled, expected.scaled)
    torch.testing.assert_close(half.squares.sum(1), expected.squares.sum(1), rtol=1e-5, atol=0)
    known = fused_moe_reference(x, experts, shared, plain.clone(), config)[0]
    assert isinstance(known, HalfNormed)


def test_only_few_tokens_have_a_linear_that_finishes_norms(monkeypatch):
    monkeypatch.setattr(moe, "HALF_NORMED_TOKENS", 4)
    x, experts, _, _ = make_layer(5, 32, 4, 16, 2, torch.float32, False, next_norm=torch.ones(32))
    for run in (fused_moe, fused_moe_reference):
        assert isinstance(run(x[:4], experts, None, x[:4].clone())[0], HalfNormed)
        assert not isinstance(run(x, experts, None, x.clone())[0], HalfNormed)


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_token_gets_the_same_whoever_else_is_there(top_k):
    x, experts, shared, _ = make_layer(40, 32, 5, 16, top_k, torch.float32, True, renormalize=False, invariant=True)
    together = fused_moe(x, experts, shared)[0]
    for some in (slice(4, 5), slice(2, 21)):
        assert torch.equal(together[some], fused_moe(x[some], experts, shared[some])[0])
    torch.testing.assert_close(together, fused_moe_reference(x, experts, shared)[0], rtol=1e-4, atol=1e-5)


def test_no_tokens():
    x, experts, _, residual = make_layer(0, 32, 4, 16, 2, torch.float32, False)
    out, ids = fused_moe(x, experts)
    assert out.shape == (0, 32)
    assert ids.shape == (0, 2)
    assert fused_moe(x, experts, None, residual)[0] is residual


def test_grids_hold_more_tokens_than_their_second_dimension(monkeypatch):
    """65535 is the most that a GPU takes there; a step may have more tokens."""
    grids = []

    class Launches:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    for name in ("tiles_kernel", "sum_kernel"):
        monkeypatch.setattr(moe, name, Launches())
    num_tokens, one = 70_000, torch.zeros(1)
    x = one.expand(num_tokens, 16)
    experts = Experts(one, 1e-6, one, one.expand(4, 32, 16), one.expand(4, 16, 16), 2, True)
    tiles = torch.zeros(3, max_tiles(2 * num_tokens, 4, 16), dtype=torch.int32)
    routing = moe_route.Routing(one, one, one, tiles)
    moe._by_tiles(x, x, one.expand(2 * num_tokens, 16), experts, routing, (None, None, None, 0), MANY)
    assert len(grids) == 3
    assert all(size <= 65535 for grid in grids for size in grid[1:])
    assert grids[-1] == (num_tokens,)
