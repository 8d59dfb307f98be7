"""The cases that CI runs on a CPU with injected faults, on one NVIDIA H200. An OK or FAIL line a case; exit code 1 if
any fails.

    python bench/h200_cases.py --json cases.json              all parts, each in a process of its own
    python bench/h200_cases.py --part graphs,memory
    python bench/h200_cases.py --smoke                        toy sizes on the CPU: proves that the code runs, no more

Parts, each meant to take less than 3 minutes: PARTS.

    graphs            five graph modes give the same tokens: all of them in fp32; in bf16 it is said how many
    memory            a GPU that somebody else fills, shares too small, allocations that fail while weights are read, a
                      step is profiled, the cache is taken, a step runs, a graph is captured: no crash, or one line
    two-instances     two whole 8B engines at gpu_memory_utilization 0.45, one after the other and at once
    self-check        all kernels agree with their references at load, and planted faults are found and demoted
    self-check-moe    the same for experts, at Qwen3-30B-A3B's sizes
    invariance        --batch-invariant: tokens and logprobs bitwise as alone in traffic, chunks, preemption, hits
    invariance-cost   what that flag costs: decode steps, prefill and throughput of the 8B
    fp8-memory        loading in fp8 takes less than 1.1 x what the weights take
    unasked-cache     the KV cache is the model's where nobody asks; --objective throughput takes fp8, and gives it back
                      where it moves the model too far

All have run on an H200, unasked-cache with other defaults: of it the way back has.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from h200_cases_parts.report import Report, write_cases

PARTS = {
    "graphs": "graphs.graph_cases",
    "memory": "memory.memory_cases",
    "two-instances": "memory.two_instances",
    "self-check": "self_check.self_check_cases",
    "self-check-moe": "self_check.self_check_moe_cases",
    "invariance": "invariance.invariance_cases",
    "invariance-cost": "invariance.invariance_cost",
    "fp8-memory": "fp8_memory.fp8_memory_cases",
    "unasked-cache": "fp8_cache.unasked_cache_cases",
}
"""part -> module.function that takes a Report"""
ON_A_CPU = ("graphs", "self-check", "self-check-moe", "invariance", "fp8-memory", "unasked-cache")
"""parts of which --smoke can run something"""


def run_part(part: str, path: Path | None, smoke: bool) -> list[Any]:
    """In this process."""
    logging.basicConfig(level=logging.WARNING)
    module, function = PARTS[part].split(".")
    with tempfile.TemporaryDirectory(prefix="headrace-cases-") as work:
        report = Report(part, path, Path(work), smoke)
        try:
            getattr(import_module(f"h200_cases_parts.{module}"), function)(report)
        except Exception as error:  # a part that breaks is a case that fails; the others have been said
            logging.exception("%s broke", part)
            report.case("runs to its end", False, f"{type(error).__name__}: {str(error)[:300]}")
        if not report.cases:
            report.case("says anything", False)
    return report.cases


def run_parts(parts: list[str], smoke: bool) -> list[dict[str, Any]]:
    """Each in a process of its own, so that one's memory, or its planted fault, is not the next one's."""
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headrace-cases-") as folder:
        for part in parts:
            path = Path(folder, f"{part}.json")
            command = [sys.executable, __file__, "--part", part, "--json", str(path), *(["--smoke"] if smoke else [])]
            began = time.monotonic()
            code = subprocess.run(command).returncode
            seconds = round(time.monotonic() - began, 1)
            found = json.loads(path.read_text())["cases"] if path.exists() else []
            if code and all(case["ok"] for case in found):
                said = f"exit code {code}"
                found.append({"name": f"{part}/ends well", "ok": False, "said": said, "seconds": seconds})
                print(f"FAIL {part}/ends well: {said}", flush=True)
            cases += found
            print(f"part {part} took {seconds:.0f} s\n", flush=True)
    return cases


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=(__doc__ or "").replace("PARTS", ", ".join(PARTS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--part", help="parts, separated by commas; default: all")
    made.add_argument("--json", type=Path, help="write the cases to this file")
    made.add_argument("--smoke", action="store_true", help=f"toy sizes on the CPU, of {', '.join(ON_A_CPU)}")
    return made


def main() -> int:
    options = parser().parse_args()
    known = ON_A_CPU if options.smoke else tuple(PARTS)
    parts = options.part.split(",") if options.part else list(known)
    if unknown := set(parts) - set(known):
        raise SystemExit(f"unknown part {', '.join(sorted(unknown))}; parts are {', '.join(known)}")
    if len(parts) == 1:
        return int(not all(case.ok for case in run_part(parts[0], options.json, options.smoke)))
    cases = run_parts(parts, options.smoke)
    if options.json:
        write_cases(options.json, cases)
    failed = [case["name"] for case in cases if not case["ok"]]
    print(f"FAIL: {len(failed)} of {len(cases)}: {', '.join(failed)}" if failed else f"OK: all {len(cases)} cases")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
