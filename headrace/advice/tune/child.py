"""The program of one process of a trial, a server or its client: it writes to a log file.

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


class Orders(msgspec.Struct):
    log: str
    engine: dict[str, Any] = {}
    """fields of EngineConfig: serve it"""
    port: int = 0
    argv: list[str] = []
    """a headrace command line: run that instead"""


def main() -> int:
    orders = msgspec.json.decode(read_config(sys.argv), type=Orders)
    with Path(orders.log).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if orders.argv:
        # By name, as this folder stands below the command line: the client is what a user would type.
        return int(importlib.import_module("headrace.cli.main").main(orders.argv))

    from headrace.server.run import run_server

    try:
        return run_server(EngineConfig(**orders.engine), ServerConfig(port=orders.port))
    except HeadraceError as error:
        print("headrace: error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
