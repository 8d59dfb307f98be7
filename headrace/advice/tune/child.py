"""Runs one process of a trial, a server or its client, whose output goes to a log file.

It ends with the process that started it (process.py), and Ctrl-C is left to that one.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import EngineConfig, ServerConfig
from headrace.errors import HeadraceError
from headrace.process import read_config


class ChildConfig(msgspec.Struct):
    """Tells the process what to run: the engine, or a command line where there is one."""

    log: str
    engine: dict[str, Any] = {}
    """Fields of the EngineConfig to serve."""
    port: int = 0
    argv: list[str] = []
    """A command line of headrace."""


def main() -> int:
    config = msgspec.json.decode(read_config(sys.argv), type=ChildConfig)
    with Path(config.log).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if config.argv:
        # By name, as this folder stands below the command line: the client is what a user would type.
        return int(importlib.import_module("headrace.cli.main").main(config.argv))

    from headrace.server.run import run_server

    try:
        return run_server(EngineConfig(**config.engine), ServerConfig(port=config.port))
    except HeadraceError as error:
        print("headrace: error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
