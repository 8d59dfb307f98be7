"""Linears whose weights a checkpoint holds in 8 bits: beside the same arithmetic done in plain tensors, whole or as a
rank holds them, fused or not, with scales of any shape."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.cases import Inputs, narrow_linear
from headrace.kernels.fp8 import NarrowWeight, Quantized, Rounding, quantize_per_token_reference
from headrace.kernels.gemm import skinny_linear_reference
from headrace.kernels.gemm_config import BUCKETS, GemmConfig
from headrace.kernels.narrow import narrow_linear_reference
from headrace.layers.linear import Linear, MergedColumnParallelLinear, RowParallelLinear, row_spec
from headrace.quantization import gpu_linear
from headrace.quantization.formats import FORMATS
from headrace.quantization.fp8 import RoundingProduct, stored
from headrace.quantization.scheme import Scheme

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.seed() % 2**31)


def fp8_scheme(scale: str, activations: str, block: tuple[int, int] = (128, 128)) -> Scheme:
    name = "weight_scale_inv" if scale == "block" else "weight_scale"
    return stored(FORMATS["fp8"], "fp8", scale, name, activations, block=block)


def int8_scheme(scale: str, activations: str, symmetric: bool = True) -> Scheme:
    return stored(FORMATS["int8"], "int8", scale, activations=activations, symmetric=symmetric)


@dataclass
class Part:
    """One linear of a checkpoint, and what its weight stands for."""

    tensors: dict[str, Tensor]
    weight: Tensor


def fp8_part(generator: torch.Generator, shape: tuple[int, int], scale: Tensor) -> Part:
    codes = torch.randn(shape, generator=generator).mul_(100).clamp_(-448, 448).to(E4M3)
    return Part({"weight": codes, "weight_scale": scale}, codes.float() * scale.reshape(-1, 1))


def block_part(generator: torch.Generator, shape: tuple[int, int], block: tuple[int, int]) -> Part:
    codes = torch.randn(shape, generator=generator).mul_(100).clamp_(-448, 448).to(E4M3)
    scale = torch.rand([-(-size // step) for size, step in zip(shape, block, strict=True)], generator=generator) * 0.01
    wide = scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    return Part({"weight": codes, "weight_scale_inv": scale}, codes.float() * wide)


def int8_part(generator: torch.Generator, shape: tuple[int, int], scale: Tensor) -> Part:
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return Part({"weight": codes, "weight_scale": scale}, codes.float() * scale.reshape(-1, 1))


def made(layer: Linear, scheme: Scheme, parts: dict[str, Part], emulates: bool = True) -> Linear:
    """`layer` filled from whole tensors, as the loader does; not `emulates`: as on a GPU, with the kernels'
    references."""
    layer.scheme = scheme
    scheme.product.prepare([layer.spec], CPU)
    scheme.product.emulates = emulates  # type: ignore[attr-defined]
    layer.create_weights(CPU)
    for path, slot in layer.slots("x.y").items():
        name, tensor = path.removeprefix("x.").split(".")
        if slot.destination is not None and (not slot.optional or tensor in parts[name].tensors):
            values = parts[name].tensors[tensor]
            assert tuple(values.shape) == slot.shape or tuple(values.shape) in slot.shapes
            slot.put(values[slot.slices(tuple(values.shape))].to(slot.dtype or values.dtype))
    layer.finalize()
    return layer


def rounded(x: Tensor, group: int = 0) -> Tensor:
    """x in e4m3 and back, with a scale for each `group` columns."""
    parts = x.split(group or x.shape[1], 1)
    return torch.cat([quantize_per_token_reference(part, E4M3).dequantize(torch.float32) for part in parts], 1)


def close(found: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().amax()))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_scale_a_tensor_of_each_part_of_a_fused_linear(shape: tuple[int, ...], generator: torch.Generator) -> None:
    parts = {
        name: fp8_part(generator, (size, 48), torch.rand(shape, generator=generator) + 0.1)
        for name, size in (("a", 40), ("b", 24))
    }
    x = torch.randn(5, 48, generator=generator)
    for rank in (0, 1):
        layer = MergedColumnParallelLinear(48, {"a": 40, "b": 24}, Group(rank, 2), torch.float32, False)
        out = made(layer, fp8_scheme("tensor", "token"), parts)(x)
        mine = torch.cat([part.weight.chunk(2)[rank] for part in parts.values()])
        close(out, rounded(x) @ mine.T)


def test_static_scales_of_parts_give_way_to_the_largest(generator: torch.Generator) -> None:
    parts = {name: fp8_part(generator, (16, 32), torch.tensor([0.3])) for name in "ab"}
    parts["a"].tensors["input_scale"], parts["b"].tensors["input_scale"] = torch.tensor(0.002), torch.tensor([0.005])
    x = torch.randn(50, 32, generator=generator) * 2  # a few numbers beyond 448 * 0.005
    layer = MergedColumnParallelLinear(32, {"a": 16, "b": 16}, Group(0, 1), torch.float32, False)
    out = made(layer, fp8_scheme("tensor", "tensor"), parts)(x)
    coarse = (x / 0.005).clamp(-448, 448).to(E4M3).float() * 0.005
    assert float(x.abs().amax()) > 448 * 0.005
    close(out, coarse @ torch.cat([part.weight for part in parts.values()]).T)


def fixed(x: Tensor, scale: float, zero: float | None = None) -> Tensor:
    """x in int8 with this scale and zero point, or in e4m3 with this scale, and back."""
    if zero is None:
        return (x / scale).clamp(-448, 448).to(E4M3).float() * scale
    return (((x / scale).round() + zero).clamp(-128, 127) - zero) * scale


def by_token(x: Tensor) -> Tensor:
    """x in int8 and back, but for the largest number, which is between two integers."""
    step = x.abs().amax(1, keepdim=True) / 127.5
    return (x / step).clamp(-128, 127).round() * step


def by_token_with_zero_point(x: Tensor) -> Tensor:
    """x in int8 and back, where the smallest number of each token, or 0, is -128."""
    low, high = x.amin(1, keepdim=True).clamp(max=0.0), x.amax(1, keepdim=True).clamp(min=0.0)
    step = (high - low) / 255
    zero = (-128 - low / step).round()
    return ((x / step + zero).round().clamp(-128, 127) - zero) * step


ARITHMETIC: dict[str, tuple[Scheme, dict[str, Tensor], Callable[[Tensor], Tensor], float]] = {
    "fp8, numbers beyond a bound": (
        fp8_scheme("channel", "token"), {"input_scale_ub": torch.tensor(2.0)}, lambda x: rounded(x.clamp(-2.0, 2.0)),
        1e-4,
    ),
    "fp8, weights alone": (fp8_scheme("channel", "none"), {}, lambda x: x, 1e-4),
    "fp8, static, in transformers' words": (
        stored(FORMATS["fp8"], "fp8", "tensor", "weight_scale_inv", "tensor"),
        {"activation_scale": torch.tensor(0.02)}, lambda x: fixed(x, 0.02), 1e-4,
    ),
    "int8, static": (
        int8_scheme("channel", "tensor"), {"input_scale": torch.tensor([0.02])}, lambda x: fixed(x, 0.02, 0.0), 0.003,
    ),
    "int8, static, with zero points": (
        int8_scheme("channel", "tensor", False),
        {"input_scale": torch.tensor([0.02]), "input_zero_point": torch.tensor([-40], dtype=torch.int8)},
        lambda x: fixed(x, 0.02, -40.0), 0.003,  # of 200 draws one rounds a tie the other way: 0.0005
    ),
    "int8, a scale a token": (int8_scheme("channel", "token"), {}, by_token, 0.005),
    "int8, a scale a token beside one a weight": (int8_scheme("tensor", "token"), {}, by_token, 0.005),
    "int8, a scale and a zero point a token": (
        int8_scheme("tensor", "token", False), {}, by_token_with_zero_point, 0.005,
    ),
}  # fmt: skip
"""a scheme, tensors beside the weight, what becomes of activations, how close the product is"""


@pytest.mark.parametrize("name", ARITHMETIC)
def test_activations_are_rounded_as_the_checkpoint_says(name: str, generator: torch.Generator) -> None:
    scheme, tensors, rounding, bound = ARITHMETIC[name]
    layout: Any = scheme.layout
    scale = torch.rand(() if layout.scale == "tensor" else (30, 1), generator=generator) * 0.01 + 1e-3
    part = (int8_part if name.startswith("int8") else fp8_part)(generator, (30, 70), scale)
    part.tensors |= tensors | {layout.scale_name: scale}
    x = torch.randn(20, 70, generator=generator) + torch.linspace(-1, 1, 20)[:, None]
    out = made(RowParallelLinear(70, 30, Group(0, 1), torch.float32, False), scheme, {"y": part})(x)
    wanted = rounding(x) @ part.weight.T
    assert float((out - wanted).norm() / wanted.norm()) < bound


@pytest.mark.parametrize("block", [(128, 128), (16, 32)], ids=str)
def test_blocks_that_parts_and_ranks_cut_anywhere(block: tuple[int, int], generator: torch.Generator) -> None:
    """Parts have rows of blocks of their own; a rank's rows begin within one; the last blocks are smaller."""
    sizes = {"a": 300, "b": 28}
    parts = {name: block_part(generator, (size, 200), block) for name, size in sizes.items()}
    x = torch.randn(3, 200, generator=generator)
    for rank in (0, 1):
        layer = MergedColumnParallelLinear(200, sizes, Group(rank, 2), torch.float32, False)
        out = made(layer, fp8_scheme("block", "block", block), parts)(x)
        mine = torch.cat([part.weight.chunk(2)[rank] for part in parts.values()])
        close(out, rounded(x, block[1]) @ mine.T)


def on_ranks(count: int, work: Callable[[Group], Tensor]) -> list[Tensor]:
    """What each of the ranks computes; they are threads, which gather one tensor after the other."""
    barrier, given = threading.Barrier(count, timeout=60), [torch.empty(0)] * count

    def gather(rank: int, mine: Tensor) -> Tensor:
        given[rank] = mine
        barrier.wait()
        gathered = torch.cat(given, -1)
        barrier.wait()
        return gathered

    with ThreadPoolExecutor(count) as pool:
        groups = [Group(rank, count, all_gather=partial(gather, rank)) for rank in range(count)]
        return list(pool.map(work, groups))


RANKS: dict[str, tuple[Scheme, Callable[[torch.Generator], Part]]] = {
    "fp8, a scale a token": (
        fp8_scheme("channel", "token"),
        lambda generator: fp8_part(generator, (40, 600), torch.rand(40, 1, generator=generator) + 0.1),
    ),
    "fp8, bounded": (
        stored(FORMATS["fp8"], "fp8", "channel", bound=1.5),
        lambda generator: fp8_part(generator, (40, 600), torch.ones(40)),
    ),
    "blocks that ranks cut": (
        fp8_scheme("block", "block"), lambda generator: block_part(generator, (40, 600), (128, 128)),
    ),
    "blocks that ranks do not cut": (
        fp8_scheme("block", "block", (8, 8)), lambda generator: block_part(generator, (40, 600), (8, 8)),
    ),
    "int8": (
        int8_scheme("channel", "token"), lambda generator: int8_part(generator, (40, 600), torch.full((40,), 0.01)),
    ),
    "int8 with zero points": (
        int8_scheme("channel", "token", False),
        lambda generator: int8_part(generator, (40, 600), torch.full((40, 1), 0.01)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RANKS)
def test_ranks_round_activations_as_one_alone_does(kind: str, generator: torch.Generator) -> None:
    """With the scales of whole rows, wherever ranks cut them: in float32 they compute what one does."""
    scheme, make = RANKS[kind]
    part = make(generator)
    part.tensors["bias"] = torch.randn(40, generator=generator)
    x = torch.randn(5, 600, generator=generator) * torch.logspace(-1, 1, 600)  # the last rank has the largest ones

    def computed(group: Group) -> Tensor:
        layer = made(RowParallelLinear(600, 40, group, torch.float32, True), scheme, {"y": part})
        found: Tensor = layer.compute(x[:, layer.spec.parts[0].columns], None)
        return found

    alone = computed(Group())
    for count in (2, 3):
        torch.testing.assert_close(
            sum(on_ranks(count, computed)), alone, rtol=1e-5, atol=1e-5 * float(alone.abs().amax())
        )
    assert float((alone - part.tensors["bias"] - x @ part.weight.T).norm()) > 0


def test_zero_points_of_parts_give_way_to_a_range_that_holds_both(generator: torch.Generator) -> None:
    parts = {name: int8_part(generator, (16, 32), torch.tensor(0.01)) for name in "ab"}
    for name, scale, zero in (("a", 0.01, -128), ("b", 0.02, 0)):  # 0 to 2.55, and -2.56 to 2.54
        parts[name].tensors |= {"input_scale": torch.tensor(scale), "input_zero_point": torch.tensor([zero])}
    layer = MergedColumnParallelLinear(32, {"a": 16, "b": 16}, Group(0, 1), torch.float32, False)
    x = torch.rand(50, 32, generator=generator) * 5.1 - 2.55
    out = made(layer, int8_scheme("tensor", "tensor", False), parts)(x)
    exact = x @ torch.cat([part.weight for part in parts.values()]).T
    assert float((out - exact).norm() / exact.norm()) < 0.006


def test_parts_with_one_range_keep_it_to_the_bit(generator: torch.Generator) -> None:
    """A scale that is computed once more rounds numbers half-way between two integers otherwise."""
    layer = MergedColumnParallelLinear(32, {"a": 16, "b": 16}, Group(0, 1), torch.float32, False)
    layout: Any = int8_scheme("tensor", "tensor", False).layout
    weights = layout.create_weights(layer.spec, CPU)
    for scale in torch.rand(50, generator=generator):
        weights["input_scale"].fill_(scale)
        weights["input_zero_point"].fill_(10)
        assert torch.equal(layout.rounding(layer.spec, weights).given, torch.stack((scale, torch.tensor(10.0))))


@pytest.mark.parametrize("scale", [0.0, -0.01])
def test_a_static_scale_that_is_not_positive_is_refused(scale: float, generator: torch.Generator) -> None:
    part = fp8_part(generator, (16, 32), torch.tensor([0.3]))
    part.tensors["input_scale"] = torch.tensor(scale)
    layer = RowParallelLinear(32, 16, Group(0, 1), torch.float32, False)
    with pytest.raises(CheckpointError, match=f"^input_scale is {scale:g}; accepted: a positive number"):
        made(layer, fp8_scheme("tensor", "tensor"), {"y": part})


@pytest.mark.parametrize("kind", ["blocks", "int8", "int8 uneven", "odd sizes"])
def test_what_a_gpu_holds_gives_what_a_cpu_emulates(kind: str, generator: torch.Generator) -> None:
    """Weights stay in 8 bits there, and a kernel that errs is seen."""
    shape, scale = (30, 140), torch.rand(30, 1, generator=generator) * 0.01
    x, found = torch.randn(5, 140, generator=generator) + 0.2, []
    for emulates in (True, False):
        generator.manual_seed(3)
        if kind == "blocks":
            scheme, part = fp8_scheme("block", "block", (16, 64)), block_part(generator, shape, (16, 64))
        elif kind == "odd sizes":
            scheme, part = fp8_scheme("channel", "token"), fp8_part(generator, shape, scale)
        else:
            scheme, part = int8_scheme("channel", "token", kind == "int8"), int8_part(generator, shape, scale)
        layer = RowParallelLinear(140, 30, Group(0, 1), torch.float32, False)
        product = scheme.product
        assert isinstance(product, RoundingProduct)
        made(layer, scheme, {"y": part}, emulates)
        found.append(layer(x))
        if not emulates:
            layer.create_weights(CPU)
            weight = product.narrow_weight(layer.spec, layer.weights)
            assert weight.values.itemsize == 1
    close(found[1], found[0])


@pytest.mark.parametrize("kind", ["static", "blocks", "int8 uneven"])
def test_our_kernels_round_all_but_a_token_alone(
    kind: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is multiplied by ordinary arithmetic, which takes it as it is; more are given to the matrix units."""
    monkeypatch.setattr(gpu_linear, "skinny_linear", skinny_linear_reference)
    plan = gpu_linear.table_of((GemmConfig(1, 1, 1, 1), *(GemmConfig(bucket, 1, 1, 1) for bucket in BUCKETS[1:])))
    if kind == "blocks":
        scheme, part = fp8_scheme("block", "block", (16, 64)), block_part(generator, (30, 140), (16, 64))
    elif kind == "static":
        scheme, part = fp8_scheme("tensor", "tensor"), fp8_part(generator, (30, 140), torch.tensor(0.01))
        part.tensors["input_scale"] = torch.tensor(0.004)
    else:
        scheme, part = int8_scheme("channel", "token", False), int8_part(generator, (30, 140), torch.rand(30))
    x = torch.randn(5, 140, generator=generator)
    emulated = made(RowParallelLinear(140, 30, Group(0, 1), torch.float32, False), scheme, {"y": part})(x)
    layer, product = RowParallelLinear(140, 30, Group(0, 1), torch.float32, False), scheme.product
    assert isinstance(product, RoundingProduct)
    product.tables = {gpu_linear.size_of(layer.spec, product.planned_rounding(layer.spec)): plan}
    made(layer, scheme, {"y": part}, emulates=False)
    close(layer(x), emulated)
    close(layer(x[:1]), x[:1] @ part.weight.T)
    assert float((emulated[:1] - x[:1] @ part.weight.T).norm() / emulated[:1].norm()) > 1e-3


def test_a_kernel_that_errs_is_seen(generator: torch.Generator) -> None:
    part = block_part(generator, (48, 160), (16, 64))
    weight = NarrowWeight(part.tensors["weight"], part.tensors["weight_scale_inv"], 16, 64)
    make = Inputs(torch.float32, CPU)
    for case in narrow_linear(make, 9, weight, Rounding(E4M3, 64), None):
        assert case.error(narrow_linear_reference, narrow_linear_reference) <= case.bound

        def wrong(*arguments: Any) -> Tensor:
            return narrow_linear_reference(*arguments) * 1.01

        assert case.error(wrong, narrow_linear_reference) > case.bound


def test_nan_and_infinity_do_not_become_numbers(generator: torch.Generator) -> None:
    for scheme, part in (
        (fp8_scheme("tensor", "token"), fp8_part(generator, (16, 32), torch.tensor(1.0))),
        (int8_scheme("tensor", "token"), int8_part(generator, (16, 32), torch.tensor(1.0))),
    ):
        layer = made(RowParallelLinear(32, 16, Group(0, 1), torch.float32, False), scheme, {"y": part})
        x = torch.randn(3, 32, generator=generator)
        x[0, 3], x[1, 5] = float("nan"), float("inf")
        finite = layer(x).isfinite().all(1)
        assert finite.tolist() == [False, False, True]


def test_experts_have_scales_an_output_or_are_widened(generator: torch.Generator) -> None:
    layer = RowParallelLinear(70, 30, Group(0, 1), torch.float32, False)
    for scheme, narrow in ((fp8_scheme("tensor", "tensor"), True), (fp8_scheme("block", "block"), False)):
        scheme.product.prepare([], CPU)
        weights = scheme.layout.create_weights(layer.spec, CPU, (3,))
        wanted = []
        for expert in range(3):
            part = block_part(generator, (30, 70), (128, 128))
            part.tensors |= {
                "weight_scale": part.tensors["weight_scale_inv"],
                "input_scale": torch.tensor(0.1 * (expert + 1)),
            }
            one = {name: tensor[expert] for name, tensor in weights.items()}
            for _, name, slot in scheme.layout.slots(layer.spec, one):
                slot.put(part.tensors[name])
            wanted.append(part.weight)
        weight, scales, rounding = scheme.product.experts(layer.spec, weights)
        assert (weight.dtype == E4M3) == narrow
        held = (
            weight if scales is None else Quantized(weight.flatten(0, 1), scales.view(-1, 1)).dequantize(torch.float32)
        )
        assert torch.equal(held.view(3, 30, 70), torch.stack(wanted))
        if narrow:  # of all experts' scales of activations the largest
            assert rounding.given.tolist() == pytest.approx([0.3, 0.0])


def test_experts_in_int8_are_tiled_on_a_gpu(generator: torch.Generator) -> None:
    layer, scheme = RowParallelLinear(70, 30, Group(0, 1), torch.bfloat16, False), int8_scheme("channel", "token")
    scheme.product.prepare([], CPU)
    weights, wanted = scheme.layout.create_weights(layer.spec, CPU, (3,)), []
    for expert in range(3):
        part = int8_part(generator, (30, 70), torch.rand(30, 1, generator=generator))
        weights["weight"][expert] = part.tensors["weight"]
        weights["weight_scale"][expert] = part.tensors["weight_scale"][:, 0]
        wanted.append(part.weight)
    for emulates in (True, False):
        scheme.product.emulates = emulates  # type: ignore[attr-defined]
        held, scales, _ = scheme.product.experts(layer.spec, weights)
        assert scales is None
        wide = held if emulates else held.dequantize(torch.bfloat16)
        assert torch.equal(wide, torch.stack(wanted).bfloat16())


def test_experts_in_blocks_are_tiled_on_a_gpu(generator: torch.Generator) -> None:
    """They stay in 8 bits, also where a rank's rows begin within a block."""
    scheme = fp8_scheme("block", "block", (16, 32))
    scheme.product.prepare([], CPU)
    layer = MergedColumnParallelLinear(70, {"a": 40, "b": 40}, Group(1, 2), torch.bfloat16, False)
    weights, wanted = scheme.layout.create_weights(layer.spec, CPU, (3,)), []
    for expert in range(3):
        parts = {name: block_part(generator, (40, 70), (16, 32)) for name in "ab"}
        one = {name: tensor[expert] for name, tensor in weights.items()}
        for part, name, slot in scheme.layout.slots(layer.spec, one):
            slot.put(parts[str(part.name)].tensors[name][slot.source])
        wanted.append(torch.cat([part.weight[20:] for part in parts.values()]))
    for emulates in (True, False):
        scheme.product.emulates = emulates  # type: ignore[attr-defined]
        held, scales, _ = scheme.product.experts(layer.spec, weights)
        assert scales is None
        assert emulates or (held.gated and held.codes.nbytes == 3 * 64 * 128)
        wide = held.float() if emulates else held.dequantize(torch.float32)
        torch.testing.assert_close(wide, torch.stack(wanted), rtol=2**-8 if emulates else 2**-11, atol=0.0)
    assert scheme.product.notes() == []


def test_zero_points_of_int8_weights_must_be_zero(generator: torch.Generator) -> None:
    part = int8_part(generator, (16, 32), torch.tensor(0.1))
    part.tensors |= {"weight_zero_point": torch.zeros(16, 1, dtype=torch.int8), "input_zero_point": torch.tensor(0)}
    layer, scheme = RowParallelLinear(32, 16, Group(0, 1), torch.float32, False), int8_scheme("tensor", "token")
    made(layer, scheme, {"y": part})
    part.tensors["weight_zero_point"][3] = 7
    with pytest.raises(CheckpointError, match="weight_zero_point of int8 weights is up to 7; accepted: 0, or none"):
        made(layer, scheme, {"y": part})


def test_what_no_such_checkpoint_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks of fp8 weights .* got \[128, 96\]"):
        fp8_scheme("block", "block", (128, 96))


def test_scales_of_blocks_may_be_powers_of_two_in_a_byte(generator: torch.Generator) -> None:
    spec = RowParallelLinear(200, 40, Group(0, 1), torch.float32, False).spec
    layout = fp8_scheme("block", "block").layout
    found = {name: slot for _, name, slot in layout.slots(spec, layout.create_weights(spec, CPU))}
    assert "F8_E8M0" in found["weight_scale_inv"].stored


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_alone_are_widened_in_the_type_of_their_scales(
    kind: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """As compressed-tensors does; beside rounded activations, scales multiply in float32. The file's type counts: these
    numbers all fit bfloat16."""
    scale = (torch.rand(24, 1, generator=generator) + 0.5).bfloat16().to(dtype)
    make, scheme_of = (int8_part, int8_scheme) if kind == "int8" else (fp8_part, fp8_scheme)
    part = make(generator, (24, 40), scale.float())
    part.tensors["weight_scale"] = scale
    for activations in ("none", "token"):
        scheme = scheme_of("channel", activations)
        spec = row_spec("y", 40, 24, Group(0, 1), torch.float32)
        weights = scheme.layout.create_weights(spec, torch.device("cpu"))
        for _, name, slot in scheme.layout.slots(spec, weights):
            if name in part.tensors:
                slot.put(part.tensors[name][slot.source])
        exact = part.weight
        expected = exact.to(dtype).float() if activations == "none" else exact
        assert torch.equal(scheme.layout.dequantize(spec, weights)["weight"], expected)
