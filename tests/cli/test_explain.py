"""`headrace explain` as a shell sees it."""

from __future__ import annotations

import io
import json

import pytest

from headrace.cli.main import main

LINE = (
    "VLLM_ROCM_USE_AITER=1 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 vllm serve openai/gpt-oss-120b "
    "--tensor-parallel-size 1 --trust-remote-code --kv-cache-dtype fp8 --max-num-seqs 512"
)


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    assert main(["explain", LINE]) == 0
    text = capsys.readouterr().out
    flowing = " ".join(text.split())
    assert "serve openai/gpt-oss-120b on AMD Instinct MI300X" in text
    for part in (
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4",
        "no effect",
        "With one GPU there is no all-reduce",
        "better: leave it out",
        "it cannot shrink weights",
        "Claims of guides that do not hold",
        "Quick Reduce helps at tensor parallel size 1",
        "In headrace",
        "AITER's kernels are not part of headrace",
        "A better line for vllm",
        "VLLM_ROCM_USE_AITER=1 vllm serve openai/gpt-oss-120b --kv-cache-dtype fp8 --max-num-seqs 512",
    ):
        assert part in flowing, part
    assert max(len(line) for line in text.splitlines() if "better line" not in line and "vllm serve" not in line) <= 130


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", LINE, "--gpu", "h200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["command"], record["model"], record["gpu"]) == ("serve", "openai/gpt-oss-120b", "h200")
    assert [setting["verdict"] for setting in record["settings"][:2]] == ["no effect", "no effect"]
    assert set(record["settings"][0]) == {
        "setting", "name", "value", "does", "hardware", "verdict", "why", "headrace", "better", "claim",
    }  # fmt: skip
    assert "kv-dtype-shrinks-weights" in record["claims"]
    assert record["better"]["vllm"].startswith("vllm serve openai/gpt-oss-120b")
    assert record["notice"]


def test_several_commands_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "vllm serve a --port 1 & vllm serve b --port 2", "--json"]) == 0
    assert [record["model"] for record in json.loads(capsys.readouterr().out)] == ["a", "b"]


def test_words_without_quotes_and_our_flags_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu=h200", "VLLM_USE_V1=1", "vllm", "serve", "./my model", "--swap-space", "16", "--json"]
    assert main(["explain", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["gpu"]) == ("./my model", "h200")
    assert [setting["setting"] for setting in record["settings"]] == ["VLLM_USE_V1=1", "--swap-space 16"]


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("export VLLM_USE_V1=1\nvllm serve m \\\n  --swap-space 16\n"))
    assert main(["explain", "-", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["settings"]) == 2


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "headrace explain 'COMMAND LINE' [flags]" in text
    assert "--gpu" in text
