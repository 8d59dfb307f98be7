"""How slow this machine is, for the few tests that hold a promise about time; and how long others wait."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

WORK = "import argparse, asyncio, email.message, http.server, json, unittest.mock, xml.dom.minidom"
PATIENCE = 120
"""Seconds, for whatever is waited for: a slow machine takes some of them, and only what never comes takes all."""
REFERENCE_SECONDS = 0.12
"""What WORK takes, with the start of its Python, on the machine whose limits the tests name"""


@functools.cache
def slowness() -> float:
    """By how much a limit must be multiplied here; 1 on a machine that is fast enough."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", WORK], check=True)
        return time.perf_counter() - start

    return max(1.0, min(seconds() for _ in range(3)) / REFERENCE_SECONDS)
