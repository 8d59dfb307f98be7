"""Runs the engine core in a process of its own: this is the main program of that process.

Commands come in and outputs go out over two local sockets for each front end (front_ends.py). A heartbeat at least
every second tells them that the loop still runs. The process ends on SIGTERM, and at once when its parent dies.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from headrace.engine.build import build_core
from headrace.engine.core import EngineCore
from headrace.engine.front_ends import FrontEnds
from headrace.engine.messages import Add, CoreConfig, Failed, Join, Ready
from headrace.errors import HeadraceError, crossing_name
from headrace.process import configure_logging, exit_at_once, read_config

HEARTBEAT_SECONDS = 0.5
"""Most seconds without a message, while the loop runs."""
QUIET_MS = 200
"""Idle time after which warm-up steps begin. Clients that send one request after the other pause for less."""
LINGER_MS = 2000
"""How long the last message may take to leave when the process ends."""


class _Stop:
    """Notes SIGTERM for the loop; before that runs there is nothing to finish, and the process ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.looping = False
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.looping:
            exit_at_once(0)
        self.asked = True


def main(argv: list[str]) -> int:
    core_config = msgspec.msgpack.decode(read_config(argv), type=CoreConfig)
    stop = _Stop()
    configure_logging(core_config.config.log_level, f"[{core_config.name}] ")
    context = zmq.Context()
    front_ends = FrontEnds(context, core_config.requests, core_config.replies, core_config.keys)
    core: EngineCore | None = None
    try:
        core = build_core(
            core_config.config, Path(core_config.folder), True, core_config.executor, meeting=core_config.meeting
        )
        stop.looping = True
        gc.collect()
        gc.freeze()  # what the start made is never garbage, and scanning it takes tens of milliseconds each time
        front_ends.send(Ready(core.facts, os.getpid()))
        _loop(core, front_ends, stop)
        return 0
    except Exception as error:
        if stop.asked:  # and others may have gone already that take the same steps
            return 0
        if not isinstance(error, HeadraceError):
            traceback.print_exc(file=sys.stderr)
        front_ends.send(Failed(crossing_name(error), str(error)))
        return 1
    finally:
        context.destroy(linger=LINGER_MS)
        if core is not None:
            core.shutdown()


def _loop(core: EngineCore, front_ends: FrontEnds, stop: _Stop) -> None:
    """Take commands, step and send outputs until SIGTERM. Warm-up steps run one after the other once it is quiet."""
    idle_ms, warming_up = 0, False
    if core.peers is not None:
        front_ends.watch(core.peers.socket)
    while not stop.asked:
        if front_ends.poll(0 if warming_up else idle_ms):
            _take_commands(core, front_ends)
            warming_up = False
        elif idle_ms:
            if core.may_warm_up:  # it compiles and captures, so the next heartbeat may be late
                front_ends.send_snapshot(core.snapshot([]), busy=True)
            warming_up = core.warm_up()
        stepped = core.step()
        if stepped is not None and stepped.outputs:
            front_ends.send_outputs(stepped, core.busy)
        elif time.monotonic() - front_ends.last_sent > HEARTBEAT_SECONDS:
            core.check()
            front_ends.send_snapshot(core.snapshot([]), core.busy)
        idle_ms = 0 if stepped is not None or core.busy else QUIET_MS


def _take_commands(core: EngineCore, front_ends: FrontEnds) -> None:
    """Carry out every command that has arrived."""
    for command in front_ends.commands():
        if isinstance(command, Add):
            for request in command.whole():
                core.add_request(request)
        elif isinstance(command, Join):
            front_ends.join(command, Ready(core.facts, os.getpid()))
        else:
            core.abort(command.aborts)


if __name__ == "__main__":
    exit_code = main(sys.argv)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)  # everything is closed, and tearing down torch object by object takes time
