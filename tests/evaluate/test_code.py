"""Programs that a model wrote: what passes, and what the kernel refuses them."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.evaluate import code
from headrace.evaluate.code import check_machine, run_program
from headrace.evaluate.code_child import ABSENT, ALLOWED, LOOKED_AT, filter_program

SECONDS = 60.0
"""a limit that finds hangs"""
HEADERS = {1: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 2: "/usr/include/asm-generic/unistd.h"}


@pytest.mark.parametrize(
    "program",
    [
        "def f(n):\n    return n + 1\nassert f(1) == 2",
        "import collections, datetime, functools, hashlib, itertools, json, math, random, re, typing",
        "assert 'root' in open('/etc/passwd').read()",  # what the user can read, the program can
        "if __name__ == '__main__':\n    assert False",
    ],
)
def test_programs_that_come_to_their_end_pass(program: str) -> None:
    verdict = run_program(program, SECONDS)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 == 2, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)", "status 0"),
        ("import os\nos._exit(0)", "status 0"),
        ("import socket\nsocket.socket()", "not permitted"),
        ("import socket\nsocket.socketpair()", "not permitted"),
        ("import os\nos.fork()", "not permitted"),
        ("import subprocess\nsubprocess.run(['true'])", "not permitted"),
        ("import threading\nthreading.Thread(target=print).start()", "can't start new thread"),
        ("import os\nos.execv('/bin/true', ['true'])", "not permitted"),
        ("import os\nos.kill(os.getppid(), 0)", "not permitted"),
        ("open('new', 'w')", "not permitted"),
        ("open(__file__, 'a')", "not permitted"),
        ("import os\nos.remove(__file__)", "not permitted"),
        ("import os\nos.rename(__file__, 'other')", "not permitted"),
        ("import os\nos.mkdir('folder')", "not permitted"),
        ("import os\nassert 'HOME' in os.environ", "AssertionError"),
        ("big = bytearray(2**31)", "MemoryError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "not"),
        ("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", ""),
    ],
)
def test_programs_that_do_other_things_fail(program: str, why: str) -> None:
    verdict = run_program(program, SECONDS)
    assert not verdict.passed
    assert why in verdict.reason
    assert len(verdict.reason) <= code.REASON_CHARS


def test_a_program_without_end_is_stopped() -> None:
    assert run_program("while True:\n    pass", 0.5).reason == "timed out after 0.5 s"


def test_a_machine_that_cannot_hold_programs_in_runs_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_machine()
    child = Path(code.__file__).with_name("code_child.py").read_text()
    (tmp_path / "code_child.py").write_text(child.replace('"x86_64"', '"other"').replace('"aarch64"', '"another"'))
    monkeypatch.setattr(code, "__file__", str(tmp_path / "code.py"))
    with pytest.raises(ConfigError, match=f"cannot hold in .* none is run: KeyError: '{platform.machine()}'"):
        check_machine()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_whole_steps(machine: str) -> None:
    assert len(filter_program(machine)) % 8 == 0


@pytest.mark.parametrize("place", [1, 2])
def test_numbers_of_calls_are_the_kernels(place: int) -> None:
    header = Path(HEADERS[place])
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", header.read_text()))
    numbers.setdefault("newfstatat", numbers.get("fstatat", ""))
    listed = {row.split()[0]: row.split()[place] for row in ALLOWED.split(",")}
    listed |= {name: str(pair[place - 1]) if pair[place - 1] != ABSENT else "-" for name, pair in LOOKED_AT.items()}

    assert listed == {name: numbers.get(name, "-") for name in listed}
