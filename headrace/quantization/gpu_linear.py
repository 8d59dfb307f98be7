"""Chooses, for linear layers over few tokens on a GPU, the fastest of our kernels and the vendor's library.

Each size of weight is measured once per machine. Sizes that headrace ships figures for are not measured, nor are those
whose figures an earlier start left in the cache folder; the rest are, at load. Knows no parts, checkpoints or ranks.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.environment import cache_folder
from headrace.kernels._triton import DEVICE_FAMILY, TritonError
from headrace.kernels.fp8 import NarrowWeight, Quantized, Rounding, fp8_linear, quantize
from headrace.kernels.gemm import skinny_linear
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES, TILED, GemmConfig
from headrace.kernels.narrow import narrow_linear
from headrace.kernels.norm import HalfNormed
from headrace.kernels.tiled import LARGEST_GROUP, TiledWeight
from headrace.quantization.scheme import Compute, FusedOps, GemmTable, LinearSpec

logger = logging.getLogger(__name__)

Plan = tuple[GemmConfig | None, ...]
"""the kernel configuration for each of BUCKETS; None: the vendor's library"""
Size = tuple[int | str, int, int]
"""(what the weight is of, out_features, in_features): bytes an element, where those of fp8 have a scale an output;
`int8`; `fp8/128`, where blocks of 128 inputs have a scale"""
TiledSize = tuple[str, int, int]
"""the same of a TiledWeight, which `kind_of` describes"""
MULTIPLE = 16
"""The vendor's library takes fp8 whose numbers of inputs and of outputs are multiples of this."""
VERSION = 3
"""of the kernels and of the measurements' file: measurements of another version are not used"""
SHIPPED = Path(__file__).with_name("gemm_tables.json")
ROTATED_BYTES = 256 << 20
"""of weights that are multiplied in turn while measuring, so that no cache holds the next one"""
WORTH = 1.02
"""Our kernel is taken if it needs at most so many times the library's time: in a step it gains by starting early,
beside the kernel in front of it, which this measurement does not show."""


def size_of(spec: LinearSpec, rounding: Rounding | None = None) -> Size:
    """Return the key of a linear's table. `rounding`: how its activations are rounded; None: the weight has their
    type."""
    kind: int | str = 1
    if rounding is None:
        kind = spec.dtype.itemsize
    elif rounding.dtype == torch.int8:
        kind = "int8"
    elif rounding.group:
        kind = f"fp8/{rounding.group}"
    return kind, spec.out_features, spec.in_features


def plan_all(
    specs: list[LinearSpec], device: torch.device, rounding: Callable[[LinearSpec], Rounding] | None = None
) -> dict[Size, GemmTable]:
    """Return a table for each size among `specs` that our kernels can serve, measuring sizes that are new. `rounding`:
    of each linear's activations; None: weights have their type."""
    roundings = [None if rounding is None else rounding(spec) for spec in specs]
    sizes = {size_of(spec, to): (spec.dtype, to) for spec, to in zip(specs, roundings, strict=True)}
    sizes = {size: types for size, types in sizes.items() if _candidates(size[0], BUCKETS[0])}
    measures = {size: partial(_measure, size, *types, device) for size, types in sizes.items()}
    return {size: table_of(plan) for size, plan in _plans(device, measures).items()}


def _candidates(kind: int | str, bucket: int) -> tuple[GemmConfig, ...]:
    return CANDIDATES.get((DEVICE_FAMILY, "fp8 blocks" if str(kind).startswith("fp8/") else kind, bucket), ())


def kind_of(weight: TiledWeight) -> str:
    """Return what a weight's kernels depend on besides its size."""
    group = 0 if weight.group_size == LARGEST_GROUP else weight.group_size
    return f"{weight.values}{weight.bits}/{group}"


def plan_tiled(
    weight: TiledWeight, x_dtype: torch.dtype, library: Callable[[Tensor, TiledWeight], Tensor]
) -> GemmTable:
    """Return the table for weights like this one, which are measured if they are new. `library`: the product of x with
    a weight that is widened first."""
    size = (kind_of(weight), weight.out_features, weight.in_features)
    if x_dtype.itemsize != 2:
        return table_of((None,) * len(BUCKETS))
    plans = _plans(weight.codes.device, {size: partial(_measure_tiled, weight, x_dtype, library)})
    return table_of(plans[size])


Key = TypeVar("Key", Size, TiledSize)


def _plans(device: torch.device, measures: Mapping[Key, Callable[[], Plan]]) -> dict[Key, Plan]:
    """Return the plan of each size. Those that are new on such a device are measured, and kept for later starts."""
    name = torch.cuda.get_device_name(device)
    file = _measured_file(name)
    known: dict[Any, Plan] = {**_read(file, name), **_read(SHIPPED, name)}
    missing = [size for size in measures if size not in known]
    if missing:
        sizes = ", ".join(f"{outputs} x {inputs}" for _, outputs, inputs in missing)
        logger.info("measuring linears of sizes that are new on %s: %s", name, sizes)
        known |= {size: measures[size]() for size in missing}
        torch.cuda.empty_cache()
        _write(file, name, known)
    return {size: known[size] for size in measures}


def by_table(
    weight: Tensor | TiledWeight | NarrowWeight,
    bias: Tensor | None,
    table: GemmTable,
    fused: FusedOps,
    many: Compute,
    quantize: Callable[[Any], Quantized] | None = None,
    dtype: torch.dtype | None = None,
    inputs: Callable[[Tensor], Tensor] | None = None,
) -> Compute:
    """Return the function that applies weight [out, in] by our kernels as `table` says, and otherwise calls `many`. To
    one token adapters are added as to several, by the matrix units; they are given activations that are not rounded,
    so that who rounds these leaves them to `many`. A
    NarrowWeight has outputs of `dtype`, and `quantize`, which makes the input of its type (and norms it, where that is
    fused). A token alone is quantized only for the matrix units: else that were no faster, and less exact, also with
    static scales, which cut off what lay outside of what a tool saw. `inputs`: makes of (normed) activations, column by
    column, those that the weight is multiplied by; None: they are."""
    most = len(table) - 1
    gated, norm, eps, next_norm = fused.activation is not None, fused.norm(), fused.norm_eps, fused.next_norm
    addend = fused.addend

    def compute(x: Any, residual: Tensor | None) -> Any:
        tokens = x.shape[0]
        adapted = addend is not None and addend.wanted
        beyond = tokens > most or (adapted and addend is not None and not (addend.fuses and quantize is None))
        config = None if beyond else table[max(tokens, 2) if adapted else tokens]
        if config is None or (config.block_m == 1 and isinstance(x, Quantized)):
            return many(x, residual)
        if quantize is not None and config.block_m > 1 and not isinstance(x, Quantized):
            x = quantize(x)
        elif norm is not None and not isinstance(x, (HalfNormed, Quantized)):
            x = norm(x)
        adapters = addend.given(x, isinstance(weight, Tensor)) if adapted and addend is not None else None
        if inputs is not None:
            x = x._replace(scaled=inputs(x.scaled)) if isinstance(x, HalfNormed) else inputs(x)
        following = None if isinstance(x, Quantized) else next_norm  # who quantizes norms in the same pass
        return skinny_linear(
            x,
            weight,
            bias,
            config,
            dtype,
            gated=gated,
            activation=fused.gate,
            residual=residual,
            eps=eps,
            next_norm=following,
            adapters=adapters,
        )

    return compute


def by_library(weight: Tensor, bias: Tensor | None, fused: FusedOps) -> Compute:
    """Return the function that applies weight [out, in] by the vendor's library, for any number of tokens."""
    plain, norm, transposed = fused.wrap(lambda x: F.linear(x, weight, bias)), fused.norm(), weight.t()
    adds = bias is None and fused.activation is None

    def compute(x: Any, residual: Tensor | None) -> Any:
        if residual is None or not adds:
            return plain(x, residual)
        x = x if norm is None else norm(x)
        residual.addmm_(x, transposed)
        if fused.apart and fused.addend is not None:
            fused.addend.add(x, residual)
        return residual

    return compute


def table_of(plan: Plan) -> GemmTable:
    """Return the table with an entry for each number of tokens, given the configurations of BUCKETS."""
    table: GemmTable = [None]
    for bucket, config in zip(BUCKETS, plan, strict=True):
        table += [config] * (bucket + 1 - len(table))
    return table


def _measure(size: Size, dtype: torch.dtype, to: Rounding | None, device: torch.device) -> Plan:
    """Return the fastest at each bucket's number of tokens, the library among them."""
    copies = max(2, -(-ROTATED_BYTES // (size[1] * size[2] * (dtype if to is None else to.dtype).itemsize)))
    weights: list[Any] = [_random_weight(size, dtype, to, device) for _ in range(copies)]
    plan: list[GemmConfig | None] = []
    for bucket in BUCKETS:
        plain = torch.empty(bucket, size[2], dtype=dtype, device=device).uniform_(-1, 1)
        rounded = plain if to is None else quantize(plain, to)

        def ours(config: GemmConfig, weight: Any, plain: Any = plain, rounded: Any = rounded) -> Tensor:
            out: Tensor = skinny_linear(rounded if config.block_m > 1 else plain, weight, None, config, dtype)
            return out

        plan.append(_fastest(_candidates(size[0], bucket), ours, partial(_library, rounded, dtype), weights))
    return tuple(plan)


def _random_weight(size: Size, dtype: torch.dtype, to: Rounding | None, device: torch.device) -> Tensor | NarrowWeight:
    _, outputs, inputs = size
    wide = torch.empty(outputs, inputs, device=device).uniform_(-0.1, 0.1)
    if to is None:
        return wide.to(dtype)
    values = wide.mul_(1000).to(torch.int8) if to.dtype == torch.int8 else wide.to(to.dtype)
    if to.group:
        blocks = -(-outputs // to.group), to.num_groups(inputs)
        return NarrowWeight(values, torch.ones(blocks, device=device), to.group, to.group)
    return NarrowWeight(values, torch.ones(outputs, device=device))


def _library(x: Any, dtype: torch.dtype, weight: Any) -> Tensor:
    """Return the product by what serves many tokens."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight)
    if has_library(weight):
        return fp8_linear(x, weight.values, weight.scales, None, dtype)
    return narrow_linear(x, weight, None, dtype)


def has_library(weight: NarrowWeight) -> bool:
    """Tell whether the vendor's library multiplies by the weight."""
    even = all(size % MULTIPLE == 0 for size in weight.shape)
    return weight.values.dtype != torch.int8 and not weight.rows and even


def _measure_tiled(weight: TiledWeight, dtype: torch.dtype, library: Callable[[Tensor, TiledWeight], Tensor]) -> Plan:
    """Return the fastest at each bucket's number of tokens for weights like this one."""
    copies = min(1000, max(2, -(-ROTATED_BYTES // weight.num_bytes)))
    weights = [weight.clone() for _ in range(copies)]
    plan: list[GemmConfig | None] = []
    for bucket in BUCKETS:
        x = torch.empty(bucket, weight.in_features, dtype=dtype, device=weight.codes.device).uniform_(-1, 1)

        def ours(config: GemmConfig, weight: TiledWeight, x: Tensor = x) -> Tensor:
            out: Tensor = skinny_linear(x, weight, None, config, gated=weight.gated)
            return out

        plan.append(_fastest(TILED[DEVICE_FAMILY, bucket], ours, partial(library, x), weights))
    return tuple(plan)


Held = TypeVar("Held", Tensor, TiledWeight, NarrowWeight)


def _fastest(
    configs: tuple[GemmConfig, ...],
    ours: Callable[[GemmConfig, Held], Tensor],
    library: Callable[[Held], Tensor],
    weights: list[Held],
) -> GemmConfig | None:
    """Return the configuration that takes the least time; None: the library does."""
    best, fastest = None, WORTH * graph_seconds(library, weights)
    for config in configs:
        try:
            seconds = graph_seconds(partial(ours, config), weights)
        except TritonError as error:  # it needs more shared memory than this GPU has
            logger.debug("%s does not run here: %s", config, error)
            continue
        if seconds < fastest:
            best, fastest = config, seconds
    return best


def graph_seconds(run: Callable[[Any], object], inputs: Sequence[Any], repeats: int = 3) -> float:
    """Return the time of one run, inside a graph that takes the inputs in turn: the median of so many replays. The
    inputs should be more memory than the caches hold."""
    run(inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in inputs:
            run(one)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(inputs))
    return statistics.median(times)


def _measured_file(name: str) -> Path:
    key = "".join(letter if letter.isalnum() else "-" for letter in f"{name}-torch-{torch.__version__}")
    return cache_folder() / f"gemm-{key}.json"


def _read(file: Path, name: str) -> dict[Size | TiledSize, Plan]:
    """Return what a file says of the device `name`; nothing if it is missing, of another version or damaged."""
    try:
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            return {}
        entries = content["devices"].get(name, [])
        return {
            tuple(entry["size"]): tuple(config and GemmConfig(**config) for config in entry["plan"])
            for entry in entries
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a table of measured linears and is not used: %r", file, error)
        return {}


def _write(file: Path, name: str, plans: dict[Size | TiledSize, Plan]) -> None:
    """Write the file whole or not at all. If the folder cannot be written, the next start measures again."""
    entries = [{"size": size, "plan": [config and asdict(config) for config in plan]} for size, plan in plans.items()]
    content = json.dumps({"version": VERSION, "devices": {name: entries}}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as fresh:
            fresh.write(content)
        os.replace(fresh.name, file)
    except OSError as error:
        logger.warning("what was measured cannot be kept in %s: %s", file, error)
