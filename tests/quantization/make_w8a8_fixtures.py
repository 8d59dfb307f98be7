"""Makes the fixtures of test_w8a8_formats.py: tiny models in 8-bit formats as the formats' own tools write them, with
the logits of the tool's own forward in float32, which rounds weights and activations.

    pip install --no-deps --target LIB compressed-tensors==0.20.0 loguru  # and so on, each tool in a folder of its own
    PYTHONPATH=LIB python tests/quantization/make_w8a8_fixtures.py TOOL

| TOOL | package | what is used of it |
|---|---|---|
| compressed-tensors | compressed-tensors 0.20.0 | all of it |
| quark | amd-quark 0.13 | ModelQuantizer, export_safetensors; its `fp8` mode writes what AutoFP8 does |
| modelopt | nvidia-modelopt 0.47.0 | quantize, export_hf_checkpoint |
| fbgemm | fbgemm-gpu-genai 1.9.0 | quantize_fp8_row, as transformers calls it; the products are by torch |
| transformers | transformers 5.23 | Fp8Quantize, Fp8Dequantize; the products are by torch, since its own need a GPU |

AutoFP8's form is amd-quark's `fp8` mode for dense models, and compressed-tensors' static fp8 with other fields in
config.json for experts: its tensors have the same names and shapes.
Each model is a file `fixtures/w8a8/NAME.safetensors`; config.json and the prompt are in its metadata.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from make_fixtures import without_init
from safetensors.torch import load_file, save_file
from torch import Tensor

FIXTURES = Path(__file__).parent / "fixtures" / "w8a8"
PROMPT = [8, 60, 22, 50, 41, 7, 7, 13, 50, 2, 33, 17, 3, 44, 5, 5]
BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 136,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
DENSE = transformers.LlamaConfig(**BASE, architectures=["LlamaForCausalLM"])
WHOLE_GROUPS = transformers.LlamaConfig(
    **BASE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}, architectures=["LlamaForCausalLM"]
)
"""the tool divides inputs by 128 without a rest"""
WHOLE_BLOCKS = transformers.LlamaConfig(
    **BASE | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}, architectures=["LlamaForCausalLM"]
)
"""the tool divides inputs and outputs by 128 without a rest"""
MOE = transformers.MixtralConfig(
    **BASE, num_local_experts=3, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
)
SOME_BLOCKS = transformers.LlamaConfig(**BASE | {"intermediate_size": 160}, architectures=["LlamaForCausalLM"])
"""k, v and o have sizes that blocks of 16 x 32 do not divide, and are left alone"""
WHOLE_EXPERTS = transformers.MixtralConfig(
    **MOE.to_diff_dict() | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
)


class Unfused(torch.nn.Module):
    """Computes Mixtral's experts by linears of their own, which tools know how to quantize."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for number, (both, down) in enumerate(zip(fused.gate_up_proj, fused.down_proj, strict=True)):
            expert, (gate, up) = torch.nn.Module(), both.chunk(2)
            for name, weight in (("w1", gate), ("w3", up), ("w2", down)):
                linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                linear.weight.data = weight.detach().clone()
                expert.add_module(name, linear)
            self.add_module(str(number), expert)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.children()):
            token, choice = (ids == number).nonzero(as_tuple=True)
            mine = x[token][None]  # scales of tokens are of the second of three dimensions
            inner = torch.nn.functional.silu(expert.w1(mine)) * expert.w3(mine)
            out.index_add_(0, token, expert.w2(inner)[0] * weights[token, choice, None])
        return out


def seeded(config: Any) -> Any:
    """Return a model with random weights that differ in size from output to output."""
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            sizes = torch.rand(*parameter.shape[:-1], 1) + 0.5
            parameter.data.copy_(torch.randn(parameter.shape) * sizes * 1.2 * parameter.shape[-1] ** -0.5)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = Unfused(layer.mlp.experts)
    return model


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    return model(torch.tensor([PROMPT])).logits[0]


def exported(model: Any, folder: str) -> dict[str, Tensor]:
    """Write config.json, and return the tensors as they are in a checkpoint."""
    if any(isinstance(module, Unfused) for module in model.modules()):
        model.config.save_pretrained(folder)
        tensors = {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in model.state_dict().items()}
    else:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}  # it is tied


def save(name: str, tensors: dict[str, Tensor], config: dict[str, Any], logits: Tensor) -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    held = {key: value.contiguous() for key, value in tensors.items()} | {"expected.logits": logits.contiguous()}
    save_file(held, FIXTURES / f"{name}.safetensors", {"config": json.dumps(config), "prompt": json.dumps(PROMPT)})


def weight_scale(weight: Tensor, args: Any) -> Tensor:
    from compressed_tensors.quantization.utils import calculate_qparams

    if args.strategy == "block":
        height, width = args.block_structure
        parts = [[part.abs().amax() for part in rows.split(width, 1)] for rows in weight.split(height, 0)]
        largest = torch.stack([torch.stack(row) for row in parts])
        low, high = -largest, largest
    elif args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin().view(1), weight.amax().view(1)
    scale: Tensor = calculate_qparams(low, high, args)[0]
    return scale


def seen_together(path: str) -> str:
    """Return the same for linears that share a static scale: those of all experts, which see parts of the tokens."""
    return re.sub(r"experts\.\d+\.(w2)?.*", r"experts.\1", path)


def compressed(
    name: str,
    config: Any,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    rename: Callable[[dict[str, Any]], dict[str, Any]] = lambda quantization: quantization,
) -> None:
    """Quantize with compressed-tensors; static scales of activations are calibrated on the prompt. `rename`
    says what config.json has in the end."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = seeded(config)
    args = QuantizationArgs(**weights)
    rounding = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=rounding)
    apply_quantization_config(
        model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*gate$"])
    )
    seen: dict[str, list[Tensor]] = {}
    linears = {path: one for path, one in model.named_modules() if hasattr(one, "weight_scale")}

    def watch(path: str, linear: Any) -> Any:
        kept = seen.setdefault(seen_together(path), [])
        return linear.register_forward_pre_hook(lambda _, given: kept.append(given[0].detach().flatten()))

    hooks = [watch(path, one) for path, one in linears.items()]
    for one in linears.values():
        one.quantization_enabled = False
    logits_of(model)
    for hook in hooks:
        hook.remove()
    for path, one in linears.items():
        one.quantization_enabled = True
        one.weight_scale.data.copy_(weight_scale(one.weight.data, args).view(one.weight_scale.shape))
        if rounding is not None and not rounding.dynamic:
            values = torch.cat(seen[seen_together(path)])
            scale, zero = calculate_qparams(values.amin().view(1), values.amax().view(1), rounding)
            one.input_scale.data.copy_(scale)
            if hasattr(one, "input_zero_point"):
                one.input_zero_point.data.copy_(zero)
    logits = logits_of(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as folder:
        tensors = exported(model, folder)
        compressor.update_config(folder)
        fields = json.loads(Path(folder, "config.json").read_text())
        save(name, tensors, fields | {"quantization_config": rename(fields["quantization_config"])}, logits)


def as_auto_fp8(quantization: dict[str, Any]) -> dict[str, Any]:
    """Return what AutoFP8 says of the same tensors."""
    left = [name for name in quantization["ignore"] if not name.startswith("re:")]
    return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*gate$", *left]}


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def compressed_tensors() -> None:
    by_token, static = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
    compressed("fp8-dynamic", DENSE, FLOAT8 | {"strategy": "channel"}, FLOAT8 | by_token)
    compressed("fp8-static", DENSE, FLOAT8 | {"strategy": "tensor"}, FLOAT8 | static)
    blocks = {"strategy": "block", "block_structure": [128, 128]}
    groups = {"strategy": "group", "group_size": 128, "dynamic": True}
    compressed("fp8-block", WHOLE_GROUPS, FLOAT8 | blocks, FLOAT8 | groups)
    compressed("int8-dynamic", DENSE, INT8 | {"strategy": "channel"}, INT8 | by_token)
    compressed("int8-static", DENSE, INT8 | {"strategy": "tensor"}, INT8 | static)
    mx = FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    compressed("mxfp8-weights", WHOLE_GROUPS, mx, None)  # rounded to powers of two, activations would differ from ours
    uneven = INT8 | {"symmetric": False}
    compressed("int8-static-uneven", DENSE, INT8 | {"strategy": "channel"}, uneven | static)
    compressed("int8-dynamic-uneven", DENSE, INT8 | {"strategy": "channel"}, uneven | by_token)
    compressed("fp8-dynamic-experts", MOE, FLOAT8 | {"strategy": "channel"}, FLOAT8 | by_token)
    compressed("autofp8-static-experts", MOE, FLOAT8 | {"strategy": "tensor"}, FLOAT8 | static, rename=as_auto_fp8)
    blocks, groups = blocks | {"block_structure": [64, 64]}, groups | {"group_size": 64}
    compressed("fp8-block-experts", WHOLE_EXPERTS, FLOAT8 | blocks, FLOAT8 | groups)
    compressed("int8-dynamic-experts", MOE, INT8 | {"strategy": "channel"}, INT8 | by_token)


def quark() -> None:
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    def quantized(scheme: str, cache: str | None) -> Any:
        model = seeded(DENSE)
        config = LLMTemplate.get("llama").get_config(scheme=scheme, kv_cache_scheme=cache)
        quantizer = ModelQuantizer(config)
        return quantizer.freeze(quantizer.quantize_model(model, torch.utils.data.DataLoader([torch.tensor(PROMPT)])))

    for name, scheme, cache, mode in (
        ("quark-fp8-static", "fp8", "fp8", "quark"),
        ("quark-fp8-dynamic", "ptpc_fp8", None, "quark"),
        ("quark-int8", "int8", None, "quark"),
        ("autofp8-static", "fp8", None, "fp8"),
    ):
        logits = logits_of(quantized(scheme, None))  # with nothing rounded on the way to the cache
        with tempfile.TemporaryDirectory() as folder:
            export_safetensors(quantized(scheme, cache), folder, custom_mode=mode)
            fields = json.loads(Path(folder, "config.json").read_text())
            save(name, load_file(f"{folder}/model.safetensors"), fields, logits)


def modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def quantized(sizes: Any, *configs: dict[str, Any]) -> Any:
        rules = [copy.deepcopy(rule) for config in configs for rule in config["quant_cfg"]]
        return mtq.quantize(seeded(sizes), {**configs[0], "quant_cfg": rules}, logits_of)

    for name, sizes, config, cache in (
        ("modelopt-fp8", DENSE, mtq.FP8_DEFAULT_CFG, [mtq.FP8_KV_CFG]),
        ("modelopt-fp8-dynamic", DENSE, mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, []),
        ("modelopt-fp8-block", WHOLE_BLOCKS, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, []),
    ):
        logits = logits_of(quantized(sizes, config))
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(quantized(sizes, config, *cache), dtype=torch.float32, export_dir=folder)
            fields = json.loads(Path(folder, "config.json").read_text())
            save(name, load_file(f"{folder}/model.safetensors"), fields, logits)


Rows = Callable[[Tensor], Tensor]
"""activations [tokens, inputs] -> the same, rounded"""


def by_hand(
    name: str,
    pack: Callable[[Tensor], dict[str, Tensor]],
    widen: Callable[[dict[str, Tensor]], Tensor],
    rounded: Rows,
    quantization: dict[str, Any],
    config: Any = DENSE,
) -> None:
    """Save a model whose linears, but for the head, are what `pack` makes of a weight; the logits are those of products
    of the widened weights with rounded activations. A weight that `pack` returns as it was is left alone."""
    model = seeded(config)
    with tempfile.TemporaryDirectory() as folder:
        tensors = exported(model, folder)
        fields = json.loads(Path(folder, "config.json").read_text()) | {"quantization_config": quantization}
    for path, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and path != "lm_head":
            made = pack(linear.weight.data)
            tensors |= {f"{path}.{one}": value for one, value in made.items()}
            if made["weight"].dtype != linear.weight.dtype:
                linear.weight.data = widen(made)
                linear.register_forward_pre_hook(lambda _, given: (rounded(given[0][0])[None],))
    save(name, tensors, fields, logits_of(model))


def fbgemm() -> None:
    parts = ("experimental", "gemm", "triton_gemm")
    without_init("fbgemm_gpu", *(".".join(("fbgemm_gpu", *parts[:end])) for end in (1, 2, 3)))  # which loads a GPU's
    from fbgemm_gpu.experimental.gemm.triton_gemm.fp8_gemm import quantize_fp8_row

    bound = torch.tensor([3.0])  # cuts a few activations off; 1200 is usual

    def pack(weight: Tensor) -> dict[str, Tensor]:
        values, scales = quantize_fp8_row(weight)
        return {"weight": values, "weight_scale": scales[:, None], "input_scale_ub": bound.clone()}

    def rounded(x: Tensor) -> Tensor:
        values, scales = quantize_fp8_row(x.clamp(-bound, bound), bound)
        return values.float() * scales[:, None]

    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 3.0, "modules_to_not_convert": ["lm_head"]}
    by_hand("fbgemm-fp8", pack, lambda made: made["weight"].float() * made["weight_scale"], rounded, quantization)


def of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    for name, block in (("transformers-fp8-block", (16, 32)), ("transformers-fp8", None)):
        config = transformers.FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=["lm_head"])
        owner = SimpleNamespace(quantization_config=config)
        quantize, dequantize = Fp8Quantize(owner), Fp8Dequantize(owner)

        def pack(weight: Tensor, quantize: Any = quantize) -> dict[str, Tensor]:
            made: dict[str, Tensor] = quantize.convert({"weight": weight})
            return {name.rpartition(".")[2]: tensor for name, tensor in made.items()}

        def widen(made: dict[str, Tensor], dequantize: Any = dequantize) -> Tensor:
            wide: Tensor = dequantize._dequantize_one(made["weight"], made["weight_scale_inv"], torch.float32)
            return wide

        def rounded(x: Tensor, block: tuple[int, int] | None = block) -> Tensor:
            groups = x.split(block[1] if block else x.shape[1], 1)
            scales = [group.abs().amax(1, keepdim=True) / 448 for group in groups]
            return torch.cat(
                [
                    (group / scale).to(torch.float8_e4m3fn).float() * scale
                    for group, scale in zip(groups, scales, strict=True)
                ],
                1,
            )

        by_hand(name, pack, widen, rounded, config.to_dict(), SOME_BLOCKS)


TOOLS = {
    "compressed-tensors": compressed_tensors,
    "quark": quark,
    "modelopt": modelopt,
    "fbgemm": fbgemm,
    "transformers": of_transformers,
}

if __name__ == "__main__":
    TOOLS[sys.argv[1]]()
