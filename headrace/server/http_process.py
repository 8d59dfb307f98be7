"""Runs a further HTTP process of a server: this is the main program of that process.

It serves as the first one does, on the same listening socket and cores. It ends on SIGTERM, once open requests have,
and at once when the first process dies.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import uvloop

from headrace.engine.async_engine import AsyncEngine
from headrace.process import configure_logging, read_config
from headrace.server.app import build_app
from headrace.server.http_processes import HttpProcessConfig
from headrace.server.http_server import Shares
from headrace.server.relay import tell_samples
from headrace.server.run import ENGINE_SECONDS, listen_inside, serve_app, settle_garbage, signals


def main(argv: list[str]) -> int:
    given = msgspec.msgpack.decode(read_config(argv), type=HttpProcessConfig)
    configure_logging(given.config.log_level, f"[http {given.number}] ")
    with (
        closing(socket.socket(fileno=given.listener)) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(given, listener))
    return 0


async def _serve(given: HttpProcessConfig, listener: socket.socket) -> None:
    with signals() as stop:
        engine = await AsyncEngine.join(given.config, Path(given.folder), given.number, given.cores)
        try:
            engine.decisions.append(given.decision)
            app = build_app(engine, given.server_config, engine.config.served_model_name or [engine.config.model])
            app.state.serving.first, app.state.serving.created = given.first, given.created
            settle_garbage()
            with closing(listen_inside(given.inside)) as inner:
                await serve_app(
                    app, given.server_config, [listener, inner], stop, Shares(given.shares, given.number),
                    tell_samples(engine.metrics),
                )  # fmt: skip
        finally:
            await engine.shutdown(ENGINE_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
