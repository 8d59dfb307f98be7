"""Runs a trial: an engine in a process of its own, to which `headrace bench serve` sends the load.

Whatever goes wrong in these processes is a result, not an error.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.advice.tune.child import ChildConfig
from headrace.advice.tune.options import TuneOptions
from headrace.advice.tune.record import Load, Result, Trial
from headrace.config import EngineConfig
from headrace.process import Child, free_port, spawn

POLL = 0.2
STOP_SECONDS = 8.0
LOAD_KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_e2el_ms")
"""What the benchmark's result file calls the fields of Load, in their order."""
WARM_UP = (128, 32)
"""Most tokens of each prompt and answer in a round that does not count: it captures graphs and sees batches of all
sizes. Kernels for longer prompts were compiled at the start."""
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Failed(Exception):
    def __init__(self, why: str, status: str = "failed") -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True)
class TrialRunner:
    """Runs a trial: starts an engine with `config` but for what the trial changes, and sends it the load."""

    config: EngineConfig
    load: TuneOptions
    vocab_size: int
    clients: int
    on_stage: Callable[[str], None]
    """Told what is going on."""

    def __call__(self, trial: Trial, limit: float) -> Result:
        """Return what came of a trial that may take `limit` seconds; nothing is raised but KeyboardInterrupt."""
        started = time.monotonic()

        def result(status: str, why: str = "", *measured: Any) -> Result:
            return Result(trial, status, time.monotonic() - started, why, *measured)

        try:
            with tempfile.TemporaryDirectory(prefix="headrace-tune-", ignore_cleanup_errors=True) as folder:
                run = _Run(self, Path(folder), started + limit)
                try:
                    settings = run.serve(changed(self.config.replace(use_profile=False), trial))
                    return result("ok", "", *run.measure(), settings)
                except _Failed as error:
                    return result(error.status, str(error))
                finally:
                    run.stop()
        except OSError as error:
            return result("failed", str(error))


def changed(config: EngineConfig, trial: Trial) -> EngineConfig:
    """Return the config with what the trial changes."""
    changes = dict(trial.changes)
    if "cudagraph_mode" in changes:
        mode = {"cudagraph_mode": changes.pop("cudagraph_mode")}
        changes["compilation_config"] = config.compilation_config | mode
    return config.replace(**changes)


class _Run:
    """The processes of one trial."""

    def __init__(self, runner: TrialRunner, folder: Path, deadline: float) -> None:
        self._runner, self._folder, self._deadline = runner, folder, deadline
        self._log = folder / "server.log"
        self._server: Child | None = None
        self._url = ""

    def serve(self, config: EngineConfig) -> dict[str, Any]:
        """Start the engine, and return what it decided, by field."""
        self._runner.on_stage("starting")
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._server = self._spawn(ChildConfig(str(self._log), dataclasses.asdict(config), port))
        while True:
            self._check_server("did not start")
            try:
                with NO_PROXY.open(f"{self._url}/v1/plan", timeout=5) as answer:
                    plan = json.load(answer)
                return {entry["field"]: entry["value"] for entry in plan["decisions"]}
            except (OSError, ValueError):
                time.sleep(POLL)

    def measure(self) -> tuple[Load, Load | None]:
        """Return what was measured under full load, and at the user's request rate where there is one."""
        load = self._runner.load
        full = [] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]
        self._bench("warm-up", 1, min(load.input_len, WARM_UP[0]), min(load.output_len, WARM_UP[1]), full)
        at_once = self._bench("at once", 2, load.input_len, load.output_len, full)
        if load.request_rate is None:
            return at_once, None
        rate = ["--request-rate", str(load.request_rate)]
        return at_once, self._bench(f"{load.request_rate:g} requests/s", 3, load.input_len, load.output_len, rate)

    def _bench(self, stage: str, seed: int, input_len: int, output_len: int, flags: list[str]) -> Load:
        runner = self._runner
        runner.on_stage(stage)
        path, log = self._folder / "result.json", self._folder / "client.log"
        path.unlink(missing_ok=True)
        argv = [
            *("bench", "serve", "--base-url", self._url, "--result-filename", str(path), "--disable-tqdm"),
            *("--num-prompts", str(runner.load.num_prompts), "--random-input-len", str(input_len)),
            *("--random-output-len", str(output_len), "--seed", str(seed), "--ignore-eos"),
            *("--vocab-size", str(runner.vocab_size), "--num-client-processes", str(runner.clients)),
        ]
        client = self._spawn(ChildConfig(str(log), argv=[*argv, *flags]))
        try:
            while client.is_alive():
                self._check_server(f"died under load ({stage})")
                time.sleep(POLL)
        finally:
            client.stop(1.0)
        if not path.is_file():
            raise _Failed(f"{stage}: {last_error(log)}")
        try:
            figures = json.loads(path.read_text())
        except ValueError:
            raise _Failed(f"{stage}: its result is cut short: {last_error(log)}") from None
        if figures["failed"]:
            why = last_error(log) if figures["completed"] == 0 else last_error(self._log)
            raise _Failed(f"{stage}: {figures['failed']} of {figures['num_prompts']} requests failed: {why}")
        return Load(*(figures[key] for key in LOAD_KEYS))

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(STOP_SECONDS)

    def _spawn(self, config: ChildConfig) -> Child:
        return spawn("headrace.advice.tune.child", msgspec.json.encode(config))

    def _check_server(self, what: str) -> None:
        assert self._server is not None
        if not self._server.is_alive():
            raise _Failed(f"the engine {what}: {last_error(self._log)}")
        if time.monotonic() > self._deadline:
            raise _Failed("took longer than a trial may", "timeout")


def last_error(log: Path) -> str:
    """Return the last line of a log that says what went wrong, else its last line."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    wrong = [line for line in lines if re.search(r"error|memory", line, re.IGNORECASE)]
    return (wrong or lines or ["no reason given"])[-1].removeprefix("headrace: error: ")[:400]
