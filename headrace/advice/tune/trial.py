"""One trial: an engine served in a process of its own, loads sent by `headrace bench serve`, and what came back.

Whatever goes wrong in there is a result. Decides nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.advice.tune.child import Orders
from headrace.advice.tune.record import Load, Result, Trial
from headrace.config import EngineConfig
from headrace.process import Child, spawn

POLL = 0.2
STOP_SECONDS = 8.0
WARM_UP = (128, 32)
"""Most tokens of each prompt and answer in a round before the first that counts: graphs are captured, and batches of
all sizes seen. Kernels for longer prompts were compiled at the start."""
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Traffic:
    """What is sent."""

    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def at_once(self) -> int:
        """Requests in flight under full load."""
        return min(self.num_prompts, self.concurrency or self.num_prompts)


class _Failed(Exception):
    def __init__(self, why: str, status: str = "failed") -> None:
        super().__init__(why)
        self.status = status


class TrialRunner:
    """Starts engines that are `config` but for what a trial changes."""

    def __init__(
        self, config: EngineConfig, workload: Traffic, vocab_size: int, clients: int, on_stage: Callable[[str], None]
    ) -> None:
        self._config, self._load, self._vocab_size = config.replace(use_profile=False), workload, vocab_size
        self._clients, self._on_stage = clients, on_stage

    def __call__(self, trial: Trial, limit: float) -> Result:
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="headrace-tune-", ignore_cleanup_errors=True) as folder:
                return self._try(trial, Path(folder), started, limit)
        except OSError as error:
            return Result(trial, "failed", time.monotonic() - started, str(error))

    def _try(self, trial: Trial, folder: Path, started: float, limit: float) -> Result:
        run = _Run(folder, started + limit, self._on_stage)
        try:
            settings = run.serve(changed(self._config, trial))
            at_once, at_rate = self._measure(run)
            return Result(trial, "ok", time.monotonic() - started, "", at_once, at_rate, settings)
        except _Failed as error:
            return Result(trial, error.status, time.monotonic() - started, str(error))
        finally:
            run.stop()

    def _measure(self, run: _Run) -> tuple[Load, Load | None]:
        load = self._load
        full = [] if load.concurrency is None else ["--max-concurrency", str(load.concurrency)]
        lengths = load.input_len, load.output_len
        self._bench(run, "warm-up", 1, (min(lengths[0], WARM_UP[0]), min(lengths[1], WARM_UP[1])), full)
        at_once = self._bench(run, "at once", 2, lengths, full)
        if load.request_rate is None:
            return at_once, None
        rate = ["--request-rate", str(load.request_rate)]
        return at_once, self._bench(run, f"{load.request_rate:g} requests/s", 3, lengths, rate)

    def _bench(self, run: _Run, stage: str, seed: int, lengths: tuple[int, int], flags: list[str]) -> Load:
        load, (input_len, output_len) = self._load, lengths
        return run.bench(
            stage,
            [
                *("--num-prompts", str(load.num_prompts), "--random-input-len", str(input_len)),
                *("--random-output-len", str(output_len), "--seed", str(seed), "--ignore-eos"),
                *("--vocab-size", str(self._vocab_size), "--num-client-processes", str(self._clients)),
                *flags,
            ],
        )


def changed(config: EngineConfig, trial: Trial) -> EngineConfig:
    changes = dict(trial.changes)
    if "cudagraph_mode" in changes:
        mode = {"cudagraph_mode": changes.pop("cudagraph_mode")}
        changes["compilation_config"] = config.compilation_config | mode
    return config.replace(**changes)


class _Run:
    """The processes of one trial."""

    def __init__(self, folder: Path, deadline: float, on_stage: Callable[[str], None]) -> None:
        self._folder, self._deadline, self._on_stage = folder, deadline, on_stage
        self._log = folder / "server.log"
        self._server: Child | None = None
        self._url = ""

    def serve(self, config: EngineConfig) -> dict[str, Any]:
        """Start it; what it decided, by field."""
        self._on_stage("starting")
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._server = self._spawn(Orders(str(self._log), dataclasses.asdict(config), port))
        while True:
            self._check_server("did not start")
            try:
                with NO_PROXY.open(f"{self._url}/v1/plan", timeout=5) as answer:
                    plan = json.load(answer)
                return {entry["field"]: entry["value"] for entry in plan["decisions"]}
            except (OSError, ValueError):
                time.sleep(POLL)

    def bench(self, stage: str, flags: list[str]) -> Load:
        self._on_stage(stage)
        path, log = self._folder / "result.json", self._folder / "client.log"
        path.unlink(missing_ok=True)
        argv = ["bench", "serve", "--base-url", self._url, "--result-filename", str(path), "--disable-tqdm", *flags]
        client = self._spawn(Orders(str(log), argv=argv))
        try:
            while client.is_alive():
                self._check_server(f"died under load ({stage})")
                time.sleep(POLL)
        finally:
            client.stop(1.0)
        if not path.is_file():
            raise _Failed(f"{stage}: {last_error(log)}")
        try:
            found = json.loads(path.read_text())
        except ValueError:
            raise _Failed(f"{stage}: its result is cut short: {last_error(log)}") from None
        if found["failed"]:
            said = last_error(log) if found["completed"] == 0 else last_error(self._log)
            raise _Failed(f"{stage}: {found['failed']} of {found['num_prompts']} requests failed: {said}")
        return Load(
            found["output_throughput"],
            found["median_ttft_ms"],
            found["p99_ttft_ms"],
            found["median_itl_ms"],
            found["p99_itl_ms"],
            found["median_e2el_ms"],
        )

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(STOP_SECONDS)

    def _spawn(self, orders: Orders) -> Child:
        return spawn("headrace.advice.tune.child", msgspec.json.encode(orders))

    def _check_server(self, what: str) -> None:
        assert self._server is not None
        if not self._server.is_alive():
            raise _Failed(f"the engine {what}: {last_error(self._log)}")
        if time.monotonic() > self._deadline:
            raise _Failed("took longer than a trial may", "timeout")


def last_error(log: Path) -> str:
    """The last line of a log that says what went wrong, else its last line."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    wrong = [line for line in lines if re.search(r"error|memory", line, re.IGNORECASE)]
    return (wrong or lines or ["no reason given"])[-1].removeprefix("headrace: error: ")[:400]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
