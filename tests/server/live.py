"""A real server process for tests: run_server and AsyncEngine over the fake executor, on a port of its own.

`python -m tests.server.live FOLDER [EXECUTOR]` is that process; `Live` starts and watches it.
"""

from __future__ import annotations

import functools
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.engine import fakes
from tests.speed import PATIENCE

ROOT = Path(__file__).parents[2]
KEY = "live-key"


def main(folder: str, executor: str = "make_echo") -> int:
    from headrace.config import EngineConfig, ServerConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.run import run_server

    config = EngineConfig(
        model=folder, device="cpu", num_gpu_blocks_override=1024, served_model_name=["tiny"], max_num_seqs=64
    )
    start = functools.partial(AsyncEngine.start, executor=f"tests.engine.fakes:{executor}")
    return run_server(config, ServerConfig(port=0, api_key=[KEY], max_request_bytes=2**20), start)


class Live:
    """One server process. `lines` is what it has printed so far."""

    def __init__(self, folder: Path, executor: str = "make_echo", wait: bool = True) -> None:
        fakes.model_folder(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.live", str(folder), executor],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._new: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""
        if wait:
            line = self.wait_for("serving tiny on http://")
            self.url = line.split(" on ")[1].split()[0]
            self.port = int(self.url.rsplit(":")[-1])

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(line.rstrip("\n"))

    def wait_for(self, text: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (self.process.poll() is None or not self._new.empty()):
            try:
                line = self._new.get(timeout=0.1)
            except queue.Empty:
                continue
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}:\n" + "\n".join(self.lines))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Exit code; no process is left behind."""
        children = self.children()
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        gone(children)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def gone(processes: list[psutil.Process], seconds: float = PATIENCE) -> None:
    """Raises AssertionError unless they all end."""
    _, alive = psutil.wait_procs(processes, seconds)
    assert not alive


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
