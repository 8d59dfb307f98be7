"""Rows over HTTP: a server of our own as a child, its start timed from exec to first token, and loads upon it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from h200_parts.models import MODELS
from h200_parts.offline import Emit
from h200_parts.rows import Result
from h200_parts.settings import Settings
from headrace.cli.bench.client import HttpClient
from headrace.cli.main import main as headrace_main

START_SECONDS = 240.0
STOP_SECONDS = 10.0
BUSY_CLIENT = 0.7
MEASURED_IN = ("kernels", "quantization")
"""folders of the package with tables of measurements"""
PROMPT = list(range(100, 228))


@dataclass
class Server:
    process: subprocess.Popen[str]
    launched: float
    """monotonic seconds"""
    lines: list[str] = field(default_factory=list)
    """its log, each line with the seconds since its launch"""
    url: str = ""

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(f"{time.monotonic() - self.launched:7.2f} s  {line.rstrip()}")
            if match := re.search(r" on (http://\S+)", line):
                self.url = match[1]

    def wait_for_url(self) -> str:
        """Raises RuntimeError with the log of a server that does not come up."""
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > self.launched + START_SECONDS:
                raise RuntimeError("the server did not start:\n" + "\n".join(self.lines[-40:]))
            time.sleep(0.01)
        return self.url


@contextlib.contextmanager
def serving(flags: list[str], environment: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[Server]:
    """`headrace serve` with `flags` on a free port; gone afterwards. Its log is printed if something goes wrong."""
    command = [sys.executable, "-m", "headrace.cli.main", "serve", *flags, "--port", "0"]
    launched = time.monotonic()
    process = subprocess.Popen(
        command,
        env=os.environ | (environment or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    server = Server(process, launched)
    reader = threading.Thread(target=server.read, daemon=True)
    reader.start()
    try:
        yield server
    except BaseException:
        print("the server's log:\n" + "\n".join(server.lines[-60:]), file=sys.stderr)
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(STOP_SECONDS)


def first_token_seconds(server: Server) -> float:
    """From the launch to the first token of a streamed completion, asked for as soon as the server says where it is."""
    url = server.wait_for_url()
    body = {"model": "", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}

    async def ask() -> float:
        client = HttpClient(url, {}, timeout=START_SECONDS)
        try:
            result = await client.stream("/v1/completions", msgspec.json.encode(body), 0, len(PROMPT))
        finally:
            client.close()
        if not result.success:
            raise RuntimeError(f"the first request failed: {result.error}")
        return result.start_time + result.ttft - server.launched

    return asyncio.run(ask())


def start_rows(settings: Settings, emit: Emit) -> None:
    """With caches of this run alone: empty the first time, as the first left them the second time."""
    flags = settings.serve_flags(MODELS["bf16"])
    for name, caches in (("first", "caches"), ("again", "caches"), ("no-tables", "other-caches")):
        environment, notes, cwd = cache_environment(settings.work / caches), [], None
        if name == "no-tables":
            cwd, removed = package_without_tables(settings.work / "bare")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
            notes.append(f"without {', '.join(removed) or 'any table: none is shipped'}")
        with serving(flags, environment, cwd) as server:
            seconds = first_token_seconds(server)
        log = "\n".join(server.lines[:60])
        print(f"\nstart/{name}: first token after {seconds:.2f} s; the server's log:\n{log}")
        emit(Result(f"start/{name}", seconds, notes=notes))


def package_without_tables(folder: Path) -> tuple[Path, list[str]]:
    """(a folder to import headrace from, the tables of measurements that its copy lacks)"""
    import headrace

    source = Path(headrace.__file__).parent
    copy = folder / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    tables = [path for place in MEASURED_IN for path in (copy / place).rglob("*.json")]
    for path in tables:
        path.unlink()
    return folder, [str(path.relative_to(copy)) for path in tables]


def cache_environment(folder: Path) -> dict[str, str]:
    """Every cache that a start may fill, below one folder."""
    folder.mkdir(parents=True, exist_ok=True)
    places = {
        "HEADRACE_CACHE": "headrace",
        "XDG_CACHE_HOME": "xdg",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
    }
    return {variable: str(folder / name) for variable, name in places.items()}


def serve_rows(settings: Settings, emit: Emit) -> None:
    """Three loads on one server."""
    with serving(settings.serve_flags(MODELS["bf16"])) as server:
        url = server.wait_for_url()
        print(f"server ready after {time.monotonic() - server.launched:.1f} s", flush=True)
        first_token_seconds(server)
        run_loads(settings, url, emit)
        warnings = [line for line in server.lines if " WARNING " in line]
        print("\n".join(["the server's warnings:", *(warnings or ["none"])]), flush=True)


def run_loads(settings: Settings, url: str, emit: Emit) -> None:
    def load(requests: int, input_len: int, output_len: int, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the client's result file, what every row of it shares)"""
        path = settings.work / "served.json"
        lengths = {"random-input-len": settings.tokens(input_len), "random-output-len": settings.tokens(output_len)}
        command = ["bench", "serve", "--base-url", url, "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
        command += [f"--{name}={value}" for name, value in lengths.items()]
        command += [f"--num-prompts={settings.requests(requests)}", f"--result-filename={path}"]
        command += [f"--vocab-size={settings.vocab_size(MODELS['bf16'])}"]
        command += [f"--num-client-processes={settings.client_processes}", *flags]
        headrace_main(command)
        found = json.loads(path.read_text())
        tokens = {"prompt": found["total_input_tokens"], "output": found["total_output_tokens"]}
        wanted = settings.requests(requests) * settings.tokens(output_len)
        busiest = max(found["client_cpu_shares"])
        notes = [
            f"client processes busy {' '.join(f'{share:.0%}' for share in found['client_cpu_shares'])}",
            f"{found['events_per_output_token']:.3f} events a token",
            "with tokenizer" if settings.tokenizer else "without tokenizer",
        ]
        if found["failed"]:
            notes.append(f"{found['failed']} requests failed")
        if busiest > BUSY_CLIENT:
            notes.append(f"the client was busier than {BUSY_CLIENT:.0%}")
        valid = busiest <= BUSY_CLIENT and not found["failed"] and found["total_output_tokens"] == wanted
        return found, {"tokens": tokens, "notes": notes, "valid": valid}

    found, shared = load(20, 128, 128, "--max-concurrency=1")
    emit(Result("served/single/ttft", found["median_ttft_ms"], **shared))
    emit(Result("served/single/tpot", found["median_tpot_ms"], **shared))
    found, shared = load(1000, 128, 512)
    emit(Result("served/at-once", found["output_throughput"], **shared))
    found, shared = load(400, 1024, 128, "--request-rate=16")
    for name, key in (
        ("ttft-p50", "median_ttft_ms"),
        ("ttft-p99", "p99_ttft_ms"),
        ("itl-p99", "p99_itl_ms"),
        ("tpot-p50", "median_tpot_ms"),
        ("itl-p50", "median_itl_ms"),
        ("e2el-p50", "median_e2el_ms"),
    ):
        emit(Result(f"served/rate/{name}", found[key], **shared))
