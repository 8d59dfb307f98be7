"""Checks that loading in fp8 peaks below 1.1 x the weights: dummies of the 8B, and a checkpoint of two of its layers.

From disk an embedding in flight counts too, which is large beside two layers: there the peak is only printed, and a
layer's result is compared with float64.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from h200_parts.engines import context_for
from h200_parts.models import LLAMA_8B, TOY
from h200_parts.numerics import write_random_model
from h200_parts.run import Run
from headrace.kernels.cases import relative_error
from headrace.layers.linear import Linear
from headrace.model_config import ModelConfig
from headrace.models.loader import load_model

MOST = 1.1
"""times the weights"""
INEXACT = 0.045
"""||fp8 product - exact|| / ||exact||, at most"""


def fp8_memory_cases(run: Run) -> None:
    """Load dummies and checkpoints, plain and quantized."""
    device = torch.device(run.settings.device)
    shape = LLAMA_8B | (TOY if run.smoke else {})
    for quantization in (None, "fp8", "ptpc_fp8"):
        model, ratio, said = load(Path("nowhere"), ModelConfig.from_dict(shape), quantization, "dummy", device)
        x = torch.randn(4, shape["hidden_size"], device=device, dtype=torch.bfloat16)
        layers = model.model.layers
        out = layers[len(layers) - 1].mlp.gate_up_proj.compute(x, None)
        out = out if isinstance(out, Tensor) else out.values.float()
        sound = bool(out.isfinite().all()) and bool((out != 0).any())
        small = run.smoke or quantization is None or ratio < MOST
        run.case(f"dummy 8B {quantization or 'bf16'}", small and sound, said)
        del model, layers, out
    for dtype in ("bfloat16", "float32"):
        folder = write_random_model(run.settings.work / dtype, run.settings, layers=2, dtype=dtype)
        down_proj = load_file(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"].to(device).double()
        for quantization in ("fp8", "ptpc_fp8"):
            model, _, said = load(folder, ModelConfig.from_folder(folder), quantization, "auto", device)
            linear: Any = [one for one in model.modules() if isinstance(one, Linear)][-2]
            x = torch.randn(64, shape["intermediate_size"], device=device, dtype=torch.bfloat16)
            wrong = relative_error(linear.compute(x, None), (x.double() @ down_proj.T).to(x.dtype))
            said += f"; down_proj against float64: {wrong:.4f}"
            run.case(f"2 layers of {dtype} on disk, {quantization}", wrong < INEXACT, said)
            del model, linear


def load(
    folder: Path, config: ModelConfig, quantization: str | None, load_format: str, device: torch.device
) -> tuple[Any, float, str]:
    """Return (model, peak / weights, a line about it). On the CPU nothing is measured."""
    gpu = device.type == "cuda"
    before = 0
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = load_model(folder, config, context_for(config, device), load_format, 0, quantization)
    if not gpu:
        return model, 0.0, "not measured on a CPU"
    torch.cuda.synchronize()
    spent = time.perf_counter() - start
    kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    ratio = peak / model.weight_bytes
    said = f"weights {model.weight_bytes / 2**30:.2f} GiB, kept {kept / 2**30:.2f}, peak {peak / 2**30:.2f}"
    return model, ratio, f"{said} = {ratio:.3f} x, {spent:.1f} s"
