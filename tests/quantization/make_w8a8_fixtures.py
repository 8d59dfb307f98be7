"""Makes the fixtures of test_w8a8_formats.py: tiny models in 8-bit formats as compressed-tensors writes them, with the
logits of its own forward, which rounds weights and activations in float32.

    pip install --no-deps --target LIB compressed-tensors==0.20.0 loguru
    PYTHONPATH=LIB python tests/quantization/make_w8a8_fixtures.py

Each model is a file `fixtures/w8a8/NAME.safetensors`; config.json and the prompt are in its metadata.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
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
MOE = transformers.MixtralConfig(
    **BASE, num_local_experts=3, num_experts_per_tok=2, architectures=["MixtralForCausalLM"]
)


def seeded(config: Any) -> Any:
    """Return a model with random weights that differ in size from output to output."""
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            sizes = torch.rand(*parameter.shape[:-1], 1) + 0.5
            parameter.data.copy_(torch.randn(parameter.shape) * sizes * 1.2 * parameter.shape[-1] ** -0.5)
    return model


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
    elif args.strategy == "channel":
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        low, high = weight.amin().view(1), weight.amax().view(1)
    scale: Tensor = calculate_qparams(low, high, args)[0]
    return scale


def compressed_tensors(name: str, config: Any, weights: dict[str, Any], inputs: dict[str, Any] | None) -> None:
    """Quantize with compressed-tensors; static scales of activations are calibrated on the prompt."""
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
    seen: dict[str, Tensor] = {}
    linears = {path: one for path, one in model.named_modules() if hasattr(one, "weight_scale")}
    hooks = [
        one.register_forward_pre_hook(lambda _, given, path=path: seen.__setitem__(path, given[0].detach()))
        for path, one in linears.items()
    ]
    for one in linears.values():
        one.quantization_enabled = False
    with torch.no_grad():
        model(torch.tensor([PROMPT]))
    for hook in hooks:
        hook.remove()
    for path, one in linears.items():
        one.quantization_enabled = True
        one.weight_scale.data.copy_(weight_scale(one.weight.data, args).view(one.weight_scale.shape))
        if rounding is not None and not rounding.dynamic:
            values = seen.get(path, torch.ones(1))
            scale, zero = calculate_qparams(values.amin().view(1), values.amax().view(1), rounding)
            one.input_scale.data.copy_(scale)
            if hasattr(one, "input_zero_point"):
                one.input_zero_point.data.copy_(zero)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        compressor.update_config(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        save(name, tensors, json.loads(Path(folder, "config.json").read_text()), logits)


def sparse(name: str, weights: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Quantize weights by compressed-tensors, which knows no experts of transformers 5; logits are those of the widened
    weights, with no activations rounded."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    model, args = seeded(MOE), QuantizationArgs(**weights)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plain, stored = load_file(f"{folder}/model.safetensors"), {}
        for path, weight in list(plain.items()):
            stored[path] = weight
            if ".experts." in path or path.endswith("_proj.weight"):
                scale = weight_scale(weight, args)
                zero = torch.zeros_like(scale)
                codes = quantize(
                    weight, scale, zero, args, dtype=torch.int8 if args.type == "int" else torch.float8_e4m3fn
                )
                stored |= {path: codes, f"{path}_scale": scale}
                if not inputs.get("dynamic"):
                    stored[f"{path.removesuffix('weight')}input_scale"] = torch.tensor([0.02])
                plain[path] = dequantize(codes, scale, zero, args, dtype=torch.float32).contiguous()
        save_file(plain, f"{folder}/model.safetensors", {"format": "pt"})
        wide = type(model).from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = wide(torch.tensor([PROMPT])).logits[0]
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
        quantization |= {"ignore": ["lm_head", "re:.*gate$"], "quantization_status": "compressed"}
        config = json.loads(Path(folder, "config.json").read_text()) | {"quantization_config": quantization}
        save(name, stored, config, logits)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def main() -> None:
    by_token, static = {"strategy": "token", "dynamic": True}, {"strategy": "tensor", "dynamic": False}
    compressed_tensors("fp8-dynamic", DENSE, FLOAT8 | {"strategy": "channel"}, FLOAT8 | by_token)
    compressed_tensors("fp8-static", DENSE, FLOAT8 | {"strategy": "tensor"}, FLOAT8 | static)
    blocks = {"strategy": "block", "block_structure": [128, 128]}
    groups = {"strategy": "group", "group_size": 128, "dynamic": True}
    compressed_tensors("fp8-block", WHOLE_GROUPS, FLOAT8 | blocks, FLOAT8 | groups)
    compressed_tensors("int8-dynamic", DENSE, INT8 | {"strategy": "channel"}, INT8 | by_token)
    compressed_tensors("int8-static", DENSE, INT8 | {"strategy": "tensor"}, INT8 | static)
    uneven = INT8 | {"symmetric": False}
    compressed_tensors("int8-static-uneven", DENSE, INT8 | {"strategy": "channel"}, uneven | static)
    sparse("fp8-dynamic-experts", FLOAT8 | {"strategy": "channel"}, FLOAT8 | by_token)
    sparse("fp8-static-experts", FLOAT8 | {"strategy": "tensor"}, FLOAT8 | static)
    sparse("fp8-block-experts", FLOAT8 | blocks, FLOAT8 | groups)
    sparse("int8-dynamic-experts", INT8 | {"strategy": "channel"}, INT8 | by_token)
    compressed_tensors("int8-dynamic-uneven", DENSE, INT8 | {"strategy": "channel"}, uneven | by_token)


if __name__ == "__main__":
    main()
