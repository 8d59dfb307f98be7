"""The rows of the table: what vLLM 0.26 measured, what headrace is to reach, and whether a figure does. Pure.

vLLM's figures are those of an H200 with torch 2.11 at its defaults, same shapes, same definitions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from h200_parts.models import MODELS

BATCHES = (1, 8, 32, 128)
LOSSY = {"fp8": 0.12, "ptpc_fp8": 0.10, "kv-fp8-e4m3": 0.06, "kv-fp8-e5m2": 0.12}
"""Formats that round: the relative logit error that each may have (e4m3 rounds a number by 2.6% on average)."""


@dataclass(frozen=True)
class RowSpec:
    name: str
    part: str
    line: str
    """the line of the short table that this row is a column of"""
    label: str
    """its place in that line"""
    unit: str
    vllm: float | None = None
    target: float | None = None
    share_of: str = ""
    """`target` is a share of this other row's value"""
    higher_is_better: bool = False


@dataclass
class Result:
    """One measured figure."""

    name: str
    value: float
    samples: list[float] = field(default_factory=list)
    """what `value` is the median of"""
    tokens: dict[str, int] = field(default_factory=dict)
    bound: float | None = None
    """the chip's own limit, in the row's unit"""
    notes: list[str] = field(default_factory=list)
    valid: bool = True


def _model_rows() -> list[RowSpec]:
    decode: dict[str, tuple[tuple[float | None, float | None], ...]] = {
        "bf16": ((4.97, 3.95), (5.15, 4.2), (5.49, 4.6), (7.12, 6.2)),
        "fp8": ((3.47, 2.3), (3.58, 2.5), (4.49, 3.1), (5.67, 4.6)),
        "moe": ((4.11, 2.2), (9.33, 7.5), (15.5, 14.8), (18.6, 17.0)),
        "moe-fp8": ((None, 1.9), (None, None), (None, 8.0), (None, None)),
    }
    prefill = {"bf16": (52.3, 50.0, 395.0), "fp8": (32.7, 30.0, 249.0), "moe": (56.5, 40.0, 249.0)}
    ttft = {"bf16": (17.0, 7.0), "fp8": (9.8, 5.0), "moe": (22.0, 17.0)}
    short = {"bf16": (20915, 23500), "fp8": (23465, 30000), "moe": (9718, 14000)}
    long = {"bf16": (28882, 30500), "fp8": (39037, 43500)}
    rows: list[RowSpec] = []
    for name, model in MODELS.items():
        for batch, (vllm, target) in zip(BATCHES, decode[name], strict=True):
            line = f"{model.title}, decode step at batch 1 / 8 / 32 / 128"
            rows.append(RowSpec(f"decode/{name}/{batch}", name, line, f"batch {batch}", "ms", vllm, target))
    for name, (one, target, eight) in prefill.items():
        line = "prefill 1 x 2048: 8B bf16 / fp8 / Qwen3"
        rows.append(RowSpec(f"prefill/{name}/1x2048", name, line, MODELS[name].title, "ms", one, target))
        line = "prefill 8 x 2048: 8B bf16 / fp8 / Qwen3"
        rows.append(RowSpec(f"prefill/{name}/8x2048", name, line, MODELS[name].title, "ms", eight))
    for name, (vllm, target) in ttft.items():
        line = "time to first token, 1 x 128 offline: 8B bf16 / fp8 / Qwen3"
        rows.append(RowSpec(f"ttft/{name}/1x128", name, line, MODELS[name].title, "ms", vllm, target))
    for shape, unit, figures in (("128x512", "output tok/s", short), ("2048x256", "total tok/s", long)):
        for name, (vllm, target) in figures.items():
            prompts = 1000 if shape == "128x512" else 500
            line = f"{prompts} prompts {shape.replace('x', '/')}: 8B bf16 / fp8" + (
                " / Qwen3" if "moe" in figures else ""
            )
            rows.append(
                RowSpec(
                    f"throughput/{name}/{shape}",
                    f"throughput-{name}",
                    line,
                    MODELS[name].title,
                    unit,
                    vllm,
                    target,
                    higher_is_better=True,
                )
            )
    return rows


def _other_rows() -> list[RowSpec]:
    start = "process start to first token, 8B bf16: first time / again / without tables and caches"
    rate = "served, 1024/128 at 16 req/s: TTFT p50 / p99, ITL p99"
    more = "served, 1024/128 at 16 req/s: TPOT p50, ITL p50, E2E p50"
    drafts = "8B bf16, step of 8 requests with 0 / 3 drafts each (at most 1.25 x)"
    single = "served, one at a time 128/128: TTFT, TPOT"
    return [
        RowSpec("start/first", "start", start, "first time", "s", 89.7, 20.0),
        RowSpec("start/again", "start", start, "again on the machine", "s", 43.1, 10.0),
        RowSpec("start/no-tables", "start", start, "without tables and caches", "s", None, 30.0),
        RowSpec(
            "served/at-once",
            "serve",
            "served, 1000 prompts 128/512 at once (97% of the offline figure)",
            "output",
            "output tok/s",
            15785,
            0.97,
            share_of="throughput/bf16/128x512",
            higher_is_better=True,
        ),
        RowSpec("served/rate/ttft-p50", "serve", rate, "TTFT p50", "ms", 67.0, 60.0),
        RowSpec("served/rate/ttft-p99", "serve", rate, "TTFT p99", "ms", 123.0, 110.0),
        RowSpec("served/rate/itl-p99", "serve", rate, "ITL p99", "ms", 36.8, 15.0),
        RowSpec("served/rate/tpot-p50", "serve", more, "TPOT p50", "ms", 9.2),
        RowSpec("served/rate/itl-p50", "serve", more, "ITL p50", "ms", 6.1),
        RowSpec("served/rate/e2el-p50", "serve", more, "E2E p50", "ms", 1220.0),
        RowSpec("served/single/ttft", "serve", single, "TTFT", "ms", 17.6, 9.0),
        RowSpec("served/single/tpot", "serve", single, "TPOT", "ms", 4.90),
        RowSpec("drafts/bf16/0", "drafts", drafts, "no drafts", "ms"),
        RowSpec("drafts/bf16/3", "drafts", drafts, "3 drafts", "ms", None, 1.25, share_of="drafts/bf16/0"),
        RowSpec("idle/bf16/128", "idle", "GPU idle between decode steps at batch 128 (trace)", "idle", "%", None, 3.0),
    ]


def _numerics_rows() -> list[RowSpec]:
    rows = []
    for model, title in (("8b4l", "8B shape, 4 layers"), ("demo", "demo model")):
        line = f"{title}: logit error / covered / argmax unlike / the same beside fp32 / unlike among graph modes"
        part = "numerics"
        rows += [
            RowSpec(f"numerics/{model}/error", part, line, "relative logit error", "", None, 1e-2),
            RowSpec(f"numerics/{model}/covered", part, line, "covered", "%", None, 80.0, higher_is_better=True),
            RowSpec(f"numerics/{model}/argmax", part, line, "argmax unlike, of covered", "positions", None, 0.0),
            RowSpec(f"numerics/{model}/exact", part, line, "the same against fp32: error", "", None, 1e-2),
            RowSpec(f"numerics/{model}/exact-covered", part, line, "covered", "%", None, 80.0, higher_is_better=True),
            RowSpec(f"numerics/{model}/exact-argmax", part, line, "argmax unlike", "positions", None, 0.0),
            RowSpec(f"numerics/{model}/modes", part, line, "unlike among graph modes", "tokens", None, 0.0),
        ]
        for variant, bound in LOSSY.items():
            line = f"{title}, {variant}: logit error, perplexity"
            name = f"numerics/{model}/{variant}"
            rows.append(RowSpec(f"{name}/error", part, line, "relative logit error", "", None, bound))
            rows.append(RowSpec(f"{name}/perplexity", part, line, "perplexity, change", "%", None, 5.0))
    return rows


SPECS = {spec.name: spec for spec in (*_model_rows(), *_other_rows(), *_numerics_rows())}


def target_of(spec: RowSpec, values: dict[str, float]) -> float | None:
    """`values`: what other rows measured. None where there is none, or where its base was not measured."""
    if not spec.share_of or spec.target is None:
        return spec.target
    base = values.get(spec.share_of)
    return None if base is None else spec.target * base


def row_record(result: Result, values: dict[str, float]) -> dict[str, Any]:
    """What the JSON holds of a figure; a name without a spec is a reading that nothing is held against."""
    spec = SPECS.get(result.name) or RowSpec(result.name, "", result.name, "", "")
    target = target_of(spec, values)
    met = None
    if target is not None:
        met = result.valid and (result.value >= target if spec.higher_is_better else result.value <= target)
    share = None
    if result.bound is not None and result.value:
        share = result.value / result.bound if spec.higher_is_better else result.bound / result.value
    known = {"unit": spec.unit, "vllm": spec.vllm, "target": target, "met": met, "share_of_bound": share}
    return asdict(result) | known
