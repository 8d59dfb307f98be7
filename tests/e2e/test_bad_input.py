"""What bad input gets: one line and exit code 2 at start-up, an OpenAI error object over HTTP; never a traceback."""

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

from tests.e2e.serving import Serve, demo_copy, headrace
from tests.speed import PATIENCE


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def rewrite(name: str, **changes: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | changes))

    return spoil


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])


def reshaped(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")


def no_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def not_json(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_text("{")

    return spoil


STARTS: dict[str, tuple[Callable[[Path], None] | None, list[str], list[str]]] = {
    # what spoils the model's folder, flags, what the line must name
    "missing folder": (no_folder, [], ["{folder}", "does not exist"]),
    "unknown architecture": (
        rewrite("config.json", architectures=["FooForCausalLM"]), [], ["FooForCausalLM", "LlamaForCausalLM", "Qwen3"],
    ),
    "no config.json": (no_file("config.json"), [], ["config.json"]),
    "config.json is no JSON": (not_json("config.json"), [], ["config.json"]),
    "fact missing": (rewrite("config.json", vocab_size=None), [], ["vocab_size"]),
    "truncated": (truncated, [], ["model.safetensors"]),
    "wrong shape": (reshaped, [], ["model.layers.1.mlp.up_proj.weight", "3"]),
    "no tokenizer": (no_file("tokenizer.json"), [], ["tokenizer.json", "--skip-tokenizer-init"]),
    "tokenizer is no JSON": (not_json("tokenizer.json"), [], ["tokenizer.json"]),
    "sampling defaults": (rewrite("generation_config.json", temperature=-3), [], ["temperature", "generation_config"]),
    "unknown flag": (None, ["--max-model-length", "5"], ["--max-model-length", "--max-model-len"]),
    "value of a flag": (None, ["--port", "abc"], ["--port", "abc"]),
    "block size": (None, ["--block-size", "17"], ["--block-size", "16, 32, 64", "17"]),
    "chat template": (None, ["--chat-template", "./no/such.jinja"], ["no/such.jinja"]),
    "too long": (None, ["--max-model-len", "100000"], ["max_model_len", "100000", "512"]),
    "no blocks": (None, ["--num-gpu-blocks-override", "0"], ["--num-gpu-blocks-override", "0"]),
    "no GPU": (None, ["--device", "cuda"], ["device", "cpu"]),
    "host": (None, ["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
}  # fmt: skip


@pytest.mark.parametrize("case", STARTS)
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
    "prompt too long": ("completions", {"prompt": "word " * 2000}, 400, "prompt", ["512"]),
    "ids too long": ("completions", {"prompt": [5] * 512}, 400, "prompt", ["512"]),
    "empty prompt": ("completions", {"prompt": ""}, 400, "prompt", ["empty"]),
    "empty list": ("completions", {"prompt": []}, 400, "prompt", ["empty"]),
    "one of several empty": ("completions", {"prompt": ["a", ""]}, 400, "prompt", ["prompt[1]"]),
    "no prompt": ("completions", {}, 400, "prompt", ["prompt", "required"]),
    "id out of range": ("completions", {"prompt": [1, 2048]}, 400, "prompt", ["2048", "2047"]),
    "negative id": ("completions", {"prompt": [-1]}, 400, "prompt", ["-1"]),
    "huge id": ("completions", {"prompt": [2**70]}, 400, "prompt", []),
    "null in ids": ("completions", {"prompt": [1, None]}, 400, "prompt[1]", ["null"]),
    "mixed prompt": ("completions", {"prompt": ["a", 3]}, 400, "prompt[1]", []),
    "temperature": ("completions", TEXT | {"temperature": -0.5}, 400, "temperature", ["-0.5"]),
    "top_p": ("completions", TEXT | {"top_p": 1.5}, 400, "top_p", ["1.5"]),
    "top_k": ("completions", TEXT | {"top_k": -5}, 400, "top_k", ["-5"]),
    "min_p": ("completions", TEXT | {"min_p": 2}, 400, "min_p", ["2"]),
    "penalty": ("completions", TEXT | {"presence_penalty": 3}, 400, "presence_penalty", ["3"]),
    "repetition": ("completions", TEXT | {"repetition_penalty": 0}, 400, "repetition_penalty", ["0"]),
    "max_tokens": ("completions", TEXT | {"max_tokens": -1}, 400, "max_tokens", ["-1"]),
    "min_tokens": ("completions", TEXT | {"min_tokens": 50, "max_tokens": 5}, 400, "min_tokens", ["50", "5"]),
    "n": ("completions", TEXT | {"n": 100_000}, 400, "n", ["100000", "128"]),
    "n zero": ("completions", TEXT | {"n": 0}, 400, "n", ["0"]),
    "n times prompts": ("completions", {"prompt": ["a"] * 100, "n": 100}, 400, "prompt", ["1024"]),
    "best_of": ("completions", TEXT | {"best_of": 5}, 400, "best_of", ["5"]),
    "logprobs": ("completions", TEXT | {"logprobs": 2000}, 400, "logprobs", ["2000", "20"]),
    "prompt_logprobs": ("completions", TEXT | {"prompt_logprobs": -1}, 400, "prompt_logprobs", ["-1"]),
    "stop list": ("completions", TEXT | {"stop": ["a"] * 100}, 400, "stop", ["100", "16"]),
    "stop string": ("completions", TEXT | {"stop": "a" * 100_000}, 400, "stop", ["256"]),
    "empty stop": ("completions", TEXT | {"stop": [""]}, 400, "stop", ["stop"]),
    "stop ids": ("completions", TEXT | {"stop_token_ids": [9999]}, 400, "stop_token_ids", ["9999"]),
    "logit_bias": ("completions", TEXT | {"logit_bias": {"9999": 1}}, 400, "logit_bias", ["9999"]),
    "logit_bias value": ("completions", TEXT | {"logit_bias": {"9": 1e9}}, 400, "logit_bias", ["1000000000"]),
    "logit_bias key": ("completions", TEXT | {"logit_bias": {"the": 1}}, 400, "logit_bias", []),
    "allowed": ("completions", TEXT | {"allowed_token_ids": []}, 400, "allowed_token_ids", ["empty"]),
    "seed": ("completions", TEXT | {"seed": 2**80}, 400, "seed", []),
    "type": ("completions", TEXT | {"max_tokens": "many"}, 400, "max_tokens", ["many"]),
    "unknown model": ("completions", TEXT | {"model": "gpt-4"}, 404, "model", ["gpt-4", "demo"]),
    "stream options": ("completions", TEXT | {"stream_options": {}}, 400, "stream_options", ["stream"]),
    "structured": ("completions", TEXT | {"guided_json": "{"}, 400, "guided_json", ["guided_json"]),
    "NaN": ("completions", {"content": b'{"prompt": "a", "temperature": NaN}'}, 400, None, ["JSON"]),
    "overflow": ("completions", {"content": b'{"prompt": "a", "temperature": 1e999}'}, 400, "temperature", ["range"]),
    "no JSON": ("completions", {"content": b'{"prompt": "a"'}, 400, None, ["JSON"]),
    "no UTF-8": ("completions", {"content": b'{"prompt": "\xff"}'}, 400, "prompt", ["JSON"]),
    "half a character": ("completions", {"content": rb'{"prompt": "\ud800"}'}, 400, None, []),
    "deep": ("completions", {"content": b'{"prompt": ' + b"[" * 100_000}, 400, "prompt", ["nested"]),
    "list": ("completions", {"content": b"[]"}, 400, None, ["object"]),
    "nothing": ("completions", {"content": b""}, 400, None, ["JSON"]),
    "content type": (
        "completions", {"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, None, ["text/plain"],
    ),
    "huge body": ("completions", {"content": b" " * (2**20 + 1)}, 413, None, ["1048576"]),
    "no messages": ("chat/completions", {"messages": []}, 400, "messages", ["empty"]),
    "role": ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role", ["king"]),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400, "messages", ["image_url"],
    ),
    "kwargs type": ("chat/completions", USER | {"chat_template_kwargs": [1]}, 400, "chat_template_kwargs", []),
    "kwargs name": (
        "chat/completions", USER | {"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs", ["self"],
    ),
    "template": ("chat/completions", USER | {"chat_template": "{{ 1 }}"}, 400, "chat_template", ["--chat-template"]),
    "top_logprobs": ("chat/completions", USER | {"top_logprobs": 3}, 400, "top_logprobs", ["logprobs"]),
    "format": (
        "chat/completions", USER | {"response_format": {"type": "xml"}}, 400, "response_format", ["xml"],
    ),
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
    assert len(error["message"]) < 600


def test_one_bad_request_does_not_touch_another(server: Serve) -> None:
    expected = server.complete(max_tokens=24)
    with httpx.Client(base_url=server.url, headers=server.headers, timeout=PATIENCE) as client:
        body = {**TEXT, "max_tokens": 24, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for path, bad, *_ in list(REQUESTS.values())[:20]:
                server.post(f"/v1/{path}", bad)
            text = "".join(
                json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if line.startswith("data: {")
            )
    assert text == expected
    assert server.health() == 200
