"""What bad input gets: one line and exit code 2 at start-up, an OpenAI error object over HTTP; never a traceback.

These are a sample of each kind through real processes. All that can be wrong with a folder, a flag or a request is
tested where it is decided: in tests/models, tests/engine/test_tokenizer.py, tests/cli and tests/server/test_errors.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving import Serve, demo_copy, headrace
from tests.speed import PATIENCE


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def rewrite(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | changes))

    return spoil


def reshaped(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")


def no_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


STARTS: dict[str, tuple[Callable[[Path], None] | None, list[str], list[str]]] = {
    # what spoils the model's folder, flags, what the line must name
    "missing folder": (no_folder, [], ["{folder}", "does not exist"]),
    "wrong shape": (reshaped, [], ["model.layers.1.mlp.up_proj.weight", "3"]),
    "no tokenizer": (no_file("tokenizer.json"), [], ["tokenizer.json", "--skip-tokenizer-init"]),
    "sampling defaults": (rewrite("generation_config.json", temperature=-3), [], ["temperature", "generation_config"]),
    "unknown flag": (None, ["--max-model-length", "5"], ["--max-model-length", "--max-model-len"]),
    "too long": (None, ["--max-model-len", "100000"], ["max_model_len", "100000", "512"]),
    "no GPU": (None, ["--device", "cuda"], ["device", "cpu"]),
    "host": (None, ["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
}  # fmt: skip


LATE = {"sampling defaults", "too long", "no GPU"}
"""Told by the same part of a start as others here"""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in LATE else ()) for case in STARTS]
)
def test_start(case: str, tmp_path: Path) -> None:
    spoil, flags, names = STARTS[case]
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if spoil is not None:
        spoil(demo_copy(tmp_path))
    process = headrace("serve", "demo" if spoil is None else str(tmp_path), "--port", "0", *flags)
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if "headrace: error: " in line]
    for name in names:
        assert name.format(folder=tmp_path) in line, line
    assert "Application startup complete" not in output


TEXT = {"prompt": "Once upon a time"}
BAD: list[tuple[str, dict[str, Any], str]] = [
    # path, body, what the message must name
    ("completions", TEXT | {"max_tokens": 600}, "512"),
    ("completions", {"prompt": [1, 2048]}, "2047"),
    ("completions", TEXT | {"guided_json": "{"}, "guided_json"),
    ("completions", TEXT | {"model": "gpt-4"}, "gpt-4"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "king"),
    ("complete", {}, "/v1/complete"),
]


def test_one_bad_request_does_not_touch_another(server: Serve) -> None:
    expected = server.complete(max_tokens=24)
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE) as client:
        body = {**TEXT, "max_tokens": 24, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for path, bad, named in BAD:
                refused = server.post(f"/v1/{path}", bad)
                assert 400 <= refused.status_code < 500
                assert named in refused.json()["error"]["message"]
            text = "".join(
                json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
            )
    assert text == expected
    assert server.health() == 200
