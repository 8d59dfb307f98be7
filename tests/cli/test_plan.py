"""`headrace plan` as a shell sees it: tables that fit a terminal, JSON, exit codes, and how little it loads."""

from __future__ import annotations

import io
import json
import re
import shlex

import pytest
from rich.console import Console

from headrace.cli.main import main
from headrace.cli.plan_tables import folded, print_plan, ranges
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest

LARGE = ["plan", "llama-3.1-405b", "--gpu", "mi300x", "--num-gpus", "8", "--input-len", "128", "--output-len", "2048",
         "--concurrency", "64"]  # fmt: skip


def printed(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert main(argv) == code
    return capsys.readouterr().out


def test_all_parts_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed([*LARGE, "--price-per-gpu-hour", "4"], capsys)
    assert text.startswith("llama-3.1-405b (405.9B) on 8 x AMD Instinct MI300X\n")
    places = [
        text.index(part)
        for part in ("Memory of each GPU", "Decisions", "Prediction", "1M output tokens cost", "headrace serve meta")
    ]  # fmt: skip
    assert places == sorted(places)
    for field in ("tensor_parallel_size", "kv_cache_dtype", "cudagraph_mode"):
        assert field in text
    assert "instead of" in text


@pytest.mark.parametrize(
    "argv",
    [LARGE, ["plan", "deepseek-r1", "--gpu", "h200", "--num-gpus", "16", "--engine", "vllm"],
     ["plan", "qwen3-30b-a3b", "--gpu", "h200", "--num-gpus", "4", "--objective", "throughput"]],
    ids=lambda argv: argv[1],
)  # fmt: skip
def test_no_line_is_wider_than_a_hundred_columns(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for line in printed(argv, capsys).splitlines():
        assert len(line) <= 100, line


def test_a_terminal_gets_colours_and_its_own_width() -> None:
    made = make_plan(PlanRequest(model="llama-3.1-8b", gpu="h200"))
    screen = io.StringIO()
    print_plan(made, Console(file=screen, force_terminal=True, width=80, color_system="standard", highlight=False))
    assert "\x1b[" in screen.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    tables = [line for line in plain.splitlines() if not line.startswith("  ")]
    assert max(map(len, tables)) <= 80


def test_a_folded_command_is_the_command_again() -> None:
    made = make_plan(
        PlanRequest(model="llama-3.1-8b", gpu="mi300x", max_num_seqs=900, input_len=64, output_len=64, engine="vllm")
    )
    text = folded(made.command.line)
    assert all(part == part.rstrip() for part in text.splitlines())
    assert shlex.split(text.replace("\\\n", "")) == shlex.split(made.command.line)  # as a shell joins lines


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([], "none"),
        ([1], "1"),
        ([1, 2, 4], "1, 2, 4"),
        ([1, 2, 4, 8, 16, 24, 32], "1, 2, 4, 8-32 by 8"),
        ([1, 2, 4, *range(8, 65, 8), *range(80, 129, 16)], "1, 2, 4, 8-64 by 8, 80-128 by 16"),
    ],
)
def test_sizes_are_short(sizes: list[int], text: str) -> None:
    assert ranges(sizes) == text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(printed([*LARGE, "--json"], capsys))
    assert data["layout"] == "TP8"
    assert data["gpu"]["name"] == "mi300x"
    assert data["memory_map"]["fits"] is True
    assert data["prediction"]["output_tok_s"] > 100


def test_what_cannot_run_ends_with_3_and_shows_what_can(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(["plan", "llama-3.1-70b", "--gpu", "h200", "--num-gpus", "1"], capsys, 3)
    assert "This does not run:" in text
    assert "weights take 131 GiB" in text
    assert "quantization fp8" in text
    assert "num_gpus 2 (not 1)" in text
    assert "The nearest plan:" in text
    assert "--quantization fp8" in text
    data = json.loads(printed(["plan", "llama-3.1-70b", "--gpu", "h200", "--num-gpus", "1", "--json"], capsys, 3))
    assert data["feasible"] is False
    assert data["alternatives"][0]["plan"]["feasible"] is True


def test_flags_are_spelled_as_vllms_users_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        ["plan", "llama-3.1-8b", "--gpu=H200", "-tp=2", "--max_model_len", "16K", "-q", "fp8", "--json"], capsys
    )
    decisions = {entry["field"]: entry for entry in json.loads(text)["decisions"]}
    for field, value in (("tensor_parallel_size", 2), ("max_model_len", 16384), ("quantization", "fp8")):
        assert (decisions[field]["value"], decisions[field]["source"]) == (value, "user")


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "-h"])
    text = capsys.readouterr().out
    for flag in ("--objective", "--price-per-gpu-hour", "--tensor-parallel-size", "--engine", "--simulate", "--json"):
        assert flag in text
