"""Loading in fp8 takes less than 1.1 x what the weights take: dummies of the 8B, and a checkpoint of two of its layers.

From disk an embedding in flight counts too, which is large beside two layers: there the peak is said, and the result
of a layer is compared.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from h200_parts.models import LLAMA_8B, TOY
from safetensors.torch import save_file
from torch import Tensor

from h200_cases_parts.report import Report
from headrace.attention.table import load_backend, select_backend
from headrace.distributed.mesh import Mesh
from headrace.kernels.table import select_kernels
from headrace.layers.context import LayerContext
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model
from headrace.models.registry import attention_specs

MOST = 1.1
"""times the weights"""
INEXACT = 0.045
"""||fp8 product - exact|| / ||exact||, at most"""


def fp8_memory_cases(report: Report) -> None:
    device = torch.device("cpu" if report.smoke else "cuda")
    shape = LLAMA_8B | (TOY if report.smoke else {})
    for quantization in (None, "fp8", "ptpc_fp8"):
        model, ratio, said = load(Path("nowhere"), ModelConfig.from_dict(shape), quantization, "dummy", device)
        x = torch.randn(4, shape["hidden_size"], device=device, dtype=torch.bfloat16)
        layers = model.model.layers
        out = layers[len(layers) - 1].mlp.gate_up_proj.compute(x, None)
        out = out if isinstance(out, Tensor) else out.values.float()
        sound = bool(out.isfinite().all()) and bool((out != 0).any())
        small = report.smoke or quantization is None or ratio < MOST
        report.case(f"dummy 8B {quantization or 'bf16'}", small and sound, said)
        del model, layers, out
    for dtype in (torch.bfloat16, torch.float32):
        folder = report.work / str(dtype)
        down_proj = write_two_layers(folder, shape, dtype, device)
        for quantization in ("fp8", "ptpc_fp8"):
            model, _, said = load(folder, ModelConfig.from_folder(folder), quantization, "auto", device)
            linear: Any = [one for one in model.modules() if isinstance(one, Linear)][-2]
            x = torch.randn(64, shape["intermediate_size"], device=device, dtype=torch.bfloat16)
            exact = x.double() @ down_proj.to(device).double().T
            wrong = float((linear.compute(x, None).double() - exact).norm() / exact.norm())
            report.case(
                f"2 layers of {str(dtype)[6:]} on disk, {quantization}",
                wrong < INEXACT,
                f"{said}; down_proj against float64: {wrong:.4f}",
            )
            del model, linear


def load(
    folder: Path, config: ModelConfig, quantization: str | None, load_format: str, device: torch.device
) -> tuple[Any, float, str]:
    """(model, peak / weights, a line); on the CPU nothing is measured."""
    gpu = device.type == "cuda"
    specs = attention_specs(config, tp_size=1, block_size=16, dtype="bfloat16", device_type=device.type)
    backend = load_backend(select_backend(specs).name)
    context = LayerContext(Mesh(), select_kernels(device.type), backend, specs, torch.bfloat16, device)
    before = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = load_model(folder, config, context, load_format, 0, quantization)
    if not gpu:
        return model, 0.0, "not measured on a CPU"
    torch.cuda.synchronize()
    spent = time.perf_counter() - start
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    ratio = peak / model.weight_bytes
    said = f"weights {model.weight_bytes / 2**30:.2f} GiB, kept {kept / 2**30:.2f}, peak {peak / 2**30:.2f}"
    return model, ratio, f"{said} = {ratio:.3f} x, {spent:.1f} s"


def write_two_layers(folder: Path, shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A checkpoint; gives back the last layer's down_proj."""
    hidden, wide, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    dim = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    sizes |= {"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
    sizes |= {"mlp.down_proj": (hidden, wide)}

    def normal(*size: int) -> Tensor:
        return torch.empty(size, device=device).normal_(0, 0.02).to(dtype).cpu()

    tensors = {f"{name}.weight": normal(vocab, hidden) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": normal(*size) for name, size in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2, "torch_dtype": str(dtype)[6:]}))
    save_file(tensors, folder / "model.safetensors")
    return tensors["model.layers.1.mlp.down_proj.weight"]
