"""Collects what one process measures: prints each figure and each case at once, and writes the JSON file."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from datetime import UTC, datetime
from pathlib import Path

from h200_parts.bounds import Ceilings
from h200_parts.report import Record, ceilings_line, number, records
from h200_parts.rows import SPECS, Result
from h200_parts.settings import Settings


class Run:
    """Holds the figures (rows of the table) and cases (checks that pass or fail) of one process."""

    def __init__(self, settings: Settings, path: Path | None, command: str) -> None:
        self.settings, self.path = settings, path
        self.results: list[Result] = []
        self.cases: list[Record] = []
        self.part = ""
        """the part that runs, which begins the name of its cases"""
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        self.head: Record = {"date": date, "command": command, "parts": [], "seconds": {}}
        self._case_began = time.monotonic()

    @property
    def smoke(self) -> bool:
        return self.settings.smoke

    def emit(self, result: Result) -> None:
        """Record a figure."""
        self.results.append(result)
        spec = SPECS.get(result.name)
        unit = spec.unit if spec else ""
        about = [f"target {number(spec.target)}"] if spec and spec.target is not None and not spec.share_of else []
        about += [f"vLLM {number(spec.vllm)}"] if spec and spec.vllm is not None else []
        about += [f"bound {number(result.bound)}"] if result.bound is not None else []
        about += result.notes + ([] if result.valid else ["INVALID"])
        print(f"{result.name}: {number(result.value, unit)} {unit} ({'; '.join(about)})", flush=True)

    def case(self, name: str, ok: bool, said: str = "") -> None:
        """Record whether a case passed; its seconds count from the case before it."""
        gc.unfreeze()  # engines freeze what their start leaves; the next case needs that memory
        gc.collect()
        now = time.monotonic()
        seconds, self._case_began = round(now - self._case_began, 1), now
        self.cases.append({"name": f"{self.part}/{name}", "ok": ok, "said": said, "seconds": seconds})
        ended = f"{'OK  ' if ok else 'FAIL'} {self.part}/{name} ({seconds:.0f} s)"
        print(f"{ended}{': ' if said else ''}{said}", flush=True)
        self.write()

    def note(self, text: str) -> None:
        """Print a line that is not kept."""
        print(f"       {text[:240]}", flush=True)

    def done(self, seconds: float) -> None:
        """Record that the part has ended."""
        self.head["parts"].append(self.part)
        self.head["seconds"][self.part] = round(seconds, 1)
        self.write()
        print(f"part {self.part} took {seconds:.1f} s\n", flush=True)

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> Record:
        """Return what the JSON file holds."""
        cases = {"ok": all(case["ok"] for case in self.cases), "cases": self.cases} if self.cases else {}
        return {**self.head, "rows": records(self.results), **cases}

    def describe_chip(self) -> None:
        """Record which hardware, software and commit this is. Loads torch and opens the device."""
        import torch

        from h200_parts.chip import commit, gpu_name, versions

        self.head |= {"gpu": gpu_name(torch.device(self.settings.device)), "versions": versions()}
        self.head |= {"commit": self.settings.commit or commit()}

    def measure_chip(self) -> Ceilings:
        """Measure the best rates of the chip, which bounds are computed from."""
        import torch

        from h200_parts.chip import measure_ceilings

        ceilings = measure_ceilings(torch.device(self.settings.device), toy=self.smoke)
        self.head["ceilings"] = dataclasses.asdict(ceilings)
        self.describe_chip()
        print(f"{self.head['gpu']}: {ceilings_line(self.head)}", flush=True)
        return ceilings
