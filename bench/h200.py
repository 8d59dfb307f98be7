"""The whole comparison with vLLM 0.26 on one NVIDIA H200: latency, prefill, throughput, start, served, idle, numerics.

    python bench/h200.py --json all.json                       everything, each engine in a process of its own
    python bench/h200.py --part bf16,throughput-bf16,idle --json out/bf16.json
    python bench/h200.py --merge out                           one table of several runs, as Markdown
    python bench/h200.py --smoke                               toy sizes on the CPU: proves that the code runs, no more

Parts, each under 8 minutes: PARTS.
Parts of one engine that are named together share it. `profile-*` traces decode steps at batch 128 and 1.

Weights are random (uniform +-1e-3, seeded), prompts token ids, decoding greedy to the full length, prefix caching off,
max_model_len 8192, gpu_memory_utilization 0.9, max_num_seqs 1024. A step is (end-to-end - time to first token) /
(output - 1). Steps, prefill and first tokens are medians of 3, all else is one run. Every run measures the chip's
ceilings itself; bounds are bytes and operations over those. Results are written after every part.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from h200_parts.models import MODELS
from h200_parts.report import Record, ceilings_line, full_table, merge, number, read_runs, records, whole_report
from h200_parts.rows import SPECS, Result
from h200_parts.settings import Settings

ENGINE_PARTS = {
    **{name: name for name in MODELS},
    **{f"throughput-{name}": name for name in MODELS},
    "idle": "bf16",
    **{f"profile-{name}": name for name in MODELS if name != "bf16"},
    "drafts": "bf16",
}
"""part -> the model whose engine it runs on"""
PARTS = ("start", *ENGINE_PARTS, "serve", "numerics", "ceilings")
"""In the order in which they run: a start is timed before anything has been loaded from disk."""
DEFAULT_PARTS = tuple(part for part in PARTS if not part.startswith(("profile-", "ceilings")))


def grouped(parts: list[str]) -> list[list[str]]:
    """Parts that one process runs: those of one engine together, every other one alone."""
    groups: dict[str, list[str]] = {}
    for part in PARTS:
        if part in parts:
            groups.setdefault(ENGINE_PARTS.get(part, part), []).append(part)
    return list(groups.values())


def own_command() -> str:
    return shlex.join(["python", "bench/h200.py", *sys.argv[1:]])


class Run:
    """One process's results, printed and written as they come."""

    def __init__(self, settings: Settings, path: Path | None) -> None:
        self.settings, self.path = settings, path
        self.results: list[Result] = []
        self.head: Record = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
            "command": own_command(),
            "parts": [],
            "seconds": {},
        }

    def emit(self, result: Result) -> None:
        self.results.append(result)
        spec = SPECS.get(result.name)
        unit = spec.unit if spec else ""
        about = [f"target {number(spec.target)}"] if spec and spec.target is not None and not spec.share_of else []
        about += [f"vLLM {number(spec.vllm)}"] if spec and spec.vllm is not None else []
        about += [f"bound {number(result.bound)}"] if result.bound is not None else []
        about += result.notes + ([] if result.valid else ["INVALID"])
        print(f"{result.name}: {number(result.value, unit)} {unit} ({'; '.join(about)})", flush=True)

    def done(self, part: str, seconds: float) -> None:
        self.head["parts"].append(part)
        self.head["seconds"][part] = round(seconds, 1)
        self.write()
        print(f"part {part} took {seconds:.1f} s\n", flush=True)

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> Record:
        return {**self.head, "rows": records(self.results)}

    def measure_chip(self) -> Any:
        """Ceilings, and what machine and software this is."""
        import torch
        from h200_parts.chip import commit, gpu_name, measure_ceilings, versions

        device = torch.device(self.settings.device)
        ceilings = measure_ceilings(device, toy=self.settings.smoke)
        self.head |= {"ceilings": dataclasses.asdict(ceilings), "gpu": gpu_name(device)}
        self.head |= {"versions": versions(), "commit": self.settings.commit or commit()}
        print(f"{self.head['gpu']}: {ceilings_line(self.head)}", flush=True)
        return ceilings


def run_group(parts: list[str], run: Run) -> None:
    """Parts of one group, in this process."""
    if parts[0] in ENGINE_PARTS:
        run_engine_parts(parts, run)
        return
    from h200_parts.serving import serve_rows, start_rows

    start = time.perf_counter()
    if parts == ["start"]:  # first of all, and before torch is loaded here
        start_rows(run.settings, run.emit)
        run.measure_chip()
    else:
        run.measure_chip()
        if parts == ["serve"]:
            serve_rows(run.settings, run.emit)
        elif parts == ["numerics"]:
            from h200_parts.numerics import numerics_rows

            numerics_rows(run.settings, run.emit)
    run.done(parts[0], time.perf_counter() - start)


def run_engine_parts(parts: list[str], run: Run) -> None:
    from h200_parts.drafts import draft_rows
    from h200_parts.offline import Bench, decode_rows, prefill_rows, throughput_rows
    from h200_parts.profile import idle_rows

    ceilings = run.measure_chip()
    start = time.perf_counter()
    bench = Bench(run.settings, MODELS[ENGINE_PARTS[parts[0]]], ceilings)
    try:
        for part in parts:
            if part in MODELS:
                decode_rows(bench, run.emit)
                prefill_rows(bench, run.emit)
            elif part.startswith("throughput-"):
                throughput_rows(bench, run.emit)
            elif part == "drafts":
                draft_rows(bench, run.emit)
            else:
                idle_rows(bench, run.emit)
            bench.count_experts(run.emit)
            run.done(part, time.perf_counter() - start)
            start = time.perf_counter()
    finally:
        bench.close()


def run_groups(groups: list[list[str]], own: list[str]) -> Record:
    """Each in a process of its own, so that one's memory, or its failure, is not the next one's. `own`: our flags."""
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
        description=(__doc__ or "").replace("PARTS", ", ".join(PARTS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--part", help="parts, separated by commas; default: all but profile-*")
    made.add_argument("--json", type=Path, help="write the results to this file")
    made.add_argument("--merge", type=Path, metavar="DIR", help="measure nothing: print the table of DIR/*.json")
    made.add_argument("--tokenizer", help="folder of a tokenizer for the served and start rows; default: none is used")
    made.add_argument("--repeats", type=int, default=3, help="runs that a median is of")
    made.add_argument("--client-processes", type=int, default=4, help="of the serving client")
    made.add_argument("--engine", default="{}", help="engine settings to add or change, as JSON")
    made.add_argument("--commit", help="what is measured, where this is no git checkout")
    made.add_argument("--smoke", action="store_true", help="toy sizes on the CPU")
    return made


def main() -> int:
    options = parser().parse_args()
    if options.merge:
        record = merge(read_runs(options.merge))
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(whole_report(record))
        return 0
    parts = options.part.split(",") if options.part else list(DEFAULT_PARTS)
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    groups = grouped(parts)
    if len(groups) > 1:
        own = ["--repeats", str(options.repeats), "--client-processes", str(options.client_processes)]
        own += ["--engine", options.engine]
        own += [f"--{name}={value}" for name in ("tokenizer", "commit") if (value := getattr(options, name))]
        record = run_groups(groups, own + (["--smoke"] if options.smoke else []))
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(whole_report(record))
        return 1 if record["failed"] else 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with tempfile.TemporaryDirectory(prefix="headrace-h200-") as work:
        settings = Settings(
            work=Path(work),
            smoke=options.smoke,
            repeats=options.repeats,
            tokenizer=options.tokenizer and str(Path(options.tokenizer).resolve()),
            client_processes=options.client_processes,
            commit=options.commit,
            engine=json.loads(options.engine),
        )
        run = Run(settings, options.json)
        try:
            run_group(groups[0], run)
        finally:
            run.write()
    print(full_table(run.record()["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
