"""Measures how many streamed tokens a second the HTTP processes of a server carry (`--api-server-count`).

The engines are fake: a core, a scheduler and scripted tokens, a step each 5 ms, so that they offer 200 tokens a second
to each stream and take no more than a core of the machine each. All streams begin at once, and `headrace bench serve`
reads them; each must come whole. Where there are fewer cores than processes, tokens for a second of processor time of
the busiest HTTP process say more: what they carry at most where every one has a core of its own. A process that falls
behind writes several tokens as one event, for which it needs less.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
from server_process import load, running

from h200_parts.rows import Result
from h200_parts.run import Run
from h200_parts.serving import START_SECONDS

PROCESSES = (1, 2, 4)
"""HTTP processes"""
ENGINES, CLIENTS, STREAMS, TOKENS = 4, 4, 640, 1000
"""Engines; processes that read the streams; streams at once, in all, and the tokens of each."""
PATH = os.pathsep.join((str(Path(__file__).parents[1]), str(Path(__file__).parents[2])))
"""where a server finds this module, and the fake engines"""


def serve(folder: str, engines: int, processes: int) -> None:
    """Serve fake engines until a signal comes."""
    from headrace.config import EngineConfig, ServerConfig
    from headrace.engine.async_engine import AsyncEngine
    from headrace.server.run import run_server

    config = EngineConfig(
        model=folder, device="cpu", num_gpu_blocks_override=1 << 16, served_model_name=["fake"], max_num_seqs=1024,
        data_parallel_size=engines, disable_log_stats=True,
    )  # fmt: skip
    start = functools.partial(AsyncEngine.start, executor="tests.engine.fakes:make_delayed")
    sys.exit(run_server(config, ServerConfig(port=0, api_server_count=processes), start))


def processor_seconds(server: psutil.Process) -> list[float]:
    """Return the processor time that each HTTP process has taken; `server`: the first one."""
    others = [one for one in server.children() if "headrace.server.http_process" in one.cmdline()]
    return [sum(one.cpu_times()[:2]) for one in (server, *others)]


def read(url: str, streams: int, tokens: int) -> dict[str, Any]:
    """Read so many streams of so many tokens each, and return what the client found. Raises RuntimeError where one is
    not whole."""
    lengths = {"random_input_len": 16, "random_output_len": tokens, "vocab_size": 200}
    found = load(url, num_prompts=streams, num_client_processes=CLIENTS, **lengths)
    if found["failed"] or found["total_output_tokens"] != streams * tokens:
        raise RuntimeError(f"{found['failed']} streams failed; {found['total_output_tokens']} tokens came")
    return found


def front_door_rows(run: Run) -> None:
    """Measure a server of each number of HTTP processes."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.engine.fakes import model_folder

    run.describe_chip()
    path = model_folder(run.settings.work) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 8192}))
    streams, tokens, engines = run.settings.requests(STREAMS), run.settings.tokens(TOKENS), 1 if run.smoke else ENGINES
    for processes in PROCESSES[: 1 if run.smoke else None]:
        code = f"from h200_parts.front_door import serve; serve({str(path.parent)!r}, {engines}, {processes})"
        python_path = os.pathsep.join(filter(None, (PATH, os.environ.get("PYTHONPATH"))))
        with running([sys.executable, "-c", code], {"PYTHONPATH": python_path}) as server:
            url, process = server.wait_for_url(START_SECONDS), psutil.Process(server.process.pid)
            read(url, CLIENTS, 2)
            before = processor_seconds(process)
            found = read(url, streams, tokens)
            used = [b - a for a, b in zip(before, processor_seconds(process), strict=True)]
        notes = [
            f"{streams * tokens / max(used):.0f} tokens for a second of the busiest process's processor",
            f"{1 / found['events_per_output_token']:.2f} tokens an event",
            f"client processes busy {' '.join(f'{share:.0%}' for share in found['client_cpu_shares'])}",
            f"{os.cpu_count()} cores",
        ]
        row = f"front-door/{processes}"
        run.emit(Result(row, found["output_throughput"], tokens={"output": streams * tokens}, notes=notes))
