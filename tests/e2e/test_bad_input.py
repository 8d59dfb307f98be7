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
USER = {"messages": [{"role": "user", "content": "Hello"}]}
REQUESTS: dict[str, tuple[str, dict[str, Any], int, str | None, list[str]]] = {
    # path, body or options, status, param, what the message must name
    "too long": ("completions", TEXT | {"max_tokens": 600}, 400, "max_tokens", ["512", "600"]),
    "id out of range": ("completions", {"prompt": [1, 2048]}, 400, "prompt", ["2048", "2047"]),
    "null in ids": ("completions", {"prompt": [1, None]}, 400, "prompt[1]", ["null"]),
    "unknown model": ("completions", TEXT | {"model": "gpt-4"}, 404, "model", ["gpt-4", "demo"]),
    "structured": ("completions", TEXT | {"guided_json": "{"}, 400, "guided_json", ["guided_json"]),
    "NaN": ("completions", {"content": b'{"prompt": "a", "temperature": NaN}'}, 400, None, ["JSON"]),
    "overflow": ("completions", {"content": b'{"prompt": "a", "temperature": 1e999}'}, 400, "temperature", ["range"]),
    "no UTF-8": ("completions", {"content": b'{"prompt": "\xff"}'}, 400, "prompt", ["JSON"]),
    "half a character": ("completions", {"content": rb'{"prompt": "\ud800"}'}, 400, None, []),
    "content type": (
        "completions", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, None, ["text/plain"],
    ),
    "huge body": ("completions", {"content": b" " * (2**20 + 1)}, 413, None, ["1048576"]),
    "role": ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", ["king"]),
    "key": ("completions", {"json": TEXT, "headers": {"authorization": "Bearer wrong"}}, 401, None, ["API key"]),
    "no key": ("chat/completions", {"json": USER, "headers": {}}, 401, None, ["API key"]),
    "route": ("complete", {}, 404, None, ["/v1/complete"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REQUESTS)
def test_request(case: str, server: Serve) -> None:
    path, body, status, param, names = REQUESTS[case]
    options: dict[str, Any] = {"json": body}
    if "content" in body:
        options = {"json": None, "headers": {"content-type": "application/json", **server.headers}}
        options["headers"] |= body.get("headers", {})
        options["content"] = body["content"]
    elif "json" in body:
        options = body
    answer = server.post(f"/v1/{path}", **{"body": None, **options})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["param"] == param, error
    for name in names:
        assert name in error["message"], error


def test_one_bad_request_does_not_touch_another(server: Serve) -> None:
    expected = server.complete(max_tokens=24)
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE) as client:
        body = {**TEXT, "max_tokens": 24, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for path, bad in (
                (path, bad) for path, bad, *_ in REQUESTS.values() if "headers" not in bad and "content" not in bad
            ):
                server.post(f"/v1/{path}", bad)
            text = "".join(
                json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
            )
    assert text == expected
    assert server.health() == 200
