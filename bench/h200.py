"""Measures headrace on one NVIDIA H200 beside vLLM 0.26's figures, and runs the cases that need a GPU.

    python bench/h200.py --json all.json                       the whole table, each engine in a process of its own
    python bench/h200.py --part bf16,throughput-bf16,idle --json out/bf16.json
    python bench/h200.py --part cases --json cases.json        all cases: an OK or FAIL line each
    python bench/h200.py --part graphs,memory                  some cases
    python bench/h200.py --part formats                        models in every format of a checkpoint, and in fp8
    python bench/h200.py --part gpt-oss                        gpt-oss 20b and 120b, with throughput
    python bench/h200.py --merge out                           one table of several runs, as Markdown
    python bench/h200.py --smoke                               toy sizes on the CPU: proves that the code runs, no more

Figures, each part under 8 minutes: FIGURES.
Parts of one engine that are named together share it. `profile-*` traces decode steps at a model's largest and smallest
batch, `adapters` (LoRA) those with and without them; `structured` compares
requests under grammars with plain ones; `front-door` needs no GPU, but tests/engine and psutil.

Cases, each part under 3 minutes:

    graphs            five graph modes give the same tokens in fp32
    memory            a GPU filled by another process from the start, before the cache is allocated or while steps run:
                      no crash
    self-check        all kernels agree with their references at load, and injected faults are detected and demoted
    self-check-moe    the same for experts, at Qwen3-30B-A3B's sizes
    self-check-latent the same for attention to latents, all of them and those that an index chooses
    self-check-formats  the same for formats of a checkpoint, and gpt-oss
    invariance        --batch-invariant: tokens and logprobs bitwise as alone in traffic, chunks, preemption, hits
    fp8-memory        loading in fp8 peaks below 1.1 x the weights
    format-numerics   logits of every format of a checkpoint beside the widened model's, in fp32 and in bf16
    family-numerics   logits of every family in bf16 beside transformers', in fp32 and in bf16; tokens of graphs; what
                      torch computes inside layers (it needs tests/models and transformers)
    latent-numerics   the same of families of latents, and of those with an index in FP8 blocks
    long-latents      prompts of 131,072 tokens over latents, in one piece and in chunks, beside float64

Weights are random (uniform +-1e-3, seeded; normal embeddings and routers where there are experts, so that tokens
spread over them), prompts token ids, decoding greedy to the full length, prefix caching off,
max_model_len 8192, gpu_memory_utilization 0.9, max_num_seqs 1024. A step is (end-to-end - time to first token) /
(output - 1). Steps, prefill and first tokens are medians of 3, all else is one run. Every run measures the chip's best
rates itself; bounds are bytes and operations over those. Results are written after every part. What --batch-invariant
costs: compare `--part bf16` with and without `--engine '{"batch_invariant": true}'`. Exit code 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from h200_parts.models import MODELS
from h200_parts.report import Record, case_lines, merge, read_runs, table, whole_report
from h200_parts.rows import SPECS
from h200_parts.run import Run
from h200_parts.settings import Settings

PARTS_OF_ROWS = {spec.part for spec in SPECS.values()}
ENGINE_PARTS = {
    **{name: name for name, model in MODELS.items() if not model.drafted},
    **{f"throughput-{name}": name for name in MODELS if f"throughput-{name}" in PARTS_OF_ROWS},
    "idle": "bf16",
    **{f"profile-{name}": name for name, model in MODELS.items() if model.batches and name != "bf16"},
    "drafts": "8b-eagle3",
    "drafts-loaded": "8b-eagle3",
    "drafts-70b": "70b-eagle3",
}
"""part -> the model whose engine it runs on"""
OWN_PARTS = {
    "serve": "serving.serve_rows",
    "numerics": "numerics.numerics_rows",
    "adapters": "adapters.adapter_rows",
    "embeddings": "embeddings.embedding_rows",
    "structured": "structured.structured_rows",
    "front-door": "front_door.front_door_rows",
}
"""part -> module.function in h200_parts that takes a Run, and measures the chip and rows on what it sets up itself"""
FIGURES = ("start", "start-gpt-oss-20b", *ENGINE_PARTS, *OWN_PARTS, "ceilings")
"""Parts that measure rows of the table, in the order in which they run: a start comes first, while caches are cold."""
CASES = {
    "graphs": "invariance.graph_cases",
    "memory": "memory.memory_cases",
    "self-check": "self_check.self_check_cases",
    "self-check-moe": "self_check.self_check_moe_cases",
    "self-check-formats": "self_check.self_check_formats_cases",
    "self-check-latent": "self_check.self_check_latent_cases",
    "invariance": "invariance.invariance_cases",
    "fp8-memory": "memory.fp8_memory_cases",
    "format-numerics": "format_numerics.format_numerics_cases",
    "family-numerics": "family_numerics.family_numerics_cases",
    "latent-numerics": "family_numerics.latent_numerics_cases",
    "long-latents": "long_latents.long_latents_cases",
}
"""part -> module.function in h200_parts that takes a Run"""
NEED_A_GPU = ("memory",)
"""cases of which --smoke can run nothing"""
PARTS = (*FIGURES, *CASES)
KINDS = {
    "formats": tuple(name for name, model in MODELS.items() if model.quantization or model.format),
    "gpt-oss": ("start-gpt-oss-20b", *(part for part, model in ENGINE_PARTS.items() if model.startswith("gpt-oss"))),
    "cases": tuple(CASES),
}
"""names for several parts"""
DEFAULT_PARTS = tuple(part for part in FIGURES if not part.startswith(("profile-", "ceilings", "drafts-loaded")))


def grouped(parts: list[str]) -> list[list[str]]:
    """Return the parts that share a process: those of one engine together, every other one alone."""
    groups: dict[str, list[str]] = {}
    for part in PARTS:
        if part in parts:
            groups.setdefault(ENGINE_PARTS.get(part, part), []).append(part)
    return list(groups.values())


def own_command() -> str:
    return shlex.join(["python", "bench/h200.py", *sys.argv[1:]])


def run_group(parts: list[str], run: Run) -> None:
    """Run the parts of one group in this process."""
    if parts[0] in ENGINE_PARTS:
        run_engine_parts(parts, run)
        return
    run.part, start = parts[0], time.perf_counter()
    if run.part in CASES:
        run_cases(run)
    elif run.part.startswith("start"):  # before torch is loaded here
        from h200_parts.serving import start_rows

        start_rows(run)
        run.measure_chip()
    elif run.part in OWN_PARTS:
        function_of(OWN_PARTS[run.part])(run)
    else:
        run.measure_chip()
    run.done(time.perf_counter() - start)


def function_of(place: str) -> Callable[[Run], None]:
    """Return a function of h200_parts, given `module.function`."""
    module, name = place.split(".")
    found: Callable[[Run], None] = getattr(import_module(f"h200_parts.{module}"), name)
    return found


def run_cases(run: Run) -> None:
    """Run one part's cases. A part that raises, or that has no case, is a case that failed."""
    logging.getLogger().setLevel(logging.WARNING)
    try:
        function_of(CASES[run.part])(run)
    except Exception as error:  # the cases before it are still reported
        logging.exception("%s broke", run.part)
        run.case("runs to its end", False, f"{type(error).__name__}: {str(error)[:300]}")
    if not run.cases:
        run.case("has a case", False)
    run.describe_chip()


def run_engine_parts(parts: list[str], run: Run) -> None:
    """Run the parts of one engine, which is loaded once."""
    from h200_parts.drafts import draft_rows, seldom_right_rows
    from h200_parts.offline import Bench, decode_rows, prefill_rows, throughput_rows
    from h200_parts.profile import attention_rows, idle_rows

    ceilings = run.measure_chip()
    start = time.perf_counter()
    bench = Bench(run, MODELS[ENGINE_PARTS[parts[0]]], ceilings)
    try:
        for run.part in parts:
            if run.part in MODELS:
                decode_rows(bench)
                prefill_rows(bench)
                attention_rows(bench)
            elif run.part.startswith("throughput-"):
                throughput_rows(bench)
            elif run.part == "drafts-loaded":
                seldom_right_rows(bench, bench.model.loaded)
            elif bench.model.drafted:
                draft_rows(bench)
            else:
                idle_rows(bench)
            run.done(time.perf_counter() - start)
            start = time.perf_counter()
    finally:
        bench.close()


def run_groups(groups: list[list[str]], own: list[str]) -> Record:
    """Run each group in a process of its own, so that no group sees another's memory, faults or failure. `own`: our
    flags."""
    failed = []
    with tempfile.TemporaryDirectory(prefix="headrace-h200-") as folder:
        for index, group in enumerate(groups):
            path = Path(folder, f"{index}.json")
            command = [sys.executable, __file__, *own, "--part", ",".join(group), "--json", str(path)]
            if subprocess.run(command).returncode:
                failed.append(",".join(group))
        if failed:
            print(f"parts that failed: {' '.join(failed)}", file=sys.stderr)
        runs = read_runs(Path(folder))
    return {**merge([run | {"command": own_command()} for run in runs]), "failed": failed}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").replace("FIGURES", ", ".join(FIGURES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--part",
        help=f"parts, separated by commas; {', '.join(KINDS)}: all of that kind; default: the whole table",
    )
    made.add_argument("--json", type=Path, help="write the results to this file")
    made.add_argument("--merge", type=Path, metavar="DIR", help="measure nothing: print the table of DIR/*.json")
    made.add_argument("--tokenizer", help="folder of a tokenizer for the served and start rows; default: none is used")
    made.add_argument("--repeats", type=int, default=3, help="runs that a median is of")
    made.add_argument("--engine", default="{}", help="engine settings to add or change, as JSON")
    made.add_argument("--commit", help="the measured commit, where this is no git checkout")
    made.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    return made


def chosen_parts(options: argparse.Namespace) -> list[str]:
    """Return the parts to run. Raises SystemExit for one that does not exist."""
    cases = tuple(part for part in CASES if not (options.smoke and part in NEED_A_GPU))
    known = (*FIGURES, *cases)
    parts = options.part.split(",") if options.part else list(DEFAULT_PARTS)
    kinds = KINDS | {"cases": cases}
    parts = [one for part in parts for one in kinds.get(part, (part,))]
    if unknown := set(parts) - set(known):
        raise SystemExit(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join([*known, *KINDS])}")
    return parts


def finish(record: Record, path: Path | None) -> int:
    """Write and print what several runs gave; return the exit code."""
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n")
    print(whole_report(record))
    return 1 if record.get("failed") else 0


def main() -> int:
    options = parser().parse_args()
    if options.merge:
        return finish(merge(read_runs(options.merge)), options.json)
    groups = grouped(chosen_parts(options))
    if len(groups) > 1:
        own = ["--repeats", str(options.repeats), "--engine", options.engine]
        own += [f"--{name}={value}" for name in ("tokenizer", "commit") if (value := getattr(options, name))]
        return finish(run_groups(groups, own + (["--smoke"] if options.smoke else [])), options.json)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with tempfile.TemporaryDirectory(prefix="headrace-h200-") as work:
        settings = Settings(
            work=Path(work),
            smoke=options.smoke,
            repeats=options.repeats,
            tokenizer=options.tokenizer and str(Path(options.tokenizer).resolve()),
            commit=options.commit,
            engine=json.loads(options.engine),
        )
        run = Run(settings, options.json, own_command())
        try:
            run_group(groups[0], run)
        finally:
            run.write()
    print(table(run.record()["rows"]) if run.results else case_lines(run.cases))
    return 0 if all(case["ok"] for case in run.cases) else 1


if __name__ == "__main__":
    sys.exit(main())
