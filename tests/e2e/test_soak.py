"""A few seconds of what bench/soak.py does for a minute: clients that come and go leave nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import KEY
from tests.serving import Serve
from tests.speed import PATIENCE

SCRIPT = Path(__file__).parents[2] / "bench" / "soak.py"


def test_clients_that_come_and_go(server: Serve) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--url", server.url, "--api-key", KEY, "--clients", "32", "--seconds", "3",
         "--max-health-ms", "30000"],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no leak, no error" in done.stdout
