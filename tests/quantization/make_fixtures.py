"""Makes the fixtures of test_stored_formats.py with the tools that people quantize with, so that no format is held
against our own reading alone.

    pip install --no-deps --target LIB compressed-tensors==0.20.0 loguru  # and so on, each tool in a folder of its own
    PYTHONPATH=LIB python tests/quantization/make_fixtures.py TOOL

TOOL is one of TOOLS, with the version that made what is here:

| TOOL | package | what is used of it |
|---|---|---|
| compressed-tensors | compressed-tensors 0.20.0 | its compressors |
| act-order | compressed-tensors 0.12.2 | its compressor of packed integers, since later ones have no `weight_g_idx` |
| autoawq | autoawq 0.2.7 | WQLinear_GEMM.from_linear, dequantize_gemm |
| auto-gptq | auto-gptq 0.7.1 | QuantLinear.pack; its forward of the unit matrix |
| gptqmodel | gptqmodel 7.7.0, its sdist | pack_original and dequantize_weight, out of their class |
| auto-round | auto-round 0.16.1 | the QuantLinears that its exports of integers and of floats pack with |
| quark | amd-quark 0.13 | Pack_fp4, to_e8m0_uint8 |
| modelopt | nvidia-modelopt 0.47.0 | NVFP4QTensor; pack_int4_in_uint8 of its export, TensorQuantizer |

Each writes `fixtures/TOOL.safetensors`: linears by themselves, and the weights of tiny models whose config.json and
greedy tokens are in the file's metadata. The tokens are those of transformers with the tool's own dequantization of
every weight, in float32.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures"
PROMPTS = [[5], [17, 3, 44], [8, 60, 22, 50, 41, 7, 7, 13, 50, 2, 33]]
NEW_TOKENS = 12
Packed = tuple[dict[str, Tensor], Tensor]
"""a linear's tensors in the checkpoint, and the weight [out, in] that the tool makes of them"""
Pack = Callable[[Tensor], Packed]

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
DENSE = transformers.LlamaConfig(**BASE, architectures=["LlamaForCausalLM"])
UNTIED = transformers.LlamaConfig(**BASE | {"tie_word_embeddings": False}, architectures=["LlamaForCausalLM"])
BIASED = transformers.Qwen2Config(**BASE | {"tie_word_embeddings": False}, architectures=["Qwen2ForCausalLM"])
MOE = transformers.Qwen3MoeConfig(
    **BASE,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
    architectures=["Qwen3MoeForCausalLM"],
)


class Fixtures:
    """Collects what one tool makes."""

    def __init__(self, tool: str) -> None:
        self.tool = tool
        self.tensors: dict[str, Tensor] = {}
        self.linears: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, Any]] = {}

    def linear(self, layout: str, pack: Pack, shape: tuple[int, int], **settings: Any) -> None:
        """Add a linear of `shape` [out, in]; `layout` and `settings` name the scheme that reads it."""
        name = f"linear{len(self.linears)}"
        tensors, expected = pack(torch.randn(shape) * 0.05)
        self.linears[name] = {"layout": layout, "settings": settings, "shape": shape}
        self._add(name, tensors | {"expected": expected})

    def model(
        self, name: str, config: Any, pack: Pack | dict[str, Pack], quantization: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Add a model, whose linears are packed, each by the first whose pattern matches its name, and whose other
        tensors are of `dtype`. Without patterns, all linears but the head are packed."""
        packs = pack if isinstance(pack, dict) else {r".*_proj$": pack}
        torch.manual_seed(len(self.models))
        model = getattr(transformers, config.architectures[0])(config).eval()
        for parameter in model.parameters():
            spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
            parameter.data.add_(torch.randn(parameter.shape), alpha=spread).copy_(parameter.data.to(dtype).float())
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            plain, stored = load_file(f"{folder}/model.safetensors"), {}
            for path, tensor in list(plain.items()):
                owner, _, kind = path.rpartition(".")
                own = next((one for pattern, one in packs.items() if re.match(pattern, owner)), None)
                if own is None or kind != "weight":
                    stored[path] = tensor.to(dtype)
                    continue
                tensors, widened = own(tensor)
                assert widened.shape == tensor.shape
                stored |= {f"{owner}.{one}": value for one, value in tensors.items()}
                plain[path] = widened.float().contiguous()
            save_file(plain, f"{folder}/model.safetensors", {"format": "pt"})
            model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
            fields = json.loads(Path(folder, "config.json").read_text())
        fields |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": quantization}
        tokens = [greedy(model, prompt) for prompt in PROMPTS]
        assert len({*map(tuple, tokens)}) == len(PROMPTS), "a model that ignores its prompt"
        self.models[name] = {"config": fields, "tokens": tokens}
        self._add(name, stored)

    def save(self) -> None:
        FIXTURES.mkdir(exist_ok=True)
        about = {"linears": self.linears, "models": self.models, "prompts": PROMPTS}
        save_file(self.tensors, FIXTURES / f"{self.tool}.safetensors", {"about": json.dumps(about)})

    def _add(self, name: str, tensors: dict[str, Tensor]) -> None:
        for path, tensor in tensors.items():
            self.tensors[f"{name}/{path}"] = tensor.detach().contiguous()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def in_groups(weight: Tensor, size: int, groups: Tensor | None = None) -> Tensor:
    """Return [out, groups, size]: the weights that share a scale. `groups` [in]: the group of each input."""
    size = size if size > 0 else weight.shape[1]
    if groups is not None:
        weight = weight[:, groups.argsort(stable=True)]
    spare = -weight.shape[1] % size
    return torch.nn.functional.pad(weight, (0, spare)).unflatten(1, (-1, size))


def scales_and_zeros(
    weight: Tensor, bits: int, size: int, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scales and unsigned zero points [out, groups] by rounding to nearest, as GPTQ's and AWQ's tools do."""
    values, most = in_groups(weight, size, groups), 2**bits - 1
    if symmetric:
        scales = (values.abs().amax(-1) * 2 / most).half().float()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    lowest, highest = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    scales = ((highest - lowest) / most).half().float()
    return scales, (-lowest / scales).round().clamp(1, most)


# compressed-tensors


def compressed(fixtures: Fixtures) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def packer(
        form: str, dtype: torch.dtype, inputs: dict[str, Any] | None = None, **args: Any
    ) -> tuple[Pack, dict[str, Any]]:
        activations = QuantizationArgs(**inputs) if inputs else None
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), input_activations=activations)
        compressor = BaseCompressor.get_value_from_registry(form)

        def pack(weight: Tensor) -> Packed:
            weight = weight.to(dtype)
            values = in_groups(weight.float(), scheme.weights.group_size or -1)
            state: dict[str, Tensor] = {"weight": weight}
            if form == "nvfp4-pack-quantized":
                state["weight_global_scale"] = (448 * 6 / weight.float().abs().amax()).reshape(1)
            given = state.get("weight_global_scale")
            scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), scheme.weights, given)
            if form == "mxfp4-pack-quantized":
                scale = 2 ** (scale.float() - 127)  # comes as its exponent
            state |= {"weight_scale": scale.to(dtype if scale.dtype.itemsize > 1 else scale.dtype)}
            if not scheme.weights.symmetric:
                state["weight_zero_point"] = zero.to(torch.int8)
            stored = compressor.compress(state, scheme)
            return stored, compressor.decompress(stored, scheme)["weight"]

        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
        fields = config.model_dump(mode="json") | {"quantization_status": "compressed"}
        return pack, fields

    integers, bf16, fp32 = "pack-quantized", torch.bfloat16, torch.float32
    for bits, size, symmetric, dtype, shape in (
        (4, 32, True, bf16, (40, 96)),
        (4, 16, False, torch.float16, (44, 64)),
        (4, 0, True, fp32, (12, 76)),
        (4, 0, False, bf16, (22, 50)),
        (8, 32, False, bf16, (40, 64)),
        (8, 0, True, fp32, (24, 70)),
    ):
        how = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        pack, _ = packer(integers, dtype, num_bits=bits, type="int", symmetric=symmetric, **how)
        settings = {"bits": bits, "group_size": size, "symmetric": symmetric, "act_order": False}
        fixtures.linear("pack_quantized", pack, shape, **settings)
    mx = packer("mxfp4-pack-quantized", bf16, num_bits=4, type="float", strategy="group", group_size=32)
    nv = packer("nvfp4-pack-quantized", bf16, num_bits=4, type="float", strategy="tensor_group", group_size=16)
    fixtures.linear("mxfp4", mx[0], (40, 96), names="compressed-tensors")
    fixtures.linear("nvfp4", nv[0], (40, 80), names="compressed-tensors")
    w4 = packer(integers, bf16, num_bits=4, type="int", symmetric=False, strategy="group", group_size=32)
    w8 = packer(integers, fp32, num_bits=8, type="int", symmetric=True, strategy="channel")
    fixtures.model("w4a16-dense", DENSE, *w4, bf16)
    fixtures.model("w4a16-moe", MOE, *w4, bf16)
    fixtures.model("w8a16-dense", DENSE, *w8, fp32)
    fixtures.model("nvfp4-dense", DENSE, *nv, bf16)
    groups = {r".*(q|gate|down)_proj$": w4, r".*(k_proj|lm_head)$": w8}  # others are plain: of each fused linear, one
    fields = w4[1] | {"format": "mixed-precision", "ignore": [], "config_groups": {}}
    for number, (pattern, (_, own)) in enumerate(groups.items()):
        group = own["config_groups"]["group_0"] | {"targets": [f"re:{pattern}"], "format": integers}
        fields["config_groups"][f"group_{number}"] = group
    fixtures.model("mixed-dense", UNTIED, {pattern: pack for pattern, (pack, _) in groups.items()}, fields, fp32)

    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    for bits, size, symmetric, dtype, shape in (
        (4, 32, False, bf16, (22, 96)),
        (4, 0, True, torch.float16, (13, 50)),
        (8, 16, False, fp32, (20, 48)),
    ):
        how = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
        pack, _ = packer("int-quantized", dtype, token, num_bits=bits, type="int", symmetric=symmetric, **how)
        fixtures.linear("int_quantized", pack, shape, bits=bits, group_size=size, symmetric=symmetric)
    a8 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    afp8 = packer("int-quantized", bf16, token | {"type": "float"}, **a8)
    fixtures.model("w4afp8-dense", DENSE, *afp8, bf16)
    fixtures.model("w4a8-moe", MOE, *packer("int-quantized", bf16, token, **a8), bf16)


def act_order(fixtures: Fixtures) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def packer(symmetric: bool, shared: bool = True) -> tuple[Pack, dict[str, Any]]:
        args = QuantizationArgs(
            num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=32, actorder="group"
        )
        config = QuantizationConfig(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)}, format="pack-quantized"
        )
        compressor = BaseCompressor.load_from_registry("pack-quantized", config=config)

        def pack(weight: Tensor) -> Packed:
            weight, groups = weight.bfloat16(), act_order_groups(weight.shape[1], 32, shared)
            values = in_groups(weight, 32, groups)
            scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), args)
            zero = zero.to(torch.int8)
            stored = compressor.compress_weight(weight, scale, args, zero, groups)
            codes = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
            widened = dequantize(codes, scale, zero, args, g_idx=groups)  # decompress_weight takes no zero points
            return stored | {"weight_scale": scale, "weight_g_idx": groups}, widened

        fields = config.model_dump(mode="json") | {"ignore": ["lm_head"], "quantization_status": "compressed"}
        return pack, fields

    for symmetric in (True, False):
        settings = {"bits": 4, "group_size": 32, "symmetric": symmetric, "act_order": True}
        fixtures.linear("pack_quantized", packer(symmetric)[0], (40, 96), **settings)
    fixtures.model("dense", DENSE, *packer(False), torch.bfloat16)
    fixtures.model("moe-orders-differ", MOE, *packer(True, shared=False), torch.bfloat16)


def act_order_groups(size: int, group: int, shared: bool = True) -> Tensor:
    """Return the group of each input, in no order; `shared`: linears with as many inputs have the same ones."""
    generator = torch.Generator().manual_seed(size) if shared else torch.default_generator
    return (torch.randperm(size, generator=generator) // group).int()


# AWQ


def autoawq(fixtures: Fixtures) -> None:
    without_init("awq", "awq.utils", "awq.modules", "awq.modules.linear")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def packer(size: int) -> Pack:
        def pack(weight: Tensor) -> Packed:
            scales, zeros = (one.T.contiguous() for one in scales_and_zeros(weight, 4, size, symmetric=False))
            rows = weight.shape[1] if size < 0 else size
            codes = (weight.T / scales.repeat_interleave(rows, 0) + zeros.repeat_interleave(rows, 0)).round()
            fitting = (codes.clamp(0, 15) - zeros.repeat_interleave(rows, 0)) * scales.repeat_interleave(rows, 0)
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = fitting.T.contiguous()  # it does not clamp
            made = WQLinear_GEMM.from_linear(linear, 4, rows, scales=scales, zeros=zeros)
            widened = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, made.group_size)
            return {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales}, widened.T

        return pack

    for size, shape in ((32, (64, 96)), (16, (32, 64)), (-1, (32, 70)), (64, (32, 128))):
        fixtures.linear("awq", packer(size), shape, bits=4, group_size=max(size, 0), zero_point=True)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    config |= {"modules_to_not_convert": None}
    fixtures.model("dense", DENSE, packer(32), config, torch.float16)
    fixtures.model("moe", MOE, packer(32), config | {"modules_to_not_convert": ["mlp.gate"]}, torch.float16)


# GPTQ


def auto_gptq(fixtures: Fixtures) -> None:
    without_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    def packer(bits: int, size: int, symmetric: bool, ordered: bool = False) -> Pack:
        def pack(weight: Tensor) -> Packed:
            outputs, inputs = weight.shape
            groups = act_order_groups(inputs, size) if ordered else None
            scales, zeros = scales_and_zeros(weight, bits, size, symmetric, groups)
            made = QuantLinear(bits, size, inputs, outputs, bias=False)
            groups = made.g_idx if groups is None else groups
            made.pack(holding(clamped(weight, scales, zeros, groups, bits).half()), scales, zeros, groups)
            made.autogptq_cuda_available = False
            return gptq_tensors(made), made.half()(torch.eye(inputs).half()).T

        return pack

    for bits, size, symmetric, ordered, shape in (
        (2, 32, False, False, (64, 64)),
        (3, 32, False, False, (64, 96)),
        (3, 32, True, False, (32, 64)),
        (4, 32, True, False, (64, 96)),
        (4, 16, False, True, (64, 64)),
        (4, -1, False, False, (32, 96)),
        (8, 32, False, True, (32, 96)),
    ):
        settings = gptq_settings(bits, size, symmetric, ordered, plus_one=True)
        fixtures.linear("gptq", packer(bits, size, symmetric, ordered), shape, **settings)
    for name, config, bits, ordered in (
        ("4-bit-ordered-dense", DENSE, 4, True),
        ("4-bit-moe", MOE, 4, False),
        ("3-bit-dense", DENSE, 3, False),
    ):
        fields = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": ordered, "sym": False}
        fixtures.model(name, config, packer(bits, 32, False, ordered), fields, torch.float16)
    fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "lm_head": True}
    fixtures.model("biases-and-head", BIASED, {r".*(_proj|lm_head)$": packer(4, 32, False)}, fields, torch.float16)


def gptqmodel(fixtures: Fixtures) -> None:
    # to import the package takes others, which look for a GPU
    files = [Path(path, "gptqmodel/nn_modules/qlinear/__init__.py") for path in sys.path]
    (source,) = [file for file in files if file.exists()]
    tree = ast.parse(source.read_text())
    wanted = ("pack_original", "dequantize_weight", "_dequantize_from_codes", "_init_wf_unsqueeze_buffers")
    methods = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in wanted]
    for method in methods:
        method.decorator_list, method.returns = [], None
    limits = types.SimpleNamespace(threadpool_limits=lambda _: tempfile.TemporaryDirectory())
    scope: dict[str, Any] = {
        "t": torch, "nn": torch.nn, "np": np, "math": math, "transformers": transformers, "THREADPOOLCTL": limits,
        "_ConvNd": torch.nn.modules.conv._ConvNd,
        "_torch_right_shift": torch.bitwise_right_shift, "_torch_left_shift": torch.bitwise_left_shift,
    }  # fmt: skip
    for method in methods:
        exec(compile(ast.Module([method], []), str(source), "exec"), scope)

    def packer(bits: int, size: int, symmetric: bool, ordered: bool = False) -> Pack:
        def pack(weight: Tensor) -> Packed:
            inputs = weight.shape[1]
            groups = torch.arange(inputs, dtype=torch.int32) // (inputs if size < 0 else size)
            if ordered:
                groups = act_order_groups(inputs, size)
            scales, zeros = scales_and_zeros(weight, bits, size, symmetric, groups)
            made: Any = torch.nn.Module()
            made.bits, made.maxq, made.planar, made.bias = bits, 2**bits - 1, False, None
            made.pack_dtype_bits, made.pack_factor, made.pack_dtype = 32, 32 // bits, torch.int32
            made.pack_np_math_dtype, made.pack_np_dtype, made.in_features = np.uint32, np.int32, inputs
            made.dequant_dtype = torch.int16 if bits == 8 else torch.int8
            scope["pack_original"](made, holding(weight), scales, zeros, groups)
            shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None]
            made.wf_unsqueeze_zero, made.wf_unsqueeze_neg_one = shifts[None], shifts[..., None]
            made._init_wf_unsqueeze_buffers = lambda: None
            made._dequantize_from_codes = types.MethodType(scope["_dequantize_from_codes"], made)
            return gptq_tensors(made), scope["dequantize_weight"](made).T

        return pack

    for bits, size, symmetric, ordered, shape in (
        (4, 32, False, False, (44, 72)),
        (4, -1, True, False, (12, 76)),
        (8, 16, False, True, (22, 64)),
        (2, 16, False, False, (20, 80)),
    ):
        settings = gptq_settings(bits, size, symmetric, ordered, plus_one=False)
        fixtures.linear("gptq", packer(bits, size, symmetric, ordered), shape, **settings)
    fields = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True}
    fields |= {"checkpoint_format": "gptq_v2"}
    fixtures.model("8-bit-v2-dense", DENSE, packer(8, 32, True), fields, torch.float16)


def auto_round(fixtures: Fixtures) -> None:
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    def pack(weight: Tensor) -> Packed:
        outputs, inputs = weight.shape
        scales, zeros = scales_and_zeros(weight, 4, 32, symmetric=True)
        groups = torch.arange(inputs) // 32
        made = QuantLinear(4, 32, inputs, outputs, bias=False, g_idx=True)
        made.pack(holding(clamped(weight, scales, zeros, groups, 4)), scales, 8, None, "cpu")
        tensors = gptq_tensors(made)
        del made.g_idx  # with it, a forward is wrong where there are more outputs than inputs
        return tensors, made.half()(torch.eye(inputs).half()).T

    fixtures.linear("gptq", pack, (64, 96), **gptq_settings(4, 32, True, False, True))
    fields = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    fields |= {"packing_format": "auto_round:auto_gptq", "autoround_version": "0.16.1"}
    fixtures.model("dense", DENSE, pack, fields, torch.float16)
    about = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "act_dynamic": True}
    for kind, size, model in (("mx_fp", 32, MOE), ("nv_fp", 16, DENSE)):
        fields = about | {"bits": 4, "act_bits": 4, "sym": True, "data_type": kind, "act_data_type": kind}
        fields |= {"group_size": size, "act_group_size": size, "block_name_to_quantize": "model.layers"}
        fields |= {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16}}} if model is MOE else {}
        fixtures.model(kind, model, auto_round_floats(kind, size), fields, torch.bfloat16)


def auto_round_floats(kind: str, size: int) -> Pack:
    from auto_round.experimental.qmodules.mx import MXFP4QuantLinear
    from auto_round.experimental.qmodules.nvfp4 import NVFP4QuantLinear
    from auto_round.export.export_to_autoround.qlinear_fp import QuantLinear
    from auto_round.schemes import PRESET_SCHEMES

    def pack(weight: Tensor) -> Packed:
        (outputs, inputs), largest = weight.shape, in_groups(weight, size).abs().amax(-1)
        made = QuantLinear(4, size, inputs, outputs, bias=False, data_type=kind, act_bits=4)
        if kind == "mx_fp":
            made.pack(holding(weight), largest.log2().floor() - 2)
        else:
            given = 448 * 6 / weight.abs().amax()
            scales = (largest / 6 * given).to(torch.float8_e4m3fn).float()
            made.pack(holding(weight), scales, global_scale=given, input_global_scale=torch.tensor(100.0))
        stored = dict(made.named_buffers())
        serving = {"mx_fp": MXFP4QuantLinear, "nv_fp": NVFP4QuantLinear}[kind]
        layer = serving(inputs, outputs, config=PRESET_SCHEMES["MXFP4" if kind == "mx_fp" else "NVFP4"], bias=False)
        for name, value in stored.items():
            setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
        return stored, layer.dequant_weight_online().float()

    return pack


def gptq_settings(bits: int, size: int, symmetric: bool, ordered: bool, plus_one: bool) -> dict[str, Any]:
    settings = {"bits": bits, "group_size": max(size, 0), "symmetric": symmetric}
    return settings | {"act_order": ordered, "zeros_plus_one": plus_one}


def gptq_tensors(made: Any) -> dict[str, Tensor]:
    return {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}


def clamped(weight: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int) -> Tensor:
    """Return the weight within what codes reach, for tools that do not clamp."""
    scale, zero = scales[:, groups.long()], zeros[:, groups.long()]
    return ((weight / scale + zero).round().clamp(0, 2**bits - 1) - zero) * scale


def holding(weight: Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


# 4-bit floats


def quark(fixtures: Fixtures) -> None:
    from quark.torch.utils.numerics import to_e8m0_uint8
    from quark.torch.utils.pack import Pack_fp4

    form = Pack_fp4("per_group", "fp4")

    def pack(weight: Tensor) -> Packed:
        values = in_groups(weight, 32)
        scales = 2 ** (values.abs().amax(-1).log2().floor() - 2)
        rounded = round_e2m1(values / scales[..., None])
        stored = {"weight": form.pack(rounded.flatten(1), False), "weight_scale": to_e8m0_uint8(scales)}
        powers = 2.0 ** (stored["weight_scale"].float() - 127)
        widened = form.unpack(stored["weight"], False).unflatten(1, (-1, 32)) * powers[..., None]
        return stored, widened.flatten(1)

    fixtures.linear("mxfp4", pack, (40, 96), names="quark")
    weight = {"dtype": "fp4", "is_dynamic": False, "qscheme": "per_group", "ch_axis": -1, "group_size": 32}
    weight |= {"scale_format": "e8m0", "symmetric": None, "observer_cls": "PerBlockMXObserver", "scale_type": "float"}
    fields = {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": {
            "weight": weight,
            "input_tensors": weight | {"is_dynamic": True},
            "output_tensors": None,
            "bias": None,
        },
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    }
    fixtures.model("dense", DENSE, pack, fields, torch.bfloat16)
    fixtures.model("moe", MOE, pack, fields | {"exclude": ["lm_head", "model.layers.0.mlp.gate"]}, torch.bfloat16)


def round_e2m1(values: Tensor) -> Tensor:
    """Return the nearest numbers that e2m1 has."""
    known = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = (values.abs()[..., None] - known).abs().argmin(-1)
    return known[nearest].copysign(values)


def modelopt(fixtures: Fixtures) -> None:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def pack(weight: Tensor) -> Packed:
        made, scale, scale2 = NVFP4QTensor.quantize(weight, 16)
        widened = made.dequantize(scale=scale, double_scale=scale2, block_sizes={-1: 16})
        stored = {"weight": made._quantized_data, "weight_scale": scale, "weight_scale_2": scale2}
        return stored | {"input_scale": torch.tensor(0.01)}, widened

    def smoothed(weight: Tensor) -> Packed:
        """Of what AWQ multiplies inputs by, an export keeps what no norm or linear before takes over: o_proj's, where
        there are fewer KV heads than heads."""
        factors = (torch.rand(weight.shape[1]) + 0.5).bfloat16()
        stored, widened = pack(weight / factors)
        return stored | {"pre_quant_scale": factors}, widened * factors

    fixtures.linear("nvfp4", pack, (40, 80), names="modelopt")
    fields = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
        "ignore": ["lm_head"],
    }
    fixtures.model("dense", DENSE, pack, fields, torch.bfloat16)
    fixtures.model("moe", MOE, pack, fields | {"ignore": ["lm_head", "model.layers.0.mlp.gate"]}, torch.bfloat16)
    awq = {key: value for key, value in fields.items() if key != "config_groups"} | {"quant_algo": "NVFP4_AWQ"}
    fixtures.model("awq-dense", DENSE, {r".*o_proj$": smoothed, r".*_proj$": pack}, awq, torch.bfloat16)
    modelopt_integers(fixtures)


def modelopt_integers(fixtures: Fixtures) -> None:
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    def packer(size: int, smoothed: bool = False, with_fp8: bool = False) -> Pack:
        def pack(weight: Tensor) -> Packed:
            factors = (torch.rand(weight.shape[1]) + 0.5).bfloat16().float() if smoothed else None
            weight = weight if factors is None else weight / factors
            quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=4, block_sizes={-1: size}))
            scale = weight.unflatten(1, (-1, size)).abs().amax(-1) / 7
            stored = {"weight": pack_int4_in_uint8(weight, scale, size), "weight_scale": scale}
            if with_fp8:  # W4A8's: of activations, and of what 4 bits say, which it rounds once more
                stored |= {"weight_scale_2": torch.tensor(0.001), "input_scale": torch.tensor(0.01)}
            codes = (weight / scale.repeat_interleave(size, 1)).round().clamp(-8, 7)
            widened = codes * scale.repeat_interleave(size, 1)  # the tool divides by what the scale was made of
            other = (widened - quantizer(weight)).abs() > 1e-6 * widened.abs()
            assert other.float().mean() < 1e-3, "all but ties"
            if factors is None:
                return stored, widened
            return stored | {"pre_quant_scale": factors.bfloat16()}, widened * factors

        return pack

    for size, shape in ((32, (22, 96)), (64, (40, 128)), (16, (12, 48))):
        fixtures.linear("modelopt_awq", packer(size, with_fp8=size == 64), shape, bits=4, group_size=size)
    fields = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32, "ignore": ["lm_head", "*.gate"]}
    packs = {r".*o_proj$": packer(32, smoothed=True), r".*_proj$": packer(32)}
    fixtures.model("int4-awq-moe", MOE, packs, fields, torch.bfloat16)


def without_init(*packages: str) -> None:
    """Make packages importable without what their `__init__` imports."""
    (folder,) = (path for path in sys.path if Path(path, packages[0], "__init__.py").exists())
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(folder, *name.split(".")))]
        sys.modules[name] = package


TOOLS = {
    "compressed-tensors": compressed,
    "act-order": act_order,
    "autoawq": autoawq,
    "auto-gptq": auto_gptq,
    "gptqmodel": gptqmodel,
    "auto-round": auto_round,
    "quark": quark,
    "modelopt": modelopt,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    made = Fixtures(sys.argv[1])
    TOOLS[made.tool](made)
    made.save()
