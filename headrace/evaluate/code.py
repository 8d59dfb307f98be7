"""Runs each program that a model wrote in a process of its own, which can do little (code_child.py says what)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError
from headrace.evaluate.code_child import PASSED

MEMORY_BYTES = 1 << 30
REASON_CHARS = 300


@dataclass(frozen=True)
class Verdict:
    """Says whether a program came to its end, and if not, why."""

    passed: bool
    reason: str = ""


def run_program(program: str, seconds: float) -> Verdict:
    """Run a program for at most `seconds`, with MEMORY_BYTES of memory and without the environment. A machine that
    cannot hold it in does not run it: see `check_machine`."""
    with tempfile.TemporaryDirectory(prefix="headrace-code-") as folder, tempfile.TemporaryFile() as errors:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        child = Path(__file__).with_name("code_child.py")
        command = [sys.executable, "-I", "-B", str(child), str(path), str(int(seconds) + 1), str(MEMORY_BYTES)]
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, cwd=folder,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, timeout=seconds, start_new_session=True,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return Verdict(False, f"timed out after {seconds:g} s")
        errors.seek(0)
        told = errors.read().decode(errors="replace").strip()
    last = told.splitlines()[-1][:REASON_CHARS] if told else f"ended with status {status}"
    return Verdict(status == PASSED, "" if status == PASSED else last)


def check_machine() -> None:
    """Raise ConfigError unless a program runs here, and is kept from making a socket."""
    verdicts = [run_program(program, 30.0) for program in ("pass", "import socket\nsocket.socket()")]
    if [verdict.passed for verdict in verdicts] != [True, False]:
        why = verdicts[0].reason or "a program could make a socket"
        raise ConfigError(f"this machine cannot hold in what generated code does, so none is run: {why}")
