"""`headrace eval` with the demo model: an engine of its own and a server say the same, and a run that was killed goes
on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.eval_models import Asking, EngineModel, engine_model, server_model
from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.evaluate.samples import read_samples
from headrace.evaluate.tasks import GSM8K
from tests.e2e.conftest import KEY
from tests.serving import Serve, headrace
from tests.speed import wait_until

DOCS = [
    {"question": f"Tom has {n} red balls and finds {n} more. How many has he?", "answer": f"{2 * n}\n#### {2 * n}"}
    for n in range(2, 8)
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset's folder with both splits."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for name, docs in (("test", DOCS[:4]), ("train", DOCS[4:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    return folder


def asked(data: Path, output: Path, *more: str) -> list[str]:
    flags = ["--task", "gsm8k", "--data", str(data), "--num-fewshot", "1", "--max-gen-toks", "24"]
    return ["eval", *flags, "--output-path", str(output), *more]


def of_server(server: Serve) -> list[str]:
    return ["--base-url", server.url, "--api-key", KEY]


def texts(output: Path) -> list[Any]:
    records = read_samples(output / "samples_gsm8k.jsonl")[1]
    return [records[n]["resps"] for n in sorted(records)]


async def test_an_engine_says_what_a_server_says(server: Serve, data: Path) -> None:
    asking = Asking(generation={"temperature": 0.0, "max_tokens": 24}, chat=False)
    chatting = Asking(generation={"temperature": 0.0, "max_tokens": 8}, chat=True)
    turns = GSM8K.conversation(DOCS[0], DOCS[4:])
    config = EngineConfig(model="demo", dtype="float32", log_level="warning", disable_log_stats=True)
    async with (
        engine_model(config, asking) as engine,
        server_model(server.url, KEY, None, "demo", asking) as served,
        server_model(server.url, KEY, None, None, chatting) as chatted,
    ):
        assert await engine.complete(turns) == await served.complete(turns)
        ids = [engine.prefix_token_id, *engine.tokenize("Once upon a time there was a dog.")]
        assert ids == [served.prefix_token_id, *served.tokenize("Once upon a time there was a dog.")]
        assert engine.window_length == served.window_length == 510
        # float32 twice, in batches that may differ
        assert await engine.score(ids) == pytest.approx(await served.score(ids), abs=1e-3)
        assert len(await engine.score(ids)) == len(ids) - 1
        assert isinstance(engine, EngineModel)
        assert await EngineModel(engine.engine, chatting).complete(turns) == await chatted.complete(turns)


def test_two_runs_are_compared(server: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert main(asked(data, one, *of_server(server))) == 0
    assert main(asked(data, other, *of_server(server), "--apply-chat-template", "--limit", "3")) == 0
    results = json.loads((one / "results_gsm8k.json").read_text())
    assert {"exact_match,strict-match", "exact_match_stderr,flexible-extract"} <= results["results"]["gsm8k"].keys()
    assert results["n-samples"]["gsm8k"] == {"original": 4, "effective": 4}
    capsys.readouterr()
    assert main(["eval", "--compare", str(one), str(other), "--output-path", str(tmp_path / "compared.json")]) == 0
    printed = capsys.readouterr().out
    assert f"exact_match,strict-match: {other} against {one}, 3 items, 1 items of one run alone left out" in printed
    compared = json.loads((tmp_path / "compared.json").read_text())["gsm8k"]
    assert [each["metric"] for each in compared] == ["exact_match,strict-match", "exact_match,flexible-extract"]


def test_a_run_that_was_killed_goes_on(
    server: Serve, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = asked(data, tmp_path, *of_server(server), "--max-concurrency", "1")
    process = headrace(*arguments)
    samples = tmp_path / "samples_gsm8k.jsonl"
    wait_until(lambda: samples.exists() and samples.read_bytes().count(b"\n") >= 2)
    process.kill()
    process.communicate()
    before = samples.read_bytes()
    assert main(arguments) == 0
    whole = before[: before.rfind(b"\n") + 1]
    assert samples.read_bytes().startswith(whole)
    kept = whole.count(b"\n") - 1
    assert f"{kept} of 4 items are answered already" in capsys.readouterr().err
    assert len(texts(tmp_path)) == 4
    assert main(arguments) == 0  # nothing is left to ask
    assert main([*arguments, "--max-gen-toks", "8"]) == 2
    assert "of a run with generation" in capsys.readouterr().err
