"""Runs `headrace serve`: takes the port, starts the engine, serves until a signal comes, and stops everything.

With several HTTP processes this is the first one, which owns the port, the cores and the others (http_processes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import ipaddress
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp

from headrace import __version__
from headrace.config import EngineConfig, ServerConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.errors import ConfigError, PortInUseError
from headrace.planner.served import decide_http_processes
from headrace.process import configure_logging, exit_at_once
from headrace.server.app import build_app
from headrace.server.http_processes import HttpProcesses
from headrace.server.http_server import HttpServer, Shares, connection_bound
from headrace.server.output_formats import check_parser_names
from headrace.server.startup import startup_lines

logger = logging.getLogger(__name__)

StartEngine = Callable[[EngineConfig], Awaitable[AsyncEngine]]
BACKLOG = 2048
CLOSE_SECONDS = 1
"""How long connections may take to close. Beside --shutdown-timeout a stop takes less than 3.5 s."""
ENGINE_SECONDS = 1.5
GC_THRESHOLDS = (5_000, 2, 50)
"""When Python looks for garbage, object by object, for 0.8 us each while every stream waits: after so many more objects
among these, after so many such passes among what survived them, and after so many of those among all objects. With
Python's 700, 10 and 10 a thousand requests that come at once are scanned ten times, for 100 ms each. No request leaves
garbage of this kind (reference cycles), whether it ends, fails or is left by its client, so little is missed."""
EXIT_AT_ONCE = 130


def run_server(config: EngineConfig, server_config: ServerConfig, start_engine: StartEngine | None = None) -> int:
    """Serve until a signal comes; return the exit code. Raises UserError for what the user can mend, such as a port in
    use or a missing model."""
    configure_logging(config.log_level)
    check_parser_names(server_config)
    bound = connection_bound(server_config.max_connections)
    server_config = dataclasses.replace(server_config, max_connections=bound)
    listener = listen_on(server_config.host, server_config.port)
    warn_if_open(listener, server_config)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, server_config, listener, start_engine or AsyncEngine.start))


def listen_on(host: str, port: int) -> socket.socket:
    """Return a listening socket. It is opened first, so that no model is loaded for a port that is in use. Connections
    that are made while the model loads wait, and are answered once it is there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host {host!r} is not an address to listen on: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise PortInUseError(f"cannot listen on {host}:{port}: {error}; choose another --port") from None
    listener.setblocking(False)
    return listener


def listen_inside(path: str) -> socket.socket:
    """Return a listening socket for other HTTP processes of the server."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def warn_if_open(listener: socket.socket, server_config: ServerConfig) -> None:
    """Warn if everybody who can reach this machine could use the server."""
    address = listener.getsockname()[0]
    if not server_config.api_key and not ipaddress.ip_address(address).is_loopback:
        logger.warning("%s is open to the network without a key: set --api-key, or --host 127.0.0.1", address)


async def _serve(
    config: EngineConfig, server_config: ServerConfig, listener: socket.socket, start_engine: StartEngine
) -> int:
    with signals() as stop, contextlib.ExitStack() as opened:
        say(f"headrace {__version__}: loading {config.model}")
        began = time.monotonic()
        starting = asyncio.ensure_future(_start(config, server_config, listener, start_engine))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        stopped.cancel()
        if stop.is_set() and starting.exception() is not None:  # a signal to the process group ended the core as well
            return 0
        started = await starting
        engine, processes = started.engine, started.processes
        try:
            app = build_app(engine, started.server_config, _names(engine))
            listeners, shares = [listener], None
            if processes is not None:
                app.state.serving.further, app.state.serving.created = processes.further, processes.created
                listeners.append(opened.enter_context(listen_inside(processes.first)))
                shares = Shares(processes.shares, 0)
            settle_garbage()
            for line in startup_lines(engine, app.state.serving.formats, time.monotonic() - began):
                say(line)
            ended = await serve_app(app, started.server_config, listeners, stop, shares, app, processes)
        finally:
            if processes is not None:
                await processes.stop(CLOSE_SECONDS)
            await engine.shutdown(ENGINE_SECONDS)
    say("stopped")
    return 1 if ended else 0


@dataclasses.dataclass(frozen=True)
class _Started:
    """Holds what runs once the server has started."""

    engine: AsyncEngine
    processes: HttpProcesses | None
    server_config: ServerConfig
    """as each HTTP process has it"""


async def _start(
    config: EngineConfig, server_config: ServerConfig, listener: socket.socket, start_engine: StartEngine
) -> _Started:
    """Start the engine, and as many further HTTP processes as it needs."""
    engine = await start_engine(config)
    processes = None
    try:
        one_because = "" if server_config.runtime_lora_folder is None else "clients may load adapters"
        if engine.machines is not None:
            one_because = "engines on other machines have one front end"
        given = server_config.api_server_count
        decision = decide_http_processes(given, engine.num_engines, engine.most_output, one_because)
        if given is not None or engine.num_engines > 1:
            engine.decisions.append(decision)
        if (count := decision.value) > 1:
            assert server_config.max_connections is not None
            most = math.ceil(server_config.max_connections / count)
            server_config = dataclasses.replace(server_config, max_connections=most)
            processes = HttpProcesses(engine, config, server_config, listener, decision)
            await processes.ready()
    except BaseException:
        if processes is not None:
            await processes.stop(0.0)
        await engine.shutdown(ENGINE_SECONDS)
        raise
    return _Started(engine, processes, server_config)


def settle_garbage() -> None:
    """Tell Python's garbage collector that the start is over."""
    gc.collect()
    gc.freeze()  # what the start made is never garbage, and scanning it stalls all streams for 50 ms
    gc.set_threshold(*GC_THRESHOLDS)


async def serve_app(
    app: Starlette, server_config: ServerConfig, listeners: Sequence[socket.socket], stop: asyncio.Event,
    shares: Shares | None = None, inside: ASGIApp | None = None, processes: HttpProcesses | None = None,
) -> str:  # fmt: skip
    """Serve until `stop` is set, or one of `processes` has ended; return what the log says of that, or nothing.
    `shares`, `inside`: see HttpServer."""
    server, serving = HttpServer(app, server_config, CLOSE_SECONDS, shares, inside), app.state.serving
    says: Callable[[str], None] = logger.debug if serving.first else say
    serving.engine.metrics.http_connections.set_function(lambda: server.num_connections)
    running = asyncio.create_task(server.serve(sockets=[*listeners]))
    while not server.started and not running.done():
        await asyncio.sleep(0.005)
    ended: asyncio.Future[str] = asyncio.Future() if processes is None else processes.ended
    if not running.done():
        host, port = listeners[0].getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        says("Application startup complete")
        names = ", ".join(_names(serving.engine))
        says(f"serving {names} on http://{address} (docs: http://{address}/docs; Ctrl-C stops)")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((running, stopped, ended), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
    why = ended.result() if ended.done() else ""
    if why:
        logger.error("%s", why)
    if not running.done():
        seconds = server_config.shutdown_timeout
        says(f"stopping: running requests have {seconds:g} s to finish (Ctrl-C again: at once)")
        if processes is not None:
            processes.terminate()
        await serving.drain(seconds)
        server.should_exit = True
        serving.stop()
    await running
    return why


def _names(engine: AsyncEngine) -> list[str]:
    """Return the names that requests may use."""
    return engine.config.served_model_name or [engine.config.model]


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Event]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets. A second signal ends the process and its
    children."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            exit_at_once(EXIT_AT_ONCE)
        stop.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup: a closed terminal is no reason to stop
        del before[signal.SIGHUP]
    for number in before:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def say(line: str) -> None:
    """Print a line on standard output at once."""
    print(line, flush=True)
