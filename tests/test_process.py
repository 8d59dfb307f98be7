"""Where a child's Python keeps what it compiles: beside the modules if they came with it, else in our cache folder."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.process import bytecode_environment


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
