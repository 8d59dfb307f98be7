"""How a GPU best applies a linear layer over few tokens: our kernels or the vendor's library, found by trying.

Once per machine and size: what ships with headrace for a device is taken as it is, what was measured before is read
from a file in the cache folder, and only the rest is measured, at load. Knows nothing of parts, checkpoints or ranks.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.config import cache_folder
from headrace.kernels._triton import DEVICE_FAMILY, TritonError
from headrace.kernels.fp8 import Quantized, fp8_linear, quantize_per_token
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES, GemmConfig
from headrace.kernels.norm import HalfNormed
from headrace.quantization.scheme import Around, Compute, LinearSpec, Table

logger = logging.getLogger(__name__)

Plan = tuple[GemmConfig | None, ...]
"""one a bucket; None: the vendor's library"""
Size = tuple[int, int, int]
"""(bytes an element, out_features, in_features)"""
VERSION = 3
"""of the kernels and of this file's form: measurements of another one are not used"""
SHIPPED = Path(__file__).with_name("gemm_tables.json")
ROTATED_BYTES = 256 << 20
"""Weights to walk through while measuring, so that no cache holds them."""
WORTH = 1.02
"""Our kernel is taken up to this multiple of the library's time alone: it starts beside the kernel before it."""


def plan_all(specs: list[LinearSpec], device: torch.device, fp8: torch.dtype | None = None) -> dict[Size, Table]:
    """A table for each size among `specs` that our kernels can serve. `fp8`: the weights' type, where it is that."""
    sizes = {
        ((fp8 or spec.dtype).itemsize, spec.out_features, spec.in_features): (spec.dtype, fp8 or spec.dtype)
        for spec in specs
    }
    sizes = {size: dtypes for size, dtypes in sizes.items() if (DEVICE_FAMILY, size[0], BUCKETS[0]) in CANDIDATES}
    name = torch.cuda.get_device_name(device)
    known = {**_read(_measured_file(name), name), **_read(SHIPPED, name)}
    missing = {size: dtypes for size, dtypes in sizes.items() if size not in known}
    if missing:
        logger.info("measuring linears of %d sizes that are new on %s", len(missing), name)
        known.update({size: _measure(size, *dtypes, device) for size, dtypes in missing.items()})
        torch.cuda.empty_cache()
        _write(_measured_file(name), name, known)
    return {size: by_number_of_tokens(known[size]) for size in sizes}


def hold(weight: Tensor, bias: Tensor | None, by_tokens: Table, around: Around) -> Compute:
    """weight [out, in], bias [out] or None."""
    most = len(by_tokens) - 1
    transposed = weight.t()
    gated, norm, eps, next_norm = around.activation is not None, around.norm(), around.norm_eps, around.next_norm
    many = replace(around, norm_weight=None).wrap(lambda x: F.linear(x, weight, bias))

    def compute(x: Any, residual: Tensor | None) -> Any:
        tokens = x.shape[0]
        config = by_tokens[tokens] if tokens <= most else None
        if norm is not None and (config is None or not isinstance(x, HalfNormed)):
            x = norm(x)
        if config is not None:
            return skinny_linear(x, weight, bias, config, gated=gated, residual=residual, eps=eps, next_norm=next_norm)
        if residual is not None and bias is None and not gated:
            return residual.addmm_(x, transposed)
        return many(x, residual)

    return compute


def hold_fp8(
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    by_tokens: Table,
    around: Around,
    quantize: Callable[[Tensor], Quantized],
    dtype: torch.dtype,
    many: Compute,
) -> Compute:
    """weight [out, in] fp8, scales [out]. `quantize` norms too, where `around` does; `many` serves beyond the table.

    A token alone is not quantized where its product is no matrix units' work: it would be no faster, and less exact.
    """
    most = len(by_tokens) - 1
    gated, norm, eps, next_norm = around.activation is not None, around.norm(), around.norm_eps, around.next_norm

    def compute(x: Any, residual: Tensor | None) -> Any:
        tokens = x.shape[0]
        config = by_tokens[tokens] if tokens <= most else None
        if config is None:
            return many(x, residual)
        if config.block_m == 1 and not isinstance(x, Quantized):
            plain = norm(x) if norm is not None and not isinstance(x, HalfNormed) else x
            return skinny_linear(
                plain, weight, bias, config, None, scales, dtype, gated=gated, residual=residual, eps=eps,
                next_norm=next_norm,
            )  # fmt: skip
        values, x_scales = x if isinstance(x, Quantized) else quantize(x)
        return skinny_linear(values, weight, bias, config, x_scales, scales, dtype, gated=gated, residual=residual)

    return compute


def by_number_of_tokens(plan: Plan) -> Table:
    table: Table = [None]
    for bucket, config in zip(BUCKETS, plan, strict=True):
        table += [config] * (bucket + 1 - len(table))
    return table


def _measure(size: Size, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device) -> Plan:
    """The fastest at each bucket's number of tokens, the library among them."""
    itemsize, out_features, in_features = size
    copies = max(2, -(-ROTATED_BYTES // (itemsize * out_features * in_features)))
    sizes = (out_features, in_features)
    weights = [torch.empty(sizes, device=device).uniform_(-0.1, 0.1).to(weight_dtype) for _ in range(copies)]
    scales = torch.ones(out_features, device=device) if itemsize == 1 else None
    plan: list[GemmConfig | None] = []
    for bucket in BUCKETS:
        plain = torch.empty(bucket, in_features, dtype=dtype, device=device).uniform_(-1, 1)
        best, fastest = None, WORTH * _seconds(_library(plain, weight_dtype, scales), weights)
        for config in CANDIDATES[DEVICE_FAMILY, itemsize, bucket]:
            x, x_scales = plain, None
            if scales is not None and config.block_m > 1:
                x, x_scales = quantize_per_token(plain, weight_dtype)
            run = partial(
                skinny_linear, x, bias=None, config=config, x_scale=x_scales, weight_scale=scales, dtype=dtype
            )
            try:
                seconds = _seconds(lambda weight, run=run: run(weight=weight), weights)  # type: ignore[misc]
            except TritonError as error:  # it needs more shared memory than this GPU has
                logger.debug("%s does not run here: %s", config, error)
                continue
            if seconds < fastest:
                best, fastest = config, seconds
        plan.append(best)
    return tuple(plan)


def _library(x: Tensor, weight_dtype: torch.dtype, scales: Tensor | None) -> Callable[[Tensor], Tensor]:
    if scales is None:
        return lambda weight: F.linear(x, weight)
    quantized = quantize_per_token(x, weight_dtype)
    return lambda weight: fp8_linear(*quantized, weight, scales, None, x.dtype)


def _seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Of one run, inside a graph that walks through the weights; median of three replays."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    graph.replay()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(weights))
    return statistics.median(times)


def _measured_file(name: str) -> Path:
    key = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-torch-{torch.__version__}")
    return cache_folder() / f"gemm-{key}.json"


def _read(file: Path, name: str) -> dict[Size, Plan]:
    """What a file says of the device `name`; nothing where it is missing, of another version, or no such file."""
    try:
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            return {}
        entries = content["devices"].get(name, [])
        return {tuple(entry["size"]): tuple(map(_config, entry["plan"])) for entry in entries}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a table of measured linears and is not used: %r", file, error)
        return {}


def _config(entry: dict[str, Any] | None) -> GemmConfig | None:
    return None if entry is None else GemmConfig(**entry)


def _write(file: Path, name: str, plans: dict[Size, Plan]) -> None:
    """Whole or not at all; a folder that cannot be written costs the next start a measurement, no more."""
    entries = [{"size": size, "plan": [config and asdict(config) for config in plan]} for size, plan in plans.items()]
    content = json.dumps({"version": VERSION, "devices": {name: entries}}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as fresh:
            fresh.write(content)
        os.replace(fresh.name, file)
    except OSError as error:
        logger.warning("what was measured cannot be kept in %s: %s", file, error)
