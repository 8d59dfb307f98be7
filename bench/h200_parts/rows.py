"""Lists the rows of the table: vLLM 0.26's figure, headrace's target, and whether a measured figure meets it.

vLLM's figures were measured on an H200 with torch 2.11, at its defaults, with the same shapes and definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from h200_parts.models import MODELS

LOSSY = {"fp8": 0.12, "ptpc_fp8": 0.10, "kv-fp8-e4m3": 0.06, "kv-fp8-e5m2": 0.12}
"""The largest relative logit error of each lossy format (rounding to e4m3 changes a number by 2.6% on average)."""
Figures = dict[str, tuple[float | None, ...]]
DECODE: dict[str, tuple[tuple[float | None, float | None], ...]] = {
    "bf16": ((4.97, 3.95), (5.15, 4.2), (5.49, 4.6), (7.12, 6.2)),
    "fp8": ((3.47, 2.3), (3.58, 2.5), (4.49, 3.1), (5.67, 4.6)),
    "moe": ((4.11, 2.2), (9.33, 7.5), (15.5, 14.8), (18.6, 17.0)),
    "moe-fp8": ((None, 1.9), (None, None), (None, 8.0), (None, None)),
    "awq": ((3.88, 1.85), (3.98, 2.1), (4.55, 2.7), (6.98, 6.0)),
    "moe-int4": ((None, 1.7), (None, None), (None, 5.5), (None, None)),
    "v2-lite": ((3.40, 1.9), (4.25, 4.6), (4.95, 7.5), (6.56, 8.4)),
    "gpt-oss-20b": ((2.99, 1.4), (4.71, 2.6), (7.11, 3.4), (8.50, 4.6)),
    "gpt-oss-120b": ((None, 1.9), (None, 11.0)),
}
"""model -> (vLLM, target) in ms for each of its batches; models that are not here have no target, or one of FACTORS"""
FACTORS = {"fp8-static": ("fp8", 1.02), "fp8-block": ("fp8", 1.10)}
"""model -> (model, most times its step)"""
OF_BOUND = 1.7
"""most times the bound that the steps of other models take"""
PREFILL: Figures = {
    "bf16": (52.3, 50.0, 395.0), "fp8": (32.7, 30.0, 249.0), "moe": (56.5, 40.0, 249.0), "int8": (None, 33.0, None),
    "gpt-oss-20b": (79.0, 40.0, None),
}  # fmt: skip
"""model -> vLLM and target of one prompt of 2048 tokens, vLLM of eight, in ms"""
TTFT: Figures = {"bf16": (17.0, 7.0), "fp8": (9.8, 5.0), "moe": (22.0, 17.0)}
THROUGHPUT: dict[str, Figures] = {
    "1000 prompts 128/512": {
        "bf16": (20915, 23500), "fp8": (23465, 30000), "moe": (9718, 14000), "awq": (21640, 24000),
        "gpt-oss-20b": (27226, 38000), "v2-lite": (12779, 27000),
    },
    "500 prompts 2048/256": {"bf16": (28882, 30500), "fp8": (39037, 43500)},
    "1000 prompts 1000/1000": {"gpt-oss-120b": (None, 10000)},
}  # fmt: skip
"""load -> model -> vLLM, target"""


BOUND = "bound"


@dataclass(frozen=True)
class RowSpec:
    """Describes one row of the table."""

    name: str
    part: str
    title: str
    unit: str
    vllm: float | None = None
    target: float | None = None
    share_of: str = ""
    """`target` is a share of this other row's value, or of the row's own BOUND"""
    higher_is_better: bool = False


@dataclass
class Result:
    """Holds one measured figure."""

    name: str
    value: float
    samples: list[float] = field(default_factory=list)
    """what `value` is the median of"""
    tokens: dict[str, int] = field(default_factory=dict)
    bound: float | None = None
    """the chip's own limit, in the row's unit"""
    notes: list[str] = field(default_factory=list)
    valid: bool = True


def _model_rows() -> Iterator[RowSpec]:
    for name, model in MODELS.items():
        other, factor = FACTORS.get(name, ("", OF_BOUND))
        figures = DECODE.get(name, ((None, factor),) * len(model.batches))
        for batch, (vllm, target) in zip(model.batches, figures, strict=True):
            share_of = "" if name in DECODE else f"decode/{other}/{batch}" if other else BOUND
            title = f"{model.title}, decode step, batch {batch}"
            yield RowSpec(f"decode/{name}/{batch}", name, title, "ms", vllm, target, share_of)
    for name, (one, target, eight) in PREFILL.items():
        title = MODELS[name].title
        yield RowSpec(f"prefill/{name}/1x2048", name, f"{title}, prefill 1 x 2048", "ms", one, target)
        yield RowSpec(f"prefill/{name}/8x2048", name, f"{title}, prefill 8 x 2048", "ms", eight)
    for name, (vllm, target) in TTFT.items():
        title = f"{MODELS[name].title}, time to first token, 1 x 128 offline"
        yield RowSpec(f"ttft/{name}/1x128", name, title, "ms", vllm, target)
    for load, rates in THROUGHPUT.items():
        shape = load.split()[-1].replace("/", "x")
        unit = "total tok/s" if shape == "2048x256" else "output tok/s"
        for name, (vllm, target) in rates.items():
            row, part, title = f"throughput/{name}/{shape}", f"throughput-{name}", f"{MODELS[name].title}, {load}"
            yield RowSpec(row, part, title, unit, vllm, target, higher_is_better=True)


def _other_rows() -> Iterator[RowSpec]:
    start = "process start to first token, 8B bf16"
    yield RowSpec("start/first", "start", f"{start}, first time", "s", 89.7, 20.0)
    yield RowSpec("start/again", "start", f"{start}, again on the machine", "s", 43.1, 10.0)
    yield RowSpec("start/no-tables", "start", f"{start}, without tables and caches", "s", None, 30.0)
    mxfp4 = "process start to first token, gpt-oss-20b MXFP4"
    yield RowSpec("start-gpt-oss-20b/first", "start-gpt-oss-20b", f"{mxfp4}, first time", "s", 128.0, 20.0)
    yield RowSpec("start-gpt-oss-20b/again", "start-gpt-oss-20b", f"{mxfp4}, again on the machine", "s", None, 10.0)
    at_once = "served, 1000 prompts 128/512 at once (97% of the offline figure)"
    offline = "throughput/bf16/128x512"
    yield RowSpec("served/at-once", "serve", at_once, "output tok/s", 15785, 0.97, offline, higher_is_better=True)
    for name, title, vllm, target in (
        ("rate/ttft-p50", "1024/128 at 16 req/s, TTFT p50", 67.0, 60.0),
        ("rate/ttft-p99", "1024/128 at 16 req/s, TTFT p99", 123.0, 110.0),
        ("rate/itl-p99", "1024/128 at 16 req/s, ITL p99", 36.8, 15.0),
        ("rate/tpot-p50", "1024/128 at 16 req/s, TPOT p50", 9.2, None),
        ("rate/itl-p50", "1024/128 at 16 req/s, ITL p50", 6.1, None),
        ("rate/e2el-p50", "1024/128 at 16 req/s, E2E p50", 1220.0, None),
        ("single/ttft", "one at a time 128/128, TTFT", 17.6, 9.0),
        ("single/tpot", "one at a time 128/128, TPOT", 4.90, None),
    ):
        yield RowSpec(f"served/{name}", "serve", f"served, {title}", "ms", vllm, target)
    for batch, most in ((1, 1.06), (8, 1.12), (32, 1.28)):
        drafts, plain = f"8B bf16, step of {batch}", f"drafts/bf16/0/{batch}"
        yield RowSpec(plain, "drafts", f"{drafts}, no drafts", "ms")
        yield RowSpec(
            f"drafts/bf16/3/{batch}", "drafts", f"{drafts}, 3 drafts (at most {most} x)", "ms", None, most, plain
        )
    for batch in (1, 8, 32):
        drafts = f"8B bf16, {batch} forced to one token, "
        yield RowSpec(f"drafts/bf16/plain-all/{batch}", "drafts", f"{drafts}no drafts", "ms")
        for right in range(3):
            yield RowSpec(f"drafts/bf16/right-{right}-of-3/{batch}", "drafts", f"{drafts}{right} of 3 right", "ms")
    yield RowSpec("drafts/bf16/plain-none/1", "drafts", "8B bf16, 1 drawing tokens at random, no drafts", "ms")
    yield RowSpec("drafts/bf16/ngram-none/1", "drafts", "8B bf16, 1 drawing tokens at random, 5 by ngram", "ms")
    yield RowSpec("drafts/bf16/ngram-all/1", "drafts", "8B bf16, 1 forced to one token, 5 by ngram", "ms")
    for batch in (128, 256):
        drafts, plain = f"8B bf16, {batch} forced to one token, ", f"drafts/bf16/plain/{batch}"
        yield RowSpec(plain, "drafts", f"{drafts}no drafts", "output tok/s", higher_is_better=True)
        title = f"{drafts}as many drafts as pay, of which 40% are right"
        yield RowSpec(
            f"drafts/bf16/adaptive/{batch}", "drafts", title, "output tok/s", None, 1.0, plain, higher_is_better=True
        )
    yield RowSpec("idle/bf16/128", "idle", "GPU idle between decode steps at batch 128 (trace)", "%", None, 3.0)


def _numerics_rows() -> Iterator[RowSpec]:
    part, error, covered, unlike = "numerics", "relative logit error", "positions covered", "argmax unlike, of covered"
    for model, title in (("8b4l", "8B shape, 4 layers"), ("demo", "demo model")):
        name = f"numerics/{model}"
        for kind, beside in (("", ""), ("exact", ", beside fp32")):
            row = f"{name}/{kind}-" if kind else f"{name}/"
            yield RowSpec(f"{name}/{kind or 'error'}", part, f"{title}: {error}{beside}", "", None, 1e-2)
            yield RowSpec(f"{row}covered", part, f"{title}: {covered}{beside}", "%", None, 80.0, higher_is_better=True)
            yield RowSpec(f"{row}argmax", part, f"{title}: {unlike}{beside}", "positions", None, 0.0)
        other = f"{title}: {error} beside transformers in fp32, times transformers' own"
        yield RowSpec(f"{name}/transformers", part, other, "", None, 1.2)
        for variant, bound in LOSSY.items():
            changed, lossy = f"{name}/{variant}", f"{title}, {variant}"
            yield RowSpec(f"{changed}/error", part, f"{lossy}: {error}", "", None, bound)
            yield RowSpec(f"{changed}/perplexity", part, f"{lossy}: perplexity, change", "%", None, 5.0)


SPECS = {spec.name: spec for spec in (*_model_rows(), *_other_rows(), *_numerics_rows())}


def target_of(spec: RowSpec, values: dict[str, float], bound: float | None = None) -> float | None:
    """Return the target given other rows' `values` and the row's `bound`; None without one, or where the row it is a
    share of is missing."""
    if not spec.share_of or spec.target is None:
        return spec.target
    base = bound if spec.share_of == BOUND else values.get(spec.share_of)
    return None if base is None else spec.target * base


def row_record(result: Result, values: dict[str, float]) -> dict[str, Any]:
    """Return what the JSON file holds of a figure. A name that SPECS lacks is a reading without a target."""
    spec = SPECS.get(result.name) or RowSpec(result.name, "", result.name, "")
    target = target_of(spec, values, result.bound)
    met = None
    if target is not None:
        met = result.valid and (result.value >= target if spec.higher_is_better else result.value <= target)
    share = None
    if result.bound is not None and result.value:
        share = result.value / result.bound if spec.higher_is_better else result.bound / result.value
    known = {"unit": spec.unit, "vllm": spec.vllm, "target": target, "met": met, "share_of_bound": share}
    return asdict(result) | known
