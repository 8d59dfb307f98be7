"""The command as a shell sees it: output, errors of one line, exit codes, and how little a help page loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from headrace import __version__
from headrace.cli import main as main_module
from headrace.cli.main import main
from headrace.errors import EngineDeadError, RequestError
from tests.speed import slowness


def headrace(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *argv], input=stdin, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    for command in ("generate", "serve", "bench"):
        assert command in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"headrace {__version__}"


MISTAKES = [
    (["generat"], "unknown command 'generat'; did you mean generate?"),
    (["--frob"], "unknown flag '--frob'; commands are generate, serve, bench"),
    (["bench", "latncy"], "unknown benchmark 'latncy'; did you mean latency?"),
    (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
    (["serve", "--port", "99999"], "--port must be at most 65535, got 99999"),
    (["generate", "/no/such/folder", "--prompt", "x"], "folder '/no/such/folder' does not exist"),
    (["bench", "latency", "/no/such/folder"], "folder '/no/such/folder' does not exist"),
    (["bench", "throughput", "/no/such/folder"], "folder '/no/such/folder' does not exist"),
    (["generate", "--top-p", "0", "--prompt", "x"], "--top-p must be in (0, 1], got 0"),
    (["generate", "--prompts-file", "/no/such", "--prompt", "x"], "--prompts-file '/no/such' cannot be read"),
    (["generate", "--seed", "-1", "--prompt", "x"], "--seed must be at least 0, got -1"),
    (["bench", "serve", "--percentile-metrics", "ttft,foo"], "--percentile-metrics must be of ttft, tpot, itl, e2el"),
    (["bench", "serve", "--metric-percentiles", "101"], "--metric-percentiles must be numbers from 0 to 100"),
    (["bench", "serve", "--goodput", "itl:5"], "--goodput must be METRIC:MILLISECONDS"),
    (["bench", "serve", "--base-url", "localhost"], "--base-url must look like http://host:port, got 'localhost'"),
    (["bench", "serve", "--trace-speed", "2"], "--trace-speed needs a trace"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(argv) for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("headrace: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_exit_codes_of_other_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ending(error: BaseException) -> int:
        def fail(argv: list[str]) -> int:
            raise error

        monkeypatch.setattr(main_module, "_dispatch", fail)
        return main([])

    assert ending(RequestError("the prompt is too long", "prompt")) == 2
    assert capsys.readouterr().err == "headrace: error: the prompt is too long\n"
    assert ending(EngineDeadError("two\nlines")) == 1
    assert capsys.readouterr().err == "headrace: error: two lines\n"
    assert ending(KeyboardInterrupt()) == 130
    with pytest.raises(ZeroDivisionError):  # a bug shows its traceback
        ending(ZeroDivisionError())


SIGNALLED = """
import os, signal, sys

NUMBER, MOMENT, BEFORE = int(sys.argv[1]), sys.argv[2], sys.argv[3]
del sys.argv[1:4]

class Import:
    def find_spec(self, name, path=None, target=None):
        if name == MOMENT:
            os.kill(os.getpid(), NUMBER)

class Stdin:
    def isatty(self):
        return False
    def read(self):
        if MOMENT == "work":
            os.kill(os.getpid(), NUMBER)
        return "a prompt"

if BEFORE == "ignored":
    signal.signal(NUMBER, signal.SIG_IGN)
elif NUMBER == signal.SIGHUP:  # the tests themselves may run under nohup
    signal.signal(NUMBER, signal.SIG_DFL)
sys.meta_path.insert(0, Import())
sys.stdin = Stdin()
from headrace.cli.main import main
sys.exit(main())
"""
"""The command, which gets a signal when it imports a module, or when it reads prompts, in the midst of its work."""


def signalled(number: int, moment: str, *argv: str, before: str = "default") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(number)), moment, before, *argv],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("moment", "number", "argv"),
    [
        *(("headrace.errors", number, ["--help"]) for number in SIGNALS),
        *(("headrace.cli.serve", number, ["serve", "demo"]) for number in SIGNALS),
        ("uvicorn", signal.SIGHUP, ["serve", "demo"]),
        ("torch._utils", signal.SIGTERM, ["generate", "demo", "--device", "cpu"]),
        *(("work", number, ["generate", "demo"]) for number in SIGNALS[:2]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_a_signal_ends_a_command_quietly_also_while_it_imports(moment: str, number: int, argv: list[str]) -> None:
    assert signalled(number, moment, *argv) == (128 + number, "", "")


def test_a_signal_while_the_module_that_cleans_up_is_half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setitem(sys.modules, "headrace.process", ModuleType("headrace.process"))
    monkeypatch.setattr(os, "_exit", ended.append)
    main_module.Signals().exit(signal.SIGTERM)
    assert ended == [143]


def test_nohup_is_obeyed() -> None:
    version = f"headrace {__version__}\n"
    assert signalled(signal.SIGHUP, "headrace.errors", "--version", before="ignored") == (0, version, "")
    assert signalled(signal.SIGTERM, "headrace.errors", "--version", before="ignored")[0] == 143


def test_nothing_is_imported_before_signals_are_taken() -> None:
    """What `main` needs of Python is there; typing, enum or re alone take longer than the rest."""
    code = "import os, sys; before = {*sys.modules}; import headrace.cli.main; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["__future__", "headrace", "headrace.cli", "headrace.cli.main"]


def test_the_shell_sees_the_same() -> None:
    done = headrace("serve", "--max-model-length", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: error: unknown flag --max-model-length; did you mean --max-model-len?\n"


def test_no_prompt_is_an_error_of_one_line() -> None:
    done = headrace("generate", "demo", stdin="")
    assert done.returncode == 2
    assert "no prompt given" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("folder_name", ["plain", "broken"])
def test_a_folder_that_is_no_model(folder_name: str, tmp_path: Path) -> None:
    if folder_name == "broken":
        (tmp_path / "config.json").write_text("{")
    done = headrace("generate", str(tmp_path), "--prompt", "x")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert done.stderr.count("\n") == 1


HELP_PAGES = [
    ["--help"],
    ["generate", "-h"],
    ["serve", "-h"],
    *(["bench", b, "-h"] for b in ("latency", "throughput", "serve")),
]
HEAVY = ("torch", "triton", "transformers", "numpy", "huggingface_hub", "tokenizers", "starlette", "rich")
PROBE = f"""
import sys
from headrace.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("LOADED", [name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("argv", HELP_PAGES, ids=" ".join)
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, *argv], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("argv", [["-m", "headrace.cli.main", "serve", "--help"], ["-c", "import headrace"]], ids=str)
def test_help_and_import_are_quick(argv: list[str]) -> None:
    """The promise is 0.3 s; the bound leaves room for a machine that is busy with other tests."""

    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *argv], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 1.0 * slowness()
