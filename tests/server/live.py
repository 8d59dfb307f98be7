"""A real server process for tests: run_server and AsyncEngine over the fake executor, on a port of its own.

`python -m tests.server.live FOLDER [ENGINES [HTTP-PROCESSES]]` is that process; `Live` starts and watches it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from tests.engine import fakes
from tests.serving import ROOT, Served, started

KEY = "live-key"


def main(folder: str, engines: str = "1", processes: str = "1") -> int:
    from headrace.config import EngineConfig, ServerConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.run import run_server

    config = EngineConfig(
        model=folder, device="cpu", num_gpu_blocks_override=1024, served_model_name=["tiny"], max_num_seqs=64,
        data_parallel_size=int(engines),
    )  # fmt: skip
    start = functools.partial(AsyncEngine.start, executor="tests.engine.fakes:make_echo")
    server = ServerConfig(port=0, api_key=[KEY], max_request_bytes=2**20, api_server_count=int(processes))
    return run_server(config, server, start)


class Live(Served):
    """One such process, for a model folder that is written here."""

    def __init__(self, folder: Path, engines: int = 1, processes: int = 1) -> None:
        numbers = map(str, (engines, processes))
        command = [sys.executable, "-m", "tests.server.live", str(fakes.model_folder(folder)), *numbers]
        super().__init__(started(command, cwd=ROOT), KEY)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
