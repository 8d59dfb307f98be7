"""The command as a shell sees it: output, errors of one line, exit codes, and how little a help page loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace import __version__
from headrace.cli import main as main_module
from headrace.cli.main import main
from headrace.errors import EngineDeadError, RequestError
from tests.speed import PATIENCE, computed_by, slowness


def headrace(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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


GENERATE = ["generate", "demo", "--prompt", "x"]
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
    (["explain", "ls -l"], "no command of vLLM or headrace in this line"),
    (["explain", "vllm serve m", "--gpu", "h9000"], "gpu 'h9000' is unknown; choose from mi300x"),
    (["explain", "vllm serve m", "--gpu"], "--gpu expected one argument"),
    (["plan", "llama-9", "--gpu", "h200"], "model 'llama-9'"),
    (["plan", "llama-3.1-8b", "--gpu", "h300"], "gpu 'h300' is unknown"),
    (["plan", "llama-3.1-8b", "--num-gpu", "2"], "unknown flag --num-gpu; did you mean --num-gpus?"),
    (["plan", "llama-3.1-8b", "--gpu", "h200", "--num-gpus", "0"], "--num-gpus must be at least 1, got 0"),
    (["plan", "llama-3.1-8b", "--gpu", "h200", "--objective", "fast"], "--objective must be one of latency"),
    ([*GENERATE, "--logit-bias", '{"x": 1}'], "--logit-bias must map token ids to numbers, got {'x': 1}"),
    ([*GENERATE, "--logit-bias", '{"1": 1000}'], "--logit-bias must be in [-100, 100], got 1000"),
    ([*GENERATE, "--n", "0"], "--n must be an integer between 1 and 128, got 0"),
    ([*GENERATE, "--max-tokens", "0"], "--max-tokens must be an integer between 1 and"),
    ([*GENERATE, "--stop", "x", "--no-detokenize"], "--stop needs detokenize=true"),
    ([*GENERATE, "--logprobs", "99"], "--logprobs must be an integer between 0 and 20, got 99"),
    ([*GENERATE, "--stop-token-ids", "a"], "--stop-token-ids must be a whole number"),
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
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


MOMENTS = [
    ("headrace.errors", signal.SIGINT, ["--help"]),
    ("headrace.cli.serve", signal.SIGTERM, ["serve", "demo"]),
    ("uvicorn", signal.SIGHUP, ["serve", "demo"]),
    ("torch._utils", signal.SIGTERM, ["generate", "demo", "--device", "cpu"]),
    ("work", signal.SIGINT, ["generate", "demo"]),
]
MORE_MOMENTS = [
    *(("headrace.errors", number, ["--help"]) for number in (signal.SIGTERM, signal.SIGHUP)),
    *(("headrace.cli.serve", number, ["serve", "demo"]) for number in (signal.SIGINT, signal.SIGHUP)),
    ("work", signal.SIGTERM, ["generate", "demo"]),
]


@pytest.mark.parametrize(
    ("moment", "number", "argv"),
    [*MOMENTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_MOMENTS)],
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
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.split() == ["__future__", "headrace", "headrace.cli", "headrace.cli.main"]


def test_the_shell_sees_the_same() -> None:
    done = headrace("serve", "--max-model-length", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: error: unknown flag --max-model-length; did you mean --max-model-len?\n"


@pytest.mark.parametrize("config", [None, "{"])
def test_a_folder_that_is_no_model(config: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert "config.json" in error
    assert error.count("\n") == 1


HELP_PAGES = ["--help", "generate -h", "serve -h", "bench latency -h", "bench throughput -h", "bench serve -h",
              "explain --help", "doctor --help", "plan -h", "tune --help",
              "quantize -h", "eval --help"]  # fmt: skip
HEAVY = ("torch", "triton", "transformers", "numpy", "huggingface_hub", "tokenizers", "starlette", "rich")
PROBE = f"""
import sys
from headrace.cli.main import main
for page in sys.argv[1:]:
    try:
        main(page.split())
    except SystemExit:
        pass
    print("LOADED by", page, [name for name in {HEAVY} if name in sys.modules])
"""


def test_help_loads_nothing_heavy() -> None:
    """One page after the other, in a process of their own: the first that names a module is at fault."""
    command = [sys.executable, "-c", PROBE, *HELP_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("LOADED by ")]
    assert loaded == [f"LOADED by {page} []" for page in HELP_PAGES]


EXPLAIN = ["explain", "VLLM_ROCM_USE_AITER=1 vllm serve openai/gpt-oss-120b --kv-cache-dtype fp8 --max-num-seqs 512"]
PLAN = ["plan", "llama-3.1-405b", "--gpu", "mi300x", "--num-gpus", "8", "--concurrency", "64"]
WORKED = """
import sys
from headrace.cli.main import main
code, heavy = main(sys.argv[1:]), ("torch", "triton", "transformers", "numpy", "starlette")
print("LOADED", [name for name in heavy if name in sys.modules], code)
"""


@pytest.mark.parametrize(
    "argv",
    [["-m", "headrace.cli.main", "serve", "--help"], ["-c", "import headrace"], ["-c", WORKED, *EXPLAIN],
     ["-c", WORKED, *PLAN]],
    ids=["help", "import", "explain", "plan"],
)  # fmt: skip
def test_what_needs_no_engine_is_quick(argv: list[str]) -> None:
    """The promise is 0.3 s; the bound leaves room for a machine that is busy with other tests."""

    def seconds() -> float:
        computed, printed = computed_by([sys.executable, *argv])
        if WORKED in argv:
            assert printed.splitlines()[-1] == "LOADED [] 0"
        return computed

    assert any(seconds() < 1.0 * slowness() for _ in range(3))
