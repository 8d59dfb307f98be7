"""Extends uvicorn's server with a bound on connections beyond which /health and /metrics still answer.

A connection beyond the bound goes to a small reserve, in which those two routes are answered and all others get 503.
When the reserve is full, its oldest connection that has requested nothing is closed.

Several HTTP processes can listen on one socket. Each sees how many connections the others have, and leaves a new one to
whoever has the fewest, as long as that one comes for it soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import resource
import socket
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import ServerConfig
from headrace.errors import ConfigError, TooManyConnectionsError
from headrace.server.http_limits import BoundedHttpProtocol, Timeouts
from headrace.server.replies import error_response

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 16_384
"""Most connections if --max-connections is not given: more would take gigabytes before file descriptors run out."""
RESERVE = 32
"""Connections beyond the bound that are kept open for /health and /metrics."""
RESERVE_HEADER_SECONDS = 2.0
OWN_DESCRIPTORS = 96
"""File descriptors for the listener, the engine's pipes and sockets, and files that are open for a moment."""
PROBES = ("/health", "/metrics")
BATCH = 64
"""Connections that are accepted before the data of others is read."""
BATCH_BEYOND = 4
"""The same beyond the bound: the reserve takes several rounds to fill, so a client that sends at once is answered."""
TICK = 0.1
"""Seconds between two calls of uvicorn's `on_tick`."""
TURN_SECONDS, LOOK_SECONDS = 0.02, 0.001
"""How long a new connection is left to a process that has fewer, which may be busy, and how often one looks again."""
WARN_SECONDS = 60.0
"""Least time between two warnings with the same text."""


def connection_bound(wanted: int | None) -> int:
    """Return how many connections may be open, and raise the soft limit of open files for them. Raises ConfigError if
    the hard limit is too low for `wanted` connections."""
    needed = (wanted or MOST_CONNECTIONS) + RESERVE + OWN_DESCRIPTORS
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if limit != unlimited and limit < needed:
        limit = needed if hard == unlimited else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = needed if limit == unlimited else limit
    room -= RESERVE + OWN_DESCRIPTORS
    if room < (wanted or 1):
        given = f"max_connections ({wanted}) is too many" if wanted else "there is no room for connections"
        raise ConfigError(
            f"{given}: {limit} files may be open (ulimit -Hn), of which {RESERVE + OWN_DESCRIPTORS} are kept"
        )
    return wanted or min(room, MOST_CONNECTIONS)


class Shares:
    """Holds how many connections each of several processes has, in memory that all of them see."""

    def __init__(self, descriptor: int, number: int) -> None:
        """`descriptor`: a file with four bytes for each process; `number`: which of them this is."""
        self._counts = memoryview(mmap.mmap(descriptor, 0)).cast("I")
        self._number = number

    def note(self, connections: int) -> None:
        """Let the others see how many connections this process has."""
        self._counts[self._number] = connections

    @property
    def others_have_fewer(self) -> bool:
        """Return whether another process has fewer connections than this one. An eighth more does not count."""
        fewest = min(self._counts)
        return self._counts[self._number] > fewest + fewest // 8


class HttpServer(uvicorn.Server):
    """Takes connections from a listening socket until `should_exit` is set. It handles no signals: uvicorn would raise
    them again after a clean stop, and the exit code would not be 0."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, graceful_seconds: int, shares: Shares | None = None,
        inside: ASGIApp | None = None,
    ) -> None:  # fmt: skip
        """`config.max_connections`: a number, from `connection_bound`. `shares`: where others listen on the same
        socket. `inside`: answers their requests, which come by a second socket, on which no client can connect."""
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                access_log=config.uvicorn_log_level in ("info", "debug"),
                log_level=config.uvicorn_log_level,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=config.timeout_keep_alive,
                timeout_graceful_shutdown=graceful_seconds,
            )
        )
        assert config.max_connections is not None
        self.bound = config.max_connections
        self.timeouts = Timeouts(config.header_timeout, config.body_timeout, config.send_timeout)
        prefix = config.root_path.rstrip("/")
        self._probes = frozenset((*PROBES, *(prefix + path for path in PROBES)))
        self._shares = shares
        self._inside = inside
        self._left_since = 0.0
        """Since when there has been a connection that is left to another process; 0.0: there is none."""
        self._ordinary: set[BoundedHttpProtocol] = set()
        self._reserve: dict[BoundedHttpProtocol, None] = {}
        """Connections beyond the bound, oldest first."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting = False
        self._clock = 0.0
        shortest = min(self.timeouts.header, self.timeouts.body, self.timeouts.send, RESERVE_HEADER_SECONDS)
        self._sweep_ticks = max(1, min(10, int(shortest / 4 / TICK)))
        self._warned: dict[str, float] = {}

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._ordinary) + len(self._reserve)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._listener, *self._inner_listeners = sockets
        self._loop = asyncio.get_running_loop()
        self.servers = []
        for listener in self._inner_listeners:
            self._loop.add_reader(listener, self._accept_inside, listener)
        self._listen()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (self._listener, *self._inner_listeners):
            self._loop.remove_reader(listener)
        self._accepting = True  # nobody listens any more
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % self._sweep_ticks == 0:
            self._clock += self._sweep_ticks * TICK
            for connection in list(self.server_state.connections):
                connection.check_time(self._clock)  # pyrefly: ignore[missing-attribute]
            self._listen()
        return await super().on_tick(counter)

    def admit(self, connection: BoundedHttpProtocol) -> bool:
        if connection not in self._reserve:
            return True
        if len(self._ordinary) < self.bound:
            del self._reserve[connection]
            self._ordinary.add(connection)
            connection.app, connection.timeouts = self.config.loaded_app, self.timeouts
            return True
        return False

    def forget(self, connection: BoundedHttpProtocol) -> None:
        self._ordinary.discard(connection)
        self._reserve.pop(connection, None)
        self._note()

    def _listen(self) -> None:
        if not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH if len(self._ordinary) < self.bound else BATCH_BEYOND):
            if self._leave_to_others():
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                self._left_since = 0.0
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no file descriptors or memory: connections wait until the next sweep
                self._loop.remove_reader(self._listener)
                self._accepting = False
                self._warn(f"no connection can be accepted: {error}")
                return
            self._take(client)

    def _leave_to_others(self) -> bool:
        """Return whether the next connection is for another process, unless it has left it for too long."""
        if self._shares is None or not self._shares.others_have_fewer:
            self._left_since = 0.0
            return False
        now = time.monotonic()
        self._left_since = self._left_since or now
        if now - self._left_since > TURN_SECONDS:
            self._left_since = 0.0
            return False
        self._loop.remove_reader(self._listener)
        self._accepting = False
        self._loop.call_later(LOOK_SECONDS, self._listen)
        return True

    def _note(self) -> None:
        if self._shares is not None:
            self._shares.note(self.num_connections)

    def _accept_inside(self, listener: socket.socket) -> None:
        """Take a connection of another HTTP process, which no bound counts."""
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
            client, _ = listener.accept()
            connection = self._connection()
            assert self._inside is not None
            connection.app = self._inside
            self._begin(connection, client)

    def _connection(self) -> BoundedHttpProtocol:
        return BoundedHttpProtocol(
            self, self.timeouts, config=self.config, server_state=self.server_state, app_state={}, _loop=self._loop
        )

    def _take(self, client: socket.socket) -> None:
        connection = self._connection()
        if len(self._ordinary) < self.bound:
            self._ordinary.add(connection)
        elif len(self._reserve) < RESERVE or self._close_silent():
            self._warn(f"{self.bound} connections are open (--max-connections): others get /health and /metrics alone")
            self._reserve[connection] = None
            connection.app = self._answer_in_reserve
            header = min(self.timeouts.header, RESERVE_HEADER_SECONDS)
            connection.timeouts = Timeouts(header, self.timeouts.body, self.timeouts.send)
        else:
            client.close()
            return
        self._note()
        self._begin(connection, client)

    def _begin(self, connection: BoundedHttpProtocol, client: socket.socket) -> None:
        client.setblocking(False)
        task = self._loop.create_task(self._connect(connection, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: BoundedHttpProtocol, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            self.forget(connection)
            client.close()
            logger.debug("a connection ended as it began: %s", error)

    def _close_silent(self) -> bool:
        """Close the oldest silent connection of the reserve; return whether there was one."""
        oldest = next((connection for connection in self._reserve if connection.is_silent), None)
        if oldest is None:
            return False
        self.forget(oldest)
        oldest.transport.abort()
        return True

    async def _answer_in_reserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._probes:
            inside: Any = self.config.loaded_app  # uvicorn has types of its own for the same
            await inside(scope, receive, send)
        else:
            error = TooManyConnectionsError(f"{self.bound} connections are open; try again later (--max-connections)")
            await error_response(error, {"retry-after": "1"})(scope, receive, send)

    def _warn(self, line: str) -> None:
        """Log a warning, the same one at most once a minute."""
        now = time.monotonic()
        if now - self._warned.get(line, -WARN_SECONDS) >= WARN_SECONDS:
            self._warned[line] = now
            logger.warning("%s", line)
