"""Checkpoints as the formats' own tools write them: linears are widened to the bit as the tools do, on any rank, and
tiny models give the tokens of the widened ones. fixtures/README.md says what made them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.errors import CheckpointError, ConfigError
from headrace.kernels.coded import CodedWeight
from headrace.layers.linear import column_spec, row_spec
from headrace.quantization.formats import FORMATS, linear_format
from headrace.quantization.scheme import LinearSpec, Scheme, Weights
from headrace.quantization.table import make_scheme
from tests.sampled import sampled

FIXTURES = Path(__file__).parent / "fixtures"
CPU, ALONE = torch.device("cpu"), Group(0, 1)


@dataclass(frozen=True)
class Fixture:
    """One linear as a tool wrote it."""

    tool: str
    name: str
    layout: str
    settings: dict[str, Any]
    shape: tuple[int, int]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, and `expected`: the weight that the tool makes of them."""
        return stored(self.tool, self.name)

    @property
    def scheme(self) -> Scheme:
        found: Scheme = make_scheme(linear_format(FORMATS["int4"], self.layout, **self.settings))
        return found


def about(tool: str) -> dict[str, Any]:
    with safe_open(FIXTURES / f"{tool}.safetensors", "pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["about"])
        return found


@cache
def stored(tool: str, name: str) -> dict[str, Tensor]:
    with safe_open(FIXTURES / f"{tool}.safetensors", "pt") as file:
        return {key.split("/")[1]: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118


TOOLS = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
LINEARS = [
    Fixture(tool, name, one["layout"], one["settings"], tuple(one["shape"]))
    for tool in TOOLS
    for name, one in about(tool)["linears"].items()
]


def say(value: Any) -> str:
    return f"{value.tool}-{value.layout}-{value.name}" if isinstance(value, Fixture) else str(value)


each_linear = pytest.mark.parametrize("fixture", LINEARS, ids=say)


def load(fixture: Fixture, spec: LinearSpec, **changed: Tensor) -> Weights:
    """Fill the linear's tensors as models/filling.py does, each part with the same ones."""
    layout, tensors = fixture.scheme.layout, fixture.tensors | changed
    weights = layout.create_weights(spec, CPU)
    slots = list(layout.slots(spec, weights))
    assert tensors.keys() - {name for _, name, _ in slots} == {"expected"}
    for _, name, slot in slots:
        if name not in tensors:
            assert slot.optional, name
            continue
        assert tensors[name].shape in (slot.shape, ()), name
        if slot.destination is not None:
            slot.put(tensors[name][slot.source] if tensors[name].dim() else tensors[name])
    return weights


def alone(fixture: Fixture, dtype: torch.dtype) -> LinearSpec:
    outputs, inputs = fixture.shape
    return row_spec("y", inputs, outputs, ALONE, dtype)


@each_linear
def test_weights_are_the_tools_own_to_the_bit(fixture: Fixture) -> None:
    expected = fixture.tensors["expected"]
    for dtype in {expected.dtype, torch.float32}:
        spec = alone(fixture, dtype)
        plain = fixture.scheme.layout.dequantize(spec, load(fixture, spec))
        assert torch.equal(plain["weight"], expected.to(dtype))


def coded(layout: Any, spec: LinearSpec, weights: Weights) -> Any:
    """What kernels read, or why they cannot."""
    return layout.why_widened(spec, weights) or layout.coded(spec, weights)


@each_linear
def test_kernels_read_the_same_weights(fixture: Fixture) -> None:
    """The packed form, widened without rounding to the type of its scales."""
    spec = alone(fixture, torch.float32)
    packed = coded(fixture.scheme.layout, spec, load(fixture, spec))
    assert isinstance(packed, CodedWeight)
    expected = fixture.tensors["expected"]
    close = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[expected.dtype]
    torch.testing.assert_close(packed.dequantize(torch.float32), expected.float(), rtol=close, atol=0)
    settings, inputs = fixture.settings, fixture.shape[1]
    assert packed.codes.shape[-1] == inputs
    symmetric = packed.values == "e2m1" or settings.get("symmetric", fixture.layout == "modelopt_awq")
    assert (packed.zeros is None) == symmetric
    assert (packed.order is not None) == settings.get("act_order", False)
    if packed.scales.is_floating_point() and packed.values == "integer":
        assert packed.scales.dtype == expected.dtype  # what the checkpoint holds, and no more


@sampled(("fixture", "dtype"), LINEARS, [torch.float32, torch.float16, torch.bfloat16], say=say)
def test_the_type_of_scales_is_the_files(fixture: Fixture, dtype: torch.dtype) -> None:
    """Whatever their values: all of these fit bfloat16."""
    name = "scales" if "scales" in fixture.tensors else "weight_scale"
    given, spec, layout = fixture.tensors[name], alone(fixture, torch.float32), fixture.scheme.layout
    if given.itemsize == 1:  # of MXFP4 and NVFP4
        return
    weights = load(fixture, spec, **{name: given.bfloat16().to(dtype)})
    packed = coded(layout, spec, weights)
    assert packed.scales.dtype == dtype
    exact = packed.dequantize(torch.float32).to(dtype).float()
    factors = weights["smoothing"][0] if "smoothing" in weights else 1
    assert torch.equal(layout.dequantize(spec, weights)["weight"], exact * factors)


@sampled(("fixture", "size"), LINEARS, [2, 4], say=say)
def test_ranks_read_their_slices(fixture: Fixture, size: int) -> None:
    expected = fixture.tensors["expected"].float()
    outputs, inputs = fixture.shape
    for rank in range(size):
        if outputs % size == 0:
            local = outputs // size
            names = [("a", outputs, local, rank), ("b", outputs, local, size - 1 - rank)]  # fused, of several slices
            spec = column_spec(inputs, names, torch.float32)
            plain = fixture.scheme.layout.dequantize(spec, load(fixture, spec))["weight"]
            wanted = torch.cat([expected[part.rows] for part in spec.parts])
            assert torch.equal(plain, wanted)
        group = {"mxfp4": 32, "nvfp4": 16}.get(fixture.layout) or fixture.settings["group_size"]
        if inputs % size:
            continue
        spec = row_spec("y", inputs, outputs, Group(rank, size), torch.float32)
        if group and inputs // size % group and not fixture.settings.get("act_order"):
            with pytest.raises(ConfigError, match=str(group)):
                fixture.scheme.layout.create_weights(spec, CPU)
            continue
        plain = fixture.scheme.layout.dequantize(spec, load(fixture, spec))["weight"]
        assert torch.equal(plain, expected[:, spec.parts[0].columns])


@each_linear
def test_experts_are_packed_together(fixture: Fixture) -> None:
    spec, layout = alone(fixture, torch.float32), fixture.scheme.layout
    weights, one = layout.create_weights(spec, CPU, (3,)), load(fixture, spec)
    for name, tensor in weights.items():
        tensor.copy_(one[name])
    expected = fixture.tensors["expected"].float()
    assert torch.equal(layout.dequantize(spec, weights)["weight"], expected.expand(3, -1, -1))
    packed = coded(layout, spec, weights)
    if fixture.settings.get("act_order"):
        assert packed == "each expert has its inputs in an order of its own"
    else:
        torch.testing.assert_close(packed.dequantize(torch.float32)[2], expected, rtol=2**-7, atol=0)


@each_linear
def test_a_rank_may_hold_no_rows(fixture: Fixture) -> None:
    """Of a small vocabulary's head."""
    outputs, inputs = fixture.shape
    part = replace(alone(fixture, torch.float32).parts[0], rows=slice(outputs, outputs))
    spec = LinearSpec(inputs, 8, (part,), torch.float32)
    weights = load(fixture, spec)
    assert torch.equal(fixture.scheme.layout.dequantize(spec, weights)["weight"], torch.zeros(8, inputs))
    packed = coded(fixture.scheme.layout, spec, weights)
    assert torch.equal(packed.dequantize(torch.float32), torch.zeros(8, inputs))


@each_linear
def test_rows_beyond_the_vocabulary_are_zero(fixture: Fixture) -> None:
    spec = replace(alone(fixture, torch.float32), out_features=fixture.shape[0] + 3)
    weights = load(fixture, spec)
    for wide in (
        fixture.scheme.layout.dequantize(spec, weights)["weight"],
        coded(fixture.scheme.layout, spec, weights).dequantize(torch.float32),
    ):
        assert wide.shape == (fixture.shape[0] + 3, fixture.shape[1])
        assert not wide[-3:].any()


def one_of(layout: str, **settings: Any) -> Fixture:
    found = [one for one in LINEARS if one.layout == layout and settings.items() <= one.settings.items()]
    return found[0]


@pytest.mark.parametrize("layout", ["gptq", "pack_quantized"])
def test_parts_with_inputs_in_different_orders_are_widened(layout: str) -> None:
    fixture = one_of(layout, act_order=True)
    outputs, inputs = fixture.shape
    spec = column_spec(inputs, [("a", outputs, outputs, 0), ("b", outputs, outputs, 0)], torch.float32)
    weights = load(fixture, spec)
    groups = next(name for name in weights if name.startswith("1.") and "g_idx" in name)
    weights[groups] = weights[groups].roll(1)
    packed = coded(fixture.scheme.layout, spec, weights)
    assert packed == "its parts have their inputs in different orders"
    plain = fixture.scheme.layout.dequantize(spec, weights)["weight"]
    assert torch.equal(plain[:outputs], fixture.tensors["expected"].float())
    assert not torch.equal(plain[outputs:], fixture.tensors["expected"].float())


def test_an_order_on_several_ranks_leaves_groups_in_pieces() -> None:
    fixture = one_of("gptq", act_order=True)
    outputs, inputs = fixture.shape
    spec = row_spec("y", inputs, outputs, Group(1, 2), torch.float32)
    packed = coded(fixture.scheme.layout, spec, load(fixture, spec))
    assert packed == "its act-order leaves groups in pieces here"


@pytest.mark.parametrize("layout", ["gptq", "pack_quantized"])
@pytest.mark.parametrize("given", ["neighbours", "unset"])
def test_groups_of_neighbours_need_no_order(layout: str, given: str) -> None:
    """What act-order `static` and `weight` leave: a tensor that names the groups in order, or none."""
    fixture = one_of(layout, act_order=True)
    size, inputs = fixture.settings["group_size"], fixture.shape[1]
    groups = torch.arange(inputs) // size if given == "neighbours" else torch.full((inputs,), -1)
    name = "g_idx" if layout == "gptq" else "weight_g_idx"
    for rank, ranks in ((0, 1), (1, 2)):
        spec = row_spec("y", inputs, fixture.shape[0], Group(rank, ranks), torch.float32)
        packed = coded(fixture.scheme.layout, spec, load(fixture, spec, **{name: groups}))
        if inputs // ranks % size == 0:
            assert packed.order is None
            assert packed.scales.shape[-1] == inputs // ranks // size


def test_experts_without_groups_leave_those_of_others_alone() -> None:
    fixture = one_of("pack_quantized", act_order=True)
    spec, layout = alone(fixture, torch.float32), fixture.scheme.layout
    weights, one = layout.create_weights(spec, CPU, (2,)), load(fixture, spec)
    for name, tensor in weights.items():
        tensor.copy_(one[name])
    weights["0.weight_g_idx"][1] = -1
    neighbours = torch.arange(fixture.shape[1]) // fixture.settings["group_size"]
    other = layout.dequantize(spec, load(fixture, spec, weight_g_idx=neighbours))["weight"]
    assert torch.equal(
        layout.dequantize(spec, weights)["weight"], torch.stack((fixture.tensors["expected"].float(), other))
    )


def test_one_group_for_all_inputs_needs_no_order_on_any_rank() -> None:
    fixture = one_of("gptq", group_size=0, symmetric=True)
    fixture = replace(fixture, settings=fixture.settings | {"group_size": 128})
    spec = row_spec("y", fixture.shape[1], fixture.shape[0], Group(1, 2), torch.float32)
    packed = coded(fixture.scheme.layout, spec, load(fixture, spec))
    assert packed.order is None
    assert packed.group_size == packed.codes.shape[-1] == fixture.shape[1] // 2


def test_groups_that_are_none_of_the_linear_are_refused() -> None:
    fixture = one_of("gptq", act_order=False, bits=4, group_size=32)
    spec = alone(fixture, torch.float32)
    weights = load(fixture, spec, g_idx=torch.full((fixture.shape[1],), 7))
    with pytest.raises(CheckpointError, match=r"g_idx names groups 7 to 7; accepted here: 0 to \d"):
        fixture.scheme.layout.dequantize(spec, weights)


def test_small_groups_are_widened() -> None:
    """Since kernels read more inputs at once."""
    fixture = one_of("pack_quantized", group_size=32, act_order=False)
    scales = fixture.tensors["weight_scale"].repeat_interleave(4, 1)
    fixture = replace(fixture, settings=fixture.settings | {"group_size": 8})
    spec = alone(fixture, torch.float32)
    weights = load(fixture, spec, weight_scale=scales)
    assert torch.equal(fixture.scheme.layout.dequantize(spec, weights)["weight"], fixture.tensors["expected"].float())
    packed = coded(fixture.scheme.layout, spec, weights)
    assert packed == "kernels read 16 inputs at once, and groups are of 8"


def test_bytes_that_hold_more_than_a_code_are_refused() -> None:
    fixture = one_of("int_quantized", bits=4, symmetric=True)
    spec = alone(fixture, torch.float32)
    codes = fixture.tensors["weight"].clone()
    codes[3, 5] = 8
    with pytest.raises(CheckpointError, match=r"^weight holds numbers beyond 4 bits; accepted: -8 to 7$"):
        fixture.scheme.layout.dequantize(spec, load(fixture, spec, weight=codes))


def test_numbers_for_inputs_make_integers_of_several_parts_wide() -> None:
    """One number an input for a whole linear multiplies activations; parts with their own are widened."""
    fixture = one_of("modelopt_awq")
    outputs, inputs = fixture.shape
    spec = column_spec(inputs, [("a", outputs, outputs, 0), ("b", outputs, outputs, 0)], torch.float32)
    weights, factors, expected = load(fixture, spec), torch.rand(2, inputs) + 0.5, fixture.tensors["expected"]
    layout = fixture.scheme.layout
    weights["smoothing"][:] = factors[0]
    assert isinstance(coded(layout, spec, weights), CodedWeight)
    weights["smoothing"][:] = factors
    assert "in each part" in coded(layout, spec, weights)
    wide = layout.dequantize(spec, weights)["weight"]
    assert torch.equal(wide, torch.cat([expected * one for one in factors]))


@pytest.mark.parametrize("rank", [0, 1])
def test_modelopts_bytes_have_a_scale_an_output(rank: int) -> None:
    """As its int8 is exported: scales [out], and what SmoothQuant multiplies inputs by."""
    scheme = make_scheme(linear_format(FORMATS["w8a16"], "modelopt_int8", bits=8, group_size=0))
    codes, scale, factors = torch.randint(-128, 128, (15, 46), dtype=torch.int8), torch.rand(15), torch.rand(46) + 0.5
    spec = row_spec("y", 46, 15, Group(rank, 2), torch.float32)
    weights = scheme.layout.create_weights(spec, CPU)
    given = {"weight": codes, "weight_scale": scale, "pre_quant_scale": factors}
    for _, name, slot in scheme.layout.slots(spec, weights):
        if name != "input_scale":
            assert given[name].shape == slot.shape
            slot.put(given[name][slot.source])
    mine = spec.parts[0].columns
    expected = codes.float() * scale[:, None] * factors
    assert torch.equal(scheme.layout.dequantize(spec, weights)["weight"], expected[:, mine])
    packed = coded(scheme.layout, spec, weights)
    torch.testing.assert_close(packed.dequantize(torch.float32) * factors[mine], expected[:, mine])


def test_a_shape_that_contradicts_itself_and_a_bias_too_many_are_refused() -> None:
    fixture = one_of("pack_quantized")
    with pytest.raises(CheckpointError, match=r"weight_shape is \[1, 2\], config.json asks for"):
        load(fixture, alone(fixture, torch.float32), weight_shape=torch.tensor([1, 2]))
    fixture = one_of("gptq")
    load(fixture, alone(fixture, torch.float32), bias=torch.zeros(fixture.shape[0]))
    with pytest.raises(CheckpointError, match=r"no bias in config\.json"):
        load(fixture, alone(fixture, torch.float32), bias=torch.ones(fixture.shape[0]))
