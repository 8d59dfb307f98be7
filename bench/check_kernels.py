"""Checks every Triton kernel against its reference on a GPU.

    python bench/check_kernels.py               all, a process a core: most of the time goes into compiling
    python bench/check_kernels.py --shard 2/8   only that share
    TRITON_INTERPRET=1 python bench/check_kernels.py --smoke    attention at tiny sizes, on a CPU

Inputs are random and fresh, outputs start as NaN. Sizes for kernels of the table are in kernel_sweeps.py. Attention is
checked as a start checks it, on models of a layer or two with heads of many sizes, over 16-bit and fp8 caches of keys
and of latents, in which NaN stands behind each request's last key. Prints failures, and the worst error of each type as
a share of its bound; exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from h200_parts.models import GPT_OSS_20B, LLAMA_8B, in_catalogue
from kernel_sweeps import SWEEPS, swept

from headrace.attention import triton_attn
from headrace.attention.triton_attn import TritonAttention
from headrace.distributed.mesh import Mesh
from headrace.kernels import attention
from headrace.kernels.cases import Inputs
from headrace.kernels.table import TRITON_KERNELS
from headrace.layers.context import LayerContext
from headrace.model_config import ModelConfig
from headrace.models import filling
from headrace.models.loader import load_model
from headrace.models.served import attention_specs, describe
from headrace.quantization import gpu_linear
from headrace.runner import latent_checks, layer_checks, made_up_cache
from headrace.runner.kernel_checks import Subject, kernel_checks
from headrace.runner.kv_cache import cache_dtype, cache_shape
from headrace.runner.self_check import with_switches

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PLAIN = torch.bfloat16 if ON_GPU else torch.float16
"""Triton's interpreter, on a CPU, does not multiply bf16."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 2e-6}
"""of attention alone, where neither cache nor heads are made on the way; all else is bound as at a start"""
BYTES_A_PROCESS = 12 * 2**30
"""GPU memory of a process: its context, compiled kernels and the largest case with its reference"""
ATTENTION = ("attention", "rotary_and_cache")
"""The checks of a start with one of these in their names are run."""
Check = tuple[str, Callable[[], float], float]
"""name, error, bound"""
Heads = tuple[int, int, int]
"""(query heads, KV heads, size of a head)"""
ATTENTION_HEADS: tuple[Heads, ...] = (
    (32, 8, 128), (28, 4, 128), (8, 8, 64), (8, 1, 64), (8, 8, 128), (8, 2, 256), (8, 8, 256), (12, 3, 80), (8, 4, 8),
    (14, 2, 96), (32, 1, 16), (64, 8, 64),
)  # fmt: skip
FP8_HEADS: tuple[Heads, ...] = ((32, 8, 128), (8, 8, 64), (8, 2, 256), (14, 2, 96), (64, 8, 64))
WITH_SINKS: tuple[Heads, ...] = ((64, 8, 64), (14, 2, 96), (8, 2, 16))
"""Heads of which each has a sink, in one layer with a window and one without: gpt-oss's, and others"""
WITH_WINDOWS: tuple[Heads, ...] = ((32, 8, 128), (12, 3, 80))
LATENTS = ((128, 16), (128, 1), (20, 64), (16, 16), (5, 1))
"""(heads, block size) over latents"""
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 2000 if ON_GPU else 88,
    "rope_scaling": None, "quantization_config": None,
}  # fmt: skip
WEIGHTS = 0.07
"""The range of weights: with small ones what heads make of latents would be alike, and so would scores."""
EXPERTS = {"num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
TOY_LATENTS = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def check_kernel(name: str, size: tuple[Any, ...], dtype: torch.dtype) -> float:
    """Return the largest error of a kernel of the table, in multiples of its bound."""
    errors = swept(name, Inputs(dtype, DEVICE, torch.seed()), size)
    return max((error / bound if bound else error and float("inf") for error, bound in errors), default=0.0)


def check_attention(config: dict[str, Any], block_size: int, dtype: torch.dtype, kv: str) -> float:
    """Return the largest error of what a start checks of attention in a model with random weights, in multiples of its
    bound. `kv`: the type of the cache, as users name it."""
    described, name = ModelConfig.from_dict(config), str(dtype).removeprefix("torch.")
    specs = attention_specs(
        described, tp_size=1, block_size=block_size, dtype=name, device_type="cuda", kv_cache_dtype=kv
    )
    backend, kernels = TritonAttention(), with_switches(TRITON_KERNELS)
    context = LayerContext(Mesh(), kernels, backend, specs, dtype, DEVICE)
    model = load_model(Path(), described, context, "dummy", torch.seed() % 2**31)
    held = dtype if kv == "auto" else cache_dtype(kv, DEVICE)
    shape = cache_shape(describe(described), specs, 1, block_size, held)
    subject = Subject(model, backend, kernels, shape, described.vocab_size, dtype, DEVICE)
    subject.inputs.generator.seed()
    worst = 0.0
    for checks in (kernel_checks(subject), layer_checks.layer_checks(subject)):
        for check in (check for check in checks if any(part in check.name for part in ATTENTION)):
            alone = check.name.startswith("attention backend") and held == dtype
            error = check.error() / (BOUNDS[dtype] if alone else check.bound)
            worst = max(worst, error) if error == error else float("inf")
    return worst


def nan_behind_keys(*given: Any) -> Any:
    """Return a made-up cache as a start does, in which NaN follows each request's last key."""
    cache, metadata = made_up_cache.filled_cache(*given)
    size = cache.shape[2]
    for row, length in enumerate(given[3]):
        if length % size and cache.element_size() > 1:
            cache[:, metadata.block_tables[-1][row, length // size], length % size :] = float("nan")
    return cache, metadata


def of_keys(heads: Heads, window: int | None = None) -> dict[str, Any]:
    """Return config.json of a model with such heads, which are normed where there are eight of keys."""
    num_heads, kv_heads, dim = heads
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    if heads in WITH_SINKS:
        layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        return GPT_OSS_20B | SMALL | EXPERTS | sizes | layers
    kind = "MistralForCausalLM" if window else "Qwen3ForCausalLM" if kv_heads == 8 else "LlamaForCausalLM"
    return LLAMA_8B | SMALL | sizes | {"architectures": [kind], "num_hidden_layers": 1, "sliding_window": window}


def of_latents(heads: int) -> dict[str, Any]:
    """Return config.json of a model with so many heads over latents, whose keys an index chooses."""
    sizes = {"num_attention_heads": heads, "hidden_size": 64 * heads, "num_hidden_layers": 1, "q_lora_rank": 64}
    toy = {} if ON_GPU else {**TOY_LATENTS, "index_head_dim": 16, "index_n_heads": 3}
    return in_catalogue("deepseek-v3.2", "deepseek_v32") | SMALL | EXPERTS | sizes | toy | {"index_topk": 50}


def checks(smoke: bool) -> Iterator[Check]:
    """Yield every check; its name ends in its type, and errors are in multiples of their bounds."""

    def of_model(name: str, config: dict[str, Any], size: int, dtype: torch.dtype, kv: str = "auto") -> Check:
        label = f"attention {name} block {size} cache {kv} {str(dtype).removeprefix('torch.')}"
        return label, partial(check_attention, config, size, dtype, kv), 1.0

    if smoke:
        yield of_model("(8, 2, 16) with sinks", of_keys(WITH_SINKS[-1]), 16, PLAIN)
        for heads in ((4, 2, 16), (8, 8, 8)):
            yield of_model(str(heads), of_keys(heads), 16, PLAIN)
        yield of_model("latents of 4 heads", of_latents(4), 16, PLAIN)
        return
    for dtype in DTYPES:
        for kernel, sweep in SWEEPS.items():
            for size in sweep.large:
                label = f"{kernel} {size} {str(dtype).removeprefix('torch.')}"
                yield label, partial(check_kernel, kernel, size, dtype), 1.0
        for number, heads in enumerate(ATTENTION_HEADS):
            for block_size in (1, (16, 32, 64)[number % 3]):
                yield of_model(str(heads), of_keys(heads), block_size, dtype)
        for heads in WITH_WINDOWS:
            yield of_model(f"{heads} window 77", of_keys(heads, 77), 16, dtype)
    for kv in ("fp8_e4m3", "fp8_e5m2"):
        for heads in FP8_HEADS:
            yield of_model(str(heads), of_keys(heads), 16, PLAIN, kv)
    for count, block_size in LATENTS:
        for kv in ("auto", "fp8_e4m3"):
            yield of_model(f"latents of {count} heads", of_latents(count), block_size, PLAIN, kv)


@torch.inference_mode()
def run_checks(shard: int, of: int, smoke: bool = False) -> bool:
    """Run every `of`-th check from the `shard`-th; print what failed."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    torch.manual_seed(torch.seed())
    passed, worst = 0, dict.fromkeys(DTYPES, 0.0)
    failures = []
    for number, (name, check, limit) in enumerate(checks(smoke)):
        if number % of != shard:
            continue
        try:
            error = check()
        except Exception as problem:  # the sweep goes on, the failure is reported below
            failures.append(f"{name}: {type(problem).__name__}: {str(problem)[:300]}")
            continue
        if not error <= limit:
            failures.append(f"{name}: error {error:.2e} > {limit:.0e}")
            continue
        passed += 1
        dtype = getattr(torch, name.split()[-1])
        worst[dtype] = max(worst[dtype], error / limit)
    torch.use_deterministic_algorithms(False)
    errors = ", ".join(f"{str(dtype).removeprefix('torch.')} {value:.2f}" for dtype, value in worst.items())
    print(f"checks {shard}/{of}: {passed} passed, {len(failures)} failed; worst errors / bounds {errors}")
    for failure in failures:
        print(f"  FAILED {failure}")
    return not failures


def run_all_checks() -> bool:
    """Run the checks in one process a core, since compiling each kernel for each shape, on the host, takes long; in
    fewer where the GPU's memory is too small for so many."""
    of = min(16, len(os.sched_getaffinity(0)))
    if ON_GPU:
        of = max(1, min(of, torch.cuda.get_device_properties(0).total_memory // BYTES_A_PROCESS))
    command = [sys.executable, __file__, "--shard"]
    shards = [subprocess.Popen([*command, f"{shard}/{of}"]) for shard in range(of)]
    codes = [shard.wait() for shard in shards]
    return not any(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", help="I/N: every N-th check from the I-th; default: all, a process a core")
    parser.add_argument("--smoke", action="store_true", help="attention at tiny sizes on the CPU")
    options = parser.parse_args()
    shard, of = map(int, (options.shard or "0/1").split("/"))
    if not (options.smoke or options.shard):
        return 0 if run_all_checks() else 1
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(gpu_linear, "plan_all", return_value={}))  # no linear is checked here
        replaced.enter_context(patch.object(filling, "DUMMY_RANGE", WEIGHTS))
        for module in (layer_checks, latent_checks):
            replaced.enter_context(patch.object(module, "filled_cache", nan_behind_keys))
            if options.smoke:
                replaced.enter_context(patch.object(module, "DECODES", (1, 4)))
        for module in (attention, triton_attn) if options.smoke else ():
            replaced.enter_context(patch.object(module, "multiprocessor_count", lambda _: 4))
        return 0 if run_checks(shard, of, options.smoke) else 1


if __name__ == "__main__":
    sys.exit(main())
