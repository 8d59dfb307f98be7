"""Measures how many streamed tokens a second the HTTP processes of a server carry (`--api-server-count`).

    python bench/front_door.py [--processes 1,2,4] [--engines 4] [--streams 640] [--tokens 1000] [--json FILE]

The engines are fake: a core, a scheduler and scripted tokens, a step each 5 ms, so that they offer 200 tokens a second
to each stream and take no more than a core of the machine each. All streams begin at once, and `headrace bench serve`
reads them; each must come whole. Reported are tokens a second from the first request to the last answer's end, and
tokens for a second of processor time of the busiest HTTP process: what they carry at most where every one has a core of
its own. On a machine with fewer cores than processes only the latter says something; a process that falls behind writes
several tokens as one event, for which it needs less.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from server_process import running

from headrace.cli.main import main as headrace_main

ROOT = Path(__file__).parents[1]
START_SECONDS = 240.0


def serve(folder: str, engines: int, processes: int) -> int:
    """Serve fake engines until a signal comes."""
    from headrace.config import EngineConfig, ServerConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.run import run_server

    config = EngineConfig(
        model=folder, device="cpu", num_gpu_blocks_override=1 << 16, served_model_name=["fake"], max_num_seqs=1024,
        data_parallel_size=engines, disable_log_stats=True,
    )  # fmt: skip
    start = functools.partial(AsyncEngine.start, executor="tests.engine.fakes:make_delayed")
    return run_server(config, ServerConfig(port=0, api_server_count=processes), start)


def processor_seconds(server: psutil.Process) -> list[float]:
    """Return the processor time that each HTTP process has taken; `server`: the first one."""
    others = [one for one in server.children() if "headrace.server.http_process" in one.cmdline()]
    return [sum(one.cpu_times()[:2]) for one in (server, *others)]


def read(url: str, streams: int, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Read so many streams of so many tokens each, and return what the client found. Raises RuntimeError where one is
    not whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = ["bench", "serve", f"--base-url={url}", "--ignore-eos", "--disable-tqdm", "--vocab-size=200"]
        command += [f"--num-prompts={streams}", "--random-input-len=16", f"--random-output-len={tokens}"]
        command += [f"--num-client-processes={options.clients}", f"--result-filename={path}"]
        headrace_main(command)
        found: dict[str, Any] = json.loads(path.read_text())
    if found["failed"] or found["total_output_tokens"] != streams * tokens:
        raise RuntimeError(f"{found['failed']} streams failed; {found['total_output_tokens']} tokens came")
    return found


def measure(processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start a server with so many HTTP processes, and return what it carried."""
    sys.path.insert(0, str(ROOT))
    from tests.engine.fakes import model_folder

    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder)) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8192}))
        command = [sys.executable, __file__, "--serve", folder, str(options.engines), str(processes)]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        with running(command, environment) as server:
            url, process = server.wait_for_url(START_SECONDS), psutil.Process(server.process.pid)
            read(url, options.clients, 2, options)
            before = processor_seconds(process)
            found = read(url, options.streams, options.tokens, options)
            used = [b - a for a, b in zip(before, processor_seconds(process), strict=True)]
    tokens = found["total_output_tokens"]
    return {
        "processes": processes, "engines": options.engines, "streams": options.streams, "tokens": tokens,
        "seconds": round(found["duration"], 2), "tokens_per_second": round(found["output_throughput"]),
        "tokens_per_event": round(1 / found["events_per_output_token"], 2),
        "processor_seconds": [round(one, 2) for one in used],
        "tokens_per_processor_second": round(tokens / max(used)),
        "client_cpu_shares": [round(one, 2) for one in found["client_cpu_shares"]],
        "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4", help="HTTP processes, one run for each number")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--streams", type=int, default=640, help="at once, in all")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--clients", type=int, default=4, help="processes that read the streams")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        folder, engines, processes = options.serve
        sys.exit(serve(folder, int(engines), int(processes)))
    found = []
    for processes in map(int, options.processes.split(",")):
        found.append(measure(processes, options))
        print(json.dumps(found[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
