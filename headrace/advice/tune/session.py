"""Runs one call of `headrace tune`: checks what is asked, shows progress, and writes profile and report at the end."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from headrace import __version__
from headrace.advice.tune.knobs import KNOBS, is_pinned, trials_of
from headrace.advice.tune.options import TuneOptions
from headrace.advice.tune.page import page
from headrace.advice.tune.record import Journal, Result, Trial
from headrace.advice.tune.report import Report, as_json
from headrace.advice.tune.trial import TrialRunner
from headrace.advice.tune.tuner import RunTrial, Tuner, parse_seconds
from headrace.config import EngineConfig
from headrace.environment import cache_folder
from headrace.errors import ConfigError, HeadraceError
from headrace.hub import resolve_model_folder
from headrace.models.served import read_served_config
from headrace.planner.decisions import USUAL_OBJECTIVE
from headrace.planner.profile import BASE, Measured, Profile, digest, machine_name, write_profile

PINS = (*(name for name in KNOBS if name != "cudagraph_mode"), "compilation_config", "enforce_eager")
"""Fields which, given by the user, are part of what was tuned."""
MOST_CLIENTS = 4
OFF_TERMINAL = 120
LONGEST_NAME = 60
"""Characters of a model's name in the name of a folder, which may have 255 bytes with what else stands there."""


class Session:
    """Holds what is tuned, on which machine, and where its results go."""

    def __init__(self, options: TuneOptions, config: EngineConfig) -> None:
        """Raises ConfigError for what cannot be measured."""
        self.options, self.config = options, config
        self.console = Console(stderr=True, highlight=False)
        self.budget = parse_seconds(options.budget)
        self.knobs = self._knobs()
        folder = resolve_model_folder(config.model, config.revision, config.download_dir, config.load_format)
        self.model = read_served_config(folder)
        self.objective = config.objective or USUAL_OBJECTIVE
        self.machine = machine_name()
        load = options.num_prompts, options.workload
        key = digest([dataclasses.asdict(config), load, self.machine, __version__, self.model.raw])
        name = Path(config.model).name[:LONGEST_NAME] or "model"
        self.title = f"{name} on {self.machine}"
        self.folder = Path(options.output) if options.output else cache_folder() / "tune" / f"{name}-{key}"
        self.journal = Journal(self.folder / "trials.jsonl", key, self.say)
        self._status: Any = None
        self._line = ""

    def _knobs(self) -> list[str]:
        named = None if self.options.knobs is None else [name.strip() for name in self.options.knobs.split(",")]
        for name in named or ():
            if name not in KNOBS:
                raise ConfigError(f"--knobs must be of {', '.join(KNOBS)}; got {name!r}")
            if is_pinned(name, self.config):
                self.say(f"{name} is given by a flag, so it is not varied")
        return [name for name in named or KNOBS if not is_pinned(name, self.config)]

    def say(self, text: str) -> None:
        """Print a remark on standard error."""
        self.console.print(f"headrace tune: {text}", markup=False, soft_wrap=True)

    def run(self, run_trial: RunTrial | None = None) -> int:
        """Run all trials and write what came of them; `run_trial` stands in for engines in tests. Returns 0."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {str(self.folder)!r} cannot be made: {error.strerror}") from None
        if self.options.fresh:
            self.journal.start_anew()
        if self.journal.results:
            self.say(f"{len(self.journal.results)} trials of an earlier run are kept (--fresh measures anew)")
        if run_trial is None:
            clients = min(MOST_CLIENTS, max(1, len(os.sched_getaffinity(0)) // 4))
            run_trial = TrialRunner(self.config, self.options, self.model.vocab_size, clients, self._on_stage)
        tuner = Tuner(self.journal, run_trial, self.objective, self.budget, time.monotonic, self._tell)
        try:
            with self.console.status("") as self._status:
                outcome = tuner.tune(self._trials)
        except KeyboardInterrupt:
            self.say(f"interrupted; what was measured is in {self.folder}, and the same command goes on from there")
            raise
        self._finish(Report(outcome, self.objective, self.title, self._load()))
        return 0

    def _trials(self, plan: Result) -> list[Trial]:
        return trials_of(self.knobs, self.config, self.model, plan.settings, self.options)

    def _load(self) -> str:
        load = self.options
        many = f"{load.num_prompts} requests of {load.input_len} in / {load.output_len} out, "
        many += "all at once" if load.concurrency is None else f"{load.concurrency} at a time"
        return many + (f"; waiting times at {load.request_rate:g} requests/s" if load.request_rate else "")

    def _on_stage(self, stage: str) -> None:
        if self._status is not None:
            self._status.update(f"{escape(self._line)}: {stage}")

    def _tell(self, number: int, total: int, trial: Trial, result: Result | None) -> None:
        if result is None:
            self._line = f"{number}/{total} {trial.title}" if trial.changes else trial.title
            return
        text = f"{result.status}: {result.why}"
        if result.ok:
            latencies = result.latencies
            text = f"{_rate(result)}, TTFT p99 {latencies.ttft_p99:,.1f} ms, ITL p99 {latencies.itl_p99:,.1f} ms"
        self.console.print(f"{self._line}: {text}  ({result.seconds:.0f} s)", markup=False, soft_wrap=True)

    def _finish(self, report: Report) -> None:
        """Write profile and page, and print the rest. Raises HeadraceError for a file that cannot be written; the same
        command then tries again, with all that was measured."""
        text = self.folder / "report.html"
        try:
            profile = write_profile(self._profile(report), self.model)
            text.write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise HeadraceError(f"{error.filename2 or error.filename} cannot be written: {error.strerror}") from None
        if self.options.json:
            written = {"folder": str(self.folder), "profile": str(profile)}
            print(json.dumps(as_json(report) | written, indent=1))
            return
        console = Console(highlight=False)
        console = Console(highlight=False, width=console.width if console.is_terminal else OFF_TERMINAL)
        report.print(console)
        kept = f"profile  {profile} (serve and LLM take it; --no-use-profile leaves it)"
        console.print(kept, soft_wrap=True, markup=False)
        console.print(f"report   {text}", soft_wrap=True, markup=False)

    def _profile(self, report: Report) -> Profile:
        """Of the best trial, each field with what it gained alone."""
        outcome = report.outcome
        alone = {result.trial.id: report.gain(result) for result in outcome.results}
        settings = {
            name: Measured(value, outcome.plan.settings.get(name, "off"), alone[Trial({name: value}).id])
            for name, value in outcome.best.trial.changes.items()
        }
        pinned = [name for name in PINS if getattr(self.config, name) != getattr(EngineConfig(), name)]
        return Profile(
            model=self.config.model,
            machine=self.machine,
            device=outcome.plan.settings.get("device", ""),
            base={name: getattr(self.config, name) for name in (*BASE, *pinned)},
            objective=self.objective,
            workload=self.options.workload,
            when=date.today().isoformat(),
            gained=report.gained,
            settings=settings,
        )


def _rate(result: Result) -> str:
    return f"{result.at_once.tok_s:,.0f} tok/s" if result.at_once else result.status
