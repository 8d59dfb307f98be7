"""What `make` would do, without a network: serving installs no tests, and nothing is installed twice."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def would_run(target: str, venv: Path) -> str:
    command = ["make", "--no-print-directory", "-n", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def installs(said: str) -> list[str]:
    return [line for line in said.splitlines() if "pip install" in line]


def stamps(said: str, venv: Path) -> list[Path]:
    found = [Path(word) for word in re.findall(r"^touch (.+)$", said, re.MULTILINE)]
    assert all(path.parent == venv for path in found)
    return found


def test_serve_installs_the_project_alone_and_says_what_it_does(tmp_path: Path) -> None:
    said = would_run("serve", tmp_path)
    (install,) = installs(said)
    assert install.endswith("-e .")
    assert "'torch==" in install
    assert not re.search(r"(^| )(-q|--quiet|--progress-bar)", install), "progress is shown"
    before, after = said.split(install)
    assert "download" in before
    assert f"The command is {tmp_path}/bin/headrace" in after
    assert after.rstrip().endswith(f"{tmp_path}/bin/headrace serve demo")


@pytest.mark.parametrize("target", ["test", "test-all", "check"])
def test_tests_and_checks_add_the_rest_in_the_same_place(target: str, tmp_path: Path) -> None:
    first, second, capped = installs(would_run(target, tmp_path))
    assert first.endswith("-e .")
    assert second.endswith("-e '.[test,clients]'")
    assert "--no-deps 'instructor" in capped


@pytest.mark.parametrize("first", ["serve", "test"])
def test_nothing_is_installed_again(first: str, tmp_path: Path) -> None:
    for stamp in stamps(would_run(first, tmp_path), tmp_path):
        stamp.touch()
    assert installs(would_run(first, tmp_path)) == []
    assert installs(would_run("serve", tmp_path)) == []
    assert bool(installs(would_run("test", tmp_path))) == (first == "serve")


def test_without_a_target_it_lists_them(tmp_path: Path) -> None:
    done = subprocess.run(["make", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("serve", "install", "test", "test-all", "check"):
        assert f"make {target} " in done.stdout


def test_only_test_all_runs_what_is_slow(tmp_path: Path) -> None:
    assert "-m ''" in would_run("test-all", tmp_path)
    assert "-m ''" not in would_run("test", tmp_path)
