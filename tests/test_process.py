"""Children: which code they run, where its bytecode is kept, what ends them; and the folders where processes meet."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace import process
from headrace.process import SOCKETS, SocketFolder, bytecode_environment, remove_abandoned
from tests.serving import gone
from tests.speed import PATIENCE

PACKAGE = Path(process.__file__).parent
CHILD = """
import importlib.util, json, os, signal, sys, time
import headrace
from headrace.process import read_config

orders = json.loads(read_config(sys.argv))
report = {
    "pid": os.getpid(),
    "package": headrace.__file__,
    "found": {name: importlib.util.find_spec(name).origin for name in orders["find"]},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
}
print(json.dumps(report), flush=True)
time.sleep(orders["seconds"])
"""
"""a child's module, `probe`, which says what it finds and then sleeps"""
PARENT = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
from headrace.process import spawn

orders = {"find": sys.argv[3:], "seconds": float(sys.argv[2])}
children = []
thread = threading.Thread(target=lambda: children.append(spawn("probe", json.dumps(orders).encode())))
thread.start()
thread.join()
sys.exit(children[0].process.wait())
"""
"""spawns one from a thread that has ended when the child looks around"""


class Parent:
    """`python PARENT` in a working directory of its own, and what its child reports."""

    def __init__(self, folder: Path, seconds: float, find: tuple[str, ...] = (), package: Path = PACKAGE) -> None:
        probe = folder / "probe"
        probe.mkdir()
        (probe / "probe.py").write_text(CHILD)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PARENT, str(package.parent), str(seconds), *find],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(probe)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.report = json.loads(self.process.stdout.readline())
        self.child = psutil.Process(self.report["pid"]) if seconds else None

    def end(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(PATIENCE)


def test_a_child_runs_its_parents_package_and_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """The package of a source tree that is on no path but the parent's; and a working directory that others filled,
    or that holds a clone, whose folder has the package's name."""
    package = tmp_path / "source" / "headrace"
    package.mkdir(parents=True)
    for name in ("__init__", "config", "errors", "output", "process", "child"):
        shutil.copy(PACKAGE / f"{name}.py", package)
    work = tmp_path / "work"
    (work / "headrace").mkdir(parents=True)
    marker = work / "run"
    for name in ("json", "torch", "runpy", "headrace/__init__", "headrace/process"):
        (work / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')\n")
    parent = Parent(work, 0, ("json", "torch", "headrace.config"), package)
    assert parent.end() == 0
    assert parent.report["package"] == str(package / "__init__.py")
    assert parent.report["found"]["headrace.config"] == str(package / "config.py")
    assert not [origin for origin in parent.report["found"].values() if origin.startswith(str(work))]
    assert not marker.exists()


def test_a_child_dies_with_its_parent_even_while_stopped_and_not_with_the_thread_that_asked_for_it(
    tmp_path: Path,
) -> None:
    parent = Parent(tmp_path, 60)
    assert parent.child is not None
    assert parent.child.is_running()
    parent.child.suspend()
    parent.process.kill()
    gone([parent.child])
    parent.end()


def test_ctrl_c_and_a_closed_terminal_are_the_parents_to_handle(tmp_path: Path) -> None:
    """From the first moment: a signal that comes while Python itself starts would end it, often with a traceback."""
    parent = Parent(tmp_path, 0)
    assert parent.end() == 0
    assert parent.report["blocked"] == [signal.SIGHUP, signal.SIGINT]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's folder for temporary files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # of a length that sockets allow
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short)


def abandoned(temporary: Path) -> Path:
    """A folder as a killed process leaves it, with a socket and a file."""
    code = "import os, signal\nfrom headrace.process import SocketFolder\n"
    code += "folder = SocketFolder()\nprint(folder.name, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    environ = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    folder = Path(done.stdout.strip())
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "requests"))
    (folder / "rendezvous").touch()
    return folder


def test_a_start_removes_socket_folders_of_the_dead_and_no_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = SocketFolder()
    left = abandoned(temporary)
    users = temporary / f"{SOCKETS}of-the-user"
    (users / "folder").mkdir(parents=True)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    link = temporary / f"{SOCKETS}link"
    link.symlink_to(elsewhere)
    with monkeypatch.context() as another:
        another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_abandoned(temporary)
    assert left.exists(), "another user's"

    second = SocketFolder()
    assert not left.exists()
    assert all(
        path.exists() for path in (Path(living.name), Path(second.name), users / "folder", elsewhere / "file", link)
    )
    living.remove()
    assert not Path(living.name).exists()
    living.remove()


def test_a_folder_that_another_start_removed_before_it_was_locked_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def made_and_found(mkdtemp: object = tempfile.mkdtemp, **options: str) -> str:
        made.append(mkdtemp(**options))  # type: ignore[operator]
        if len(made) == 1:
            remove_abandoned(temporary)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_found)
    assert SocketFolder().name == made[1] != made[0]


def test_a_temporary_folder_with_a_long_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    assert Path(SocketFolder().name).parent == Path("/tmp")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A module that was installed without bytecode."""
    file = tmp_path / "installed" / "some_module.py"
    file.parent.mkdir()
    file.write_text("answer = 42\n")
    return file


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HEADRACE_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}


def test_a_module_without_bytecode_gets_it_in_the_cache_folder(source: Path, environ: dict[str, str]) -> None:
    child = {**os.environ, **environ, **bytecode_environment(environ, str(source))}
    subprocess.run([sys.executable, "-c", "import some_module"], env=child, cwd=source.parent, check=True)
    assert list(Path(environ["HEADRACE_CACHE"]).rglob("some_module.*.pyc"))
    assert not list(source.parent.rglob("*.pyc"))


def test_bytecode_that_is_there_is_used(source: Path, environ: dict[str, str]) -> None:
    py_compile.compile(str(source))
    assert bytecode_environment(environ, str(source)) == {}


def test_a_place_that_the_user_names_stays(source: Path, environ: dict[str, str]) -> None:
    assert bytecode_environment({**environ, "PYTHONPYCACHEPREFIX": "elsewhere"}, str(source)) == {}


def test_no_code_is_run_from_a_folder_that_others_may_write_to(source: Path, environ: dict[str, str]) -> None:
    folder = Path(environ["HEADRACE_CACHE"])
    folder.mkdir()
    folder.chmod(0o777)
    assert bytecode_environment(environ, str(source)) == {}


def test_a_cache_folder_that_cannot_be_made_is_done_without(source: Path, environ: dict[str, str]) -> None:
    Path(environ["HEADRACE_CACHE"]).write_text("a file in its place")
    assert bytecode_environment(environ, str(source)) == {}


def test_trimming_the_heap_returns_pages_between_living_objects() -> None:
    script = """
import psutil, torch
from headrace.process import trim_heap
held = [torch.ones(25_000) for _ in range(2_000)]  # 100 kB each, from the heap
held = held[::50]  # gaps that freeing does not return
before = psutil.Process().memory_info().rss
trim_heap()
print((before - psutil.Process().memory_info().rss) >> 20, len(held))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[0]) > 100  # MiB of 196
