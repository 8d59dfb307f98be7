"""Servers as processes of their own, watched from outside: `headrace serve`, or another command that serves."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from tests.speed import PATIENCE, wait_until

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "headrace" / "demo_model"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}
"""Seconds of work."""
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def started(command: list[str], **popen: Any) -> subprocess.Popen[str]:
    """A process group of its own, with one thread of torch a rank."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=popen.pop("stderr", subprocess.STDOUT),
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests themselves may run under nohup
        **popen,
    )


def headrace(*arguments: str, read_until: str = "", **popen: Any) -> subprocess.Popen[str]:
    """The command. `read_until`: at such a line whoever reads its output goes away."""
    command = [sys.executable, "-m", "headrace.cli.main", *arguments]
    if read_until:
        command = ["bash", "-c", f"exec > >(sed -u '/{read_until}/q') 2>&1; exec \"$@\"", "bash", *command]
    return started(command, **popen)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):  # ended meanwhile: short-lived children come and go
        return ""


class Served:
    """A server process that prints its address. `lines` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], key: str = "", wait: bool = True) -> None:
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._new: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        if wait:
            self.url = self.wait_for(" on http://").split(" on ")[1].split()[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Whatever a test did, nothing is left of the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (self.process.poll() is None or not self._new.empty()):
            try:
                line = self._new.get(timeout=0.1)
            except queue.Empty:
                continue
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}:\n{self.text}")

    def children(self, module: str = "") -> list[psutil.Process]:
        """All below it, or those that run `module`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if module in _command_line(child)]

    def core(self) -> psutil.Process:
        (core,) = self.children("headrace.engine.core_process")
        return core

    def ranks(self) -> list[psutil.Process]:
        return self.children("headrace.executor.rank")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=PATIENCE, **{"json": body, "headers": self.headers, **options})

    def complete(self, **fields: Any) -> str:
        """Text of a greedy completion."""
        answer = self.post("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **fields})
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=PATIENCE).status_code

    def wait_for_health(self, status: int) -> None:
        wait_until(lambda: self.health() == status, lambda: f"/health is not {status}")

    def held(self) -> dict[str, float]:
        """Requests in the engine, and the share of its cache that they hold."""
        return metrics(httpx.get(f"{self.url}/metrics", timeout=PATIENCE, headers=self.headers).text, HELD)

    def wait_until_free(self) -> None:
        wait_until(lambda: not any(self.held().values()), lambda: f"still held: {self.held()}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit code; no process is left."""
        everything = self.children()
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        gone(everything)
        return code


class Serve(Served):
    """`headrace serve ARGUMENTS --port 0`."""

    def __init__(self, *arguments: str, key: str = "", wait: bool = True, read_until: str = "") -> None:
        arguments = (*(arguments or ("demo",)), "--port", "0", *(("--api-key", key) if key else ()))
        super().__init__(headrace("serve", *arguments, read_until=read_until), key, wait)


def metrics(text: str, names: tuple[str, ...]) -> dict[str, float]:
    found = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)}
    assert len(found) == len(names), text
    return found


def gone(processes: list[psutil.Process]) -> None:
    """Raises AssertionError unless they all end. An orphan that waits for the system's first process has ended."""
    wait_until(lambda: all(map(_ended, processes)), lambda: [one for one in processes if not _ended(one)])


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Reader:
    """Reads one stream in a thread."""

    def __init__(self, server: Served, **fields: Any) -> None:
        self.started = threading.Event()
        self.lines: list[str] = []
        self.status = 0
        self.thread = threading.Thread(target=self._read, args=(server, {**LONG, "stream": True, **fields}))
        self.thread.start()
        assert self.started.wait(PATIENCE)

    def _read(self, server: Served, body: dict[str, Any]) -> None:
        url = f"{server.url}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, headers=server.headers, timeout=PATIENCE) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.started.set()
        except httpx.HTTPError as error:
            self.lines.append(f"broken off: {error}")
        finally:
            self.started.set()

    def error(self) -> dict[str, Any]:
        """The one error event that ended the stream, which has no [DONE]."""
        self.thread.join(PATIENCE)
        assert "data: [DONE]" not in self.lines
        assert [i for i, line in enumerate(self.lines) if '"error"' in line] == [len(self.lines) - 1], self.lines[-3:]
        error: dict[str, Any] = json.loads(self.lines[-1].removeprefix("data: "))["error"]
        return error


def demo_copy(folder: Path, *without: str) -> Path:
    """The demo model's folder, to be spoilt."""
    for path in DEMO.iterdir():
        if path.is_file() and path.name not in without:
            shutil.copy(path, folder / path.name)
    return folder
