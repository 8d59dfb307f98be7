"""What becomes of output that cannot be written: nothing where a server goes on, an error where it is the product."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.speed import PATIENCE

CHATTER = """
import logging, sys, warnings
from headrace.output import take_streams

take_streams(output_matters=False)
logging.basicConfig()
from rich.console import Console
from rich.progress import track
for _ in range(2):
    print("a line")
    print("another", file=sys.stderr, flush=True)
    logging.error("a record")
    logging.getLogger("none").warning("another")
    warnings.warn("a warning")
    Console().print("[bold]a line")
    list(track(range(3), console=Console(stderr=True, force_terminal=True)))
    sys.stdout.flush()
with open("/proc/self/fd/0", "rb") as stdin:
    assert stdin.read() == b"" == sys.stdin.buffer.read()
sys.exit(7)
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """The write end of a pipe that nobody reads any more."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


def run(*argv: str, redirect: str = "", **popen: Any) -> tuple[int, str | None, str | None]:
    """(status, output, errors) of Python, with the shell's redirections."""
    shell = ["bash", "-c", f'exec "$0" "$@" {redirect}', sys.executable, *argv]
    popen = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
    done = subprocess.run(shell, text=True, timeout=PATIENCE, check=False, **popen)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirect", [">/dev/full 2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-"])
def test_nothing_that_prints_notices_a_full_disk_or_closed_streams(redirect: str) -> None:
    assert run("-c", CHATTER, redirect=redirect) == (7, "", "")


def test_nothing_that_prints_notices_a_reader_that_has_left(unread: int) -> None:
    assert run("-c", CHATTER, stdout=unread, stderr=unread) == (7, None, None)


EXPLAIN = ["explain", "vllm serve x"]
PLAN = ["plan", "llama-3.1-8b", "--gpu", "h200", "--json"]


@pytest.mark.parametrize(
    ("command", "redirect", "reason"),
    [(["--help"], ">/dev/full", "No space left on device"), (EXPLAIN, ">&-", "Bad file descriptor")],
)
def test_a_command_says_that_its_product_is_lost(command: list[str], redirect: str, reason: str) -> None:
    said = f"headrace: error: standard output cannot be written: {reason}\n"
    assert run("-m", "headrace.cli.main", *command, redirect=redirect) == (1, "", said)


@pytest.mark.parametrize("command", [EXPLAIN, PLAN], ids=" ".join)
def test_a_command_whose_reader_has_left_ends_quietly(command: list[str], unread: int) -> None:
    assert run("-m", "headrace.cli.main", *command, stdout=unread) == (1, None, "")


def test_errors_that_nobody_can_read_keep_their_status(unread: int) -> None:
    for redirect in ("2>&-", "2>/dev/full"):
        assert run("-m", "headrace.cli.main", "nonsense", redirect=redirect) == (2, "", "")
    assert run("-m", "headrace.cli.main", "nonsense", stderr=unread) == (2, "", None)


WARNING = """
import warnings
{first}
warnings.warn_explicit("no current context!\\nAttempting", UserWarning, "/x/site-packages/torch/nn/linear.py", 7)
"""
OURS = "from headrace.output import take_streams\ntake_streams(output_matters=True)"


def test_a_librarys_warning_is_a_line_of_ours_that_says_what_it_means() -> None:
    _, _, errors = run("-c", WARNING.format(first=OURS))
    said = "A library's warning, which stops nothing; what it computed was used"
    assert errors == f"{said}: no current context! Attempting (torch, UserWarning)\n"


def test_a_process_of_the_users_own_keeps_its_warnings() -> None:
    _, _, errors = run("-c", WARNING.format(first="from headrace import LLM"))
    assert errors is not None
    assert "/x/site-packages/torch/nn/linear.py:7: UserWarning: no current context!" in errors
