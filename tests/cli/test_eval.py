"""The flags of `headrace eval`: what is wrong is one line, said before a model is loaded."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.cli.eval import TASK_NAMES
from headrace.cli.main import main
from headrace.evaluate.samples import Samples
from headrace.evaluate.tasks import TASKS

DOC = {"question": "What is 1 + 1?", "answer": "#### 2"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "test.jsonl").write_text(json.dumps(DOC) + "\n")
    return str(tmp_path / "test.jsonl")


def test_the_names_are_those_of_the_tasks() -> None:
    assert {*TASK_NAMES} == TASKS.keys() | {"perplexity"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data DATA", "--task must be one of gsm8k, mmlu_pro"),
        ("--task gsm8k", "--data is missing"),
        ("--task gsm9k --data DATA", "--task must be one of"),
        ("--task gsm8k --data NONE", "--data 'NONE': there is no such file or folder"),
        ("--task gsm8k --data DATA", "gsm8k with 5 examples needs --fewshot-data, or train.jsonl beside the items"),
        ("--task mmlu_pro --data DATA", "item 0: the task needs options, category"),
        ("--task humaneval --data DATA", "which needs --allow-code-execution"),
        ("--task gsm8k --data DATA --base-url http://127.0.0.1:1", "--base-url needs --output-path"),
        (
            "--task gsm8k --data DATA --base-url http://127.0.0.1:1 --output-path OUT --dtype float32",
            "--dtype: a server that runs already (--base-url) does not take flags of the engine",
        ),
        (
            "--task gsm8k --data DATA --num-fewshot 0 --base-url http://127.0.0.1:1 --output-path OUT",
            "cannot connect to 127.0.0.1:1: Connection refused; start a server there",
        ),
        (
            "--task gsm8k --data DATA --num-fewshot 0 --base-url ftp://host --output-path OUT",
            "--base-url must look like http://host:port",
        ),
        ("--task gsm8k --data DATA --num-fewshot 0 --gen-kwargs.temprature 1", "--gen-kwargs: "),
        ("--task gsm8k --data DATA --num-fewshot 0 --gen-kwargs.temperature -1", "--gen-kwargs: temperature must be"),
        ("--task gsm8k --data DATA --num-fewshot 0 --reasoning-parser r2", "reasoning_parser must be one of"),
        ("--task gsm8k --data DATA --num-fewshot 0 ./none --output-path OUT", "'./none'"),
        ("--compare OUT", "--compare needs at least two folders"),
        ("--compare OUT OUT", "there is no samples_TASK.jsonl of a run in this folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    flags: str, said: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags.replace("DATA", data).replace("OUT", str(tmp_path / "out"))
    assert main(["eval", *flags.split()]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (
            404,
            "<html>€" * 40,
            "is no OpenAI-compatible server: http://127.0.0.1:PORT/v1/models answers HTTP 404: <html>",
        ),
        (403, "", "refuses the key (HTTP 403); give --api-key"),
        (200, "<html>", "the server lists no model; give --model"),
    ],
)
def test_a_wrong_server_is_one_line(
    status: int, body: str, said: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Wrong)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    flags = ["--num-fewshot", "0", "--base-url", url, "--output-path", str(tmp_path / "out")]
    try:
        assert main(["eval", "--task", "gsm8k", "--data", data, *flags]) == 2
    finally:
        server.shutdown()
        server.server_close()
    error = capsys.readouterr().err
    assert said.replace("PORT", str(server.server_port)) in error
    assert error.count("\n") == 1


def test_runs_of_other_tasks_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, task in (("a", "gsm8k"), ("b", "humaneval")):
        with Samples(tmp_path / name / f"samples_{task}.jsonl", {"task": task}) as samples:
            samples.add({"doc_id": 0, "doc_hash": "0", "group": "", "scores": {"exact_match,none": 1.0}})
    assert main(["eval", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "has no task in common with" in capsys.readouterr().err
