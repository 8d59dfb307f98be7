"""Linears in fp8: how far from exact, which are refused, what loading takes; as a CPU emulates it and as a GPU holds it
(there with the kernels' references)."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.config import EngineConfig
from headrace.distributed.mesh import Group
from headrace.errors import ConfigError
from headrace.kernels.fp8 import LARGEST, Quantized, Rounding, quantize_per_token_reference
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from headrace.layers.norm import RMSNorm
from headrace.mixers import Attention
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.quantization import stored
from headrace.quantization.formats import UNQUANTIZED, rounded
from headrace.quantization.scheme import Scheme
from headrace.quantization.table import make_scheme, resolve_format

CPU, ALONE, E4M3 = torch.device("cpu"), Group(0, 1), torch.float8_e4m3fn
per_channel = pytest.mark.parametrize("per_channel", [False, True], ids=["fp8", "ptpc_fp8"])
emulates = pytest.mark.parametrize("emulates", [True, False], ids=["cpu", "as on a gpu"])


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.seed() % 2**31)


def prepared(per_channel: bool, layer: Linear, emulates: bool) -> Scheme:
    scheme = make_scheme(rounded("ptpc_fp8" if per_channel else "fp8"))
    scheme.product.prepare([layer.spec], CPU)
    scheme.product.emulates = emulates  # type: ignore[attr-defined]
    return scheme


def made(layer: Linear, tensors: dict[str, Tensor], per_channel: bool, emulates: bool = True) -> Linear:
    """`layer` filled; `tensors` by the names of parts beside it, and whole even where the layer is a rank's share."""
    layer.scheme = prepared(per_channel, layer, emulates)
    layer.create_weights(CPU)
    for name, slot in layer.slots("x.y").items():
        if slot.destination is not None:
            slot.put(tensors[name.removeprefix("x.")][slot.source])
    layer.finalize()
    return layer


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@per_channel
@emulates
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_of_a_linear(per_channel: bool, emulates: bool, dtype: torch.dtype, generator: torch.Generator) -> None:
    weight = (torch.randn(192, 256, generator=generator) * 0.02).to(dtype)
    bias = torch.randn(192, generator=generator).to(dtype) * 0.1
    x = (torch.randn(17, 256, generator=generator) * torch.rand(17, 1, generator=generator) * 20).to(dtype)
    layer = RowParallelLinear(256, 192, ALONE, dtype, bias=True)
    made(layer, {"y.weight": weight, "y.bias": bias}, per_channel, emulates)
    exact = x.double() @ weight.double().T + bias.double()
    out = layer(x)
    assert out.dtype == dtype
    assert 0.01 < error(out, exact) < 0.045
    residual = torch.randn(17, 192, generator=generator).to(dtype)
    wanted = out.double() + residual.double()
    assert layer.added_to(x, residual) is residual
    assert error(residual, wanted) < 1e-2


def test_scale_an_output_helps_where_outputs_differ_in_size(generator: torch.Generator) -> None:
    sizes = torch.logspace(-7, 0, 64)[:, None]
    weight = torch.randn(64, 128, generator=generator) * sizes
    x, errors = torch.randn(9, 128, generator=generator), {}
    for per_channel in (False, True):
        out = made(RowParallelLinear(128, 64, ALONE, torch.float32, False), {"y.weight": weight}, per_channel)(x)
        exact = x @ weight.T
        errors[per_channel] = float(((out - exact).norm(dim=0) / exact.norm(dim=0)).mean())
    assert errors[True] < 0.045
    assert errors[True] < errors[False] / 2


@pytest.mark.parametrize("per_channel", [False, True], ids=["fp8", "ptpc_fp8"])
def test_what_a_gpu_holds_and_what_a_cpu_emulates_are_one(per_channel: bool, generator: torch.Generator) -> None:
    x = torch.randn(5, 64, generator=generator)
    names, tensors = ("q_proj", "k_proj", "v_proj"), {}
    for factor, (name, size) in enumerate(zip(names, (64, 32, 32), strict=True), 1):
        tensors[f"{name}.weight"] = torch.randn(size, 64, generator=generator) * factor
    layers = [
        made(QKVParallelLinear(Attention(64, 4, 2, 16), ALONE, torch.float32), tensors, per_channel, emulates)
        for emulates in (True, False)
    ]
    # The two scale before and after their sums: terms of size 100 that cancel leave fp32's rounding of the terms.
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    close(layers[0](x), layers[1](x))
    close(layers[0](quantize_per_token_reference(x, E4M3)), layers[0](x))


@per_channel
def test_scales_belong_to_the_parts_of_a_fused_linear(per_channel: bool, generator: torch.Generator) -> None:
    tensors = {f"{name}.weight": torch.randn(32, 48, generator=generator) * size for name, size in (("a", 1), ("b", 9))}
    for rank in (0, 1):
        layer = MergedColumnParallelLinear(48, {"a": 32, "b": 32}, Group(rank, 2), torch.float32, False)
        layer.scheme = prepared(per_channel, layer, emulates=False)
        layer.create_weights(CPU)
        for name, slot in layer.slots("x.y").items():
            slot.put(tensors[name.removeprefix("x.")][slot.source])
        mine = [tensor[16 * rank : 16 * rank + 16] for tensor in tensors.values()]
        largest = torch.cat([part.abs().amax(1) if per_channel else part.abs().amax().expand(16) for part in mine])
        torch.testing.assert_close(layer.weights["weight_scale"], largest / LARGEST[E4M3])
        back = Quantized(layer.weights["weight"], layer.weights["weight_scale"][:, None]).dequantize(torch.float32)
        assert error(back, torch.cat(mine)) < 0.035


@emulates
def test_norm_and_activation_around_a_linear(emulates: bool, generator: torch.Generator) -> None:
    """What goes in is normed, what comes out is gated, and what the next linear asks for is what it gets."""
    norm = RMSNorm(64, 1e-5, REFERENCE_KERNELS, torch.float32)
    norm.create_weights(CPU)
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    activation = partial(REFERENCE_KERNELS.gate_and_mul_quantized, to=Rounding(E4M3))
    layer = MergedColumnParallelLinear(64, {"a": 32, "b": 32}, ALONE, torch.float32, False, activation)
    layer.fuse_norm(norm)
    tensors = {f"{name}.weight": torch.randn(32, 64, generator=generator) * 0.2 for name in "ab"}
    x = torch.randn(96, 64, generator=generator) * 3  # many, so that the mean error hardly varies
    out = made(layer, tensors, True, emulates)(x)
    assert isinstance(out, Quantized)
    normed = x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt() * norm.weight
    gate, up = (normed @ weight.T for weight in tensors.values())
    assert out.shape == (96, 32)
    assert error(out.dequantize(torch.float32), torch.nn.functional.silu(gate) * up) < 0.08


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"), [(100, 64, "100 inputs"), (64, 40, "40 outputs"), (8, 8, "and")]
)
def test_sizes_that_fp8_cannot_take_are_refused(inputs: int, outputs: int, said: str) -> None:
    product = make_scheme(rounded("ptpc_fp8")).product
    assert said in product.refusal(RowParallelLinear(inputs, outputs, ALONE, torch.float32, False).spec)
    assert product.refusal(RowParallelLinear(48, 16, ALONE, torch.float32, False).spec) == ""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside that are still alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                if any(isinstance(one, Tensor) and one.untyped_storage()._cdata == storage._cdata for one in args):
                    continue
                self._add(storage._cdata, storage.nbytes())
                weakref.finalize(tensor, self._remove, storage._cdata, storage.nbytes())
        return out

    def _add(self, key: int, size: int) -> None:
        self.known.add(key)
        self.live += size
        self.most = max(self.most, self.live)

    def _remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


@per_channel
def test_loading_takes_little_beside_what_is_kept(per_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in 16 bits, and a few float32 copies of a part's share: no matter how large or many parts are."""
    monkeypatch.setattr(stored, "AT_ONCE", 4096)
    layer = MergedColumnParallelLinear(256, {"a": 512, "b": 512}, ALONE, torch.bfloat16, False)
    layer.scheme = prepared(per_channel, layer, emulates=False)
    read = {f"{name}.weight": torch.randn(512, 256) for name in "ab"}  # in float32: converted on the way
    with LiveBytes() as counted:
        layer.create_weights(CPU)
        kept = counted.live
        for name, slot in layer.slots("x.y").items():
            slot.put(read[name.removeprefix("x.")])
    assert kept == 1024 * 256 + 4 * 1024
    part, share = 2 * 512 * 256, 4 * 4096
    assert part < counted.most - kept < part + 5 * share
    assert counted.live == kept


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(CONFIG | changes)


def test_names_of_formats() -> None:
    plain = model_config()
    assert resolve_format(plain).default == UNQUANTIZED
    for typed, name in {"fp8": "fp8", "fp8_per_tensor": "fp8", "ptpc_fp8": "ptpc_fp8", "ptpc-fp8": "ptpc_fp8"}.items():
        entry = resolve_format(plain, typed)
        linear = entry.format_for("model.layers.0.mlp.down_proj")
        scale = "channel" if name == "ptpc_fp8" else "tensor"
        assert (linear.format.name, dict(linear.settings)) == (name, {"made_at_load": True, "scale": scale})
        assert entry.format_for("lm_head") == UNQUANTIZED
        config, decisions = decide_before_load(EngineConfig(quantization=typed), plain, "cpu")
        assert config.quantization == name
        assert [one.source for one in decisions if one.field == "quantization"] == ["user"]
    with pytest.raises(ConfigError, match=r"quantization must be one of fp8, .*; got 'fp7'"):
        EngineConfig(quantization="fp7")


def test_a_flag_that_contradicts_the_checkpoint() -> None:
    config = model_config(quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match=r"'fp8' contradicts config\.json.* awq, int4.*no --quantization"):
        decide_before_load(EngineConfig(quantization="fp8"), config, "cpu")


def test_batch_invariance_on_a_gpu_is_refused() -> None:
    config = EngineConfig(quantization="fp8", batch_invariant=True)
    decide_before_load(config, model_config(), "cpu")
    with pytest.raises(ConfigError, match="'fp8' does not go with batch_invariant on a GPU"):
        decide_before_load(config, model_config(), "cuda")
