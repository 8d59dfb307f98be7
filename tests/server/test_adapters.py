"""Adapters over HTTP: the names that requests may use, and adapters that come and go while the server runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.errors import ConfigError
from tests.engine.fakes import MODEL_CONFIG
from tests.server.fake_engine import MODEL, FakeEngine, complete, error_of, make_app, post, send

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def adapter(folder: Path, rank: int = 4, inputs: int = MODEL_CONFIG["hidden_size"]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8}))
    name, outputs = "base_model.model.model.layers.0.self_attn.o_proj", MODEL_CONFIG["hidden_size"]
    tensors = {f"{name}.lora_A.weight": (rank, inputs), f"{name}.lora_B.weight": (outputs, rank)}
    made = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(made, folder / "adapter_model.safetensors")
    return folder


def app_with(folder: Path, *modules: str, runtime: bool = True) -> tuple[FakeEngine, Any]:
    engine = FakeEngine(enable_lora=True)
    return engine, make_app(engine, lora_modules=[*modules], runtime_lora_folder=str(folder) if runtime else None)


def test_a_request_names_an_adapter_as_its_model(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    engine, app = app_with(tmp_path, f"sql={path}", json.dumps({"name": "tone", "path": str(path)}))
    cards = {card["id"]: card for card in send(app, "GET", "/v1/models").json()["data"]}
    assert [*cards] == [MODEL, "alias", "sql", "tone"]
    assert cards["sql"]["parent"] == cards["tone"]["parent"] == MODEL
    assert cards["sql"]["root"] == str(path)
    assert cards[MODEL]["parent"] is None
    assert send(app, "GET", "/v1/models/tone").json() == cards["tone"]
    for model in ("sql", MODEL, "tone"):
        assert complete(app, model=model, max_tokens=1).json()["model"] == model
        assert post(app, "/v1/chat/completions", {
            "model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1,
        }).json()["model"] == model  # fmt: skip
    asked = [None if one is None else (one.lora_name, one.lora_int_id) for one in engine.adapters]
    assert asked == [("sql", 1), ("sql", 1), None, None, ("tone", 2), ("tone", 2)]
    assert "served here: tiny, alias, sql, tone" in error_of(complete(app, model="other"), 404)["message"]


def test_adapters_come_and_go(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    engine, app = app_with(tmp_path)
    answer = post(app, LOAD, {"lora_name": "new", "lora_path": str(tmp_path / "a")})
    assert answer.text == "Success: LoRA adapter 'new' added successfully."
    assert "served already" in error_of(post(app, LOAD, {"lora_name": "new", "lora_path": "a"}), 400)["message"]
    assert post(app, LOAD, {"lora_name": "new", "lora_path": "a", "load_inplace": True}).status_code == 200
    assert complete(app, model="new", max_tokens=1).status_code == 200
    assert engine.adapters[-1].lora_int_id == 2  # another adapter, whose cached blocks are its own
    assert post(app, UNLOAD, {"lora_name": "new"}).text == "Success: LoRA adapter 'new' removed successfully."
    error_of(complete(app, model="new"), 404)
    assert "no adapter 'new' is served" in error_of(post(app, UNLOAD, {"lora_name": "new"}), 404)["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x", "lora_path": "../outside"}, "lora_path must lead into the folder"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path must lead into the folder"),
        ({"lora_name": "x", "lora_path": "linked"}, "lora_path must lead into the folder"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path must lead into the folder"),
        ({"lora_name": "x", "lora_path": "x" * 5000}, "lora_path must lead into the folder"),
        ({"lora_name": "x", "lora_path": "nothing"}, "is no folder"),
        ({"lora_name": "x", "lora_path": "large"}, "`r` is 32; must be an integer from 1 to max_lora_rank (16)"),
        ({"lora_name": "x", "lora_path": "odd"}, "has shape [4, 5], model and adapter_config.json ask for [4, 8]"),
        ({"lora_name": MODEL, "lora_path": "a"}, "is the model's own name"),
        ({"lora_name": "", "lora_path": "a"}, "lora_name must be a text of 1 to 256 characters"),
        ({"lora_name": "x"}, "lora_path"),
    ],
)  # fmt: skip
def test_bad_ones_are_refused(body: dict[str, str], message: str, tmp_path: Path) -> None:
    adapter(tmp_path / "outside")
    folder = tmp_path / "inside"
    adapter(folder / "a")
    adapter(folder / "large", rank=32)
    adapter(folder / "odd", inputs=5)
    (folder / "linked").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        os.symlink(tmp_path / "outside" / name, folder / "linked" / name)
    error = error_of(post(app_with(folder)[1], LOAD, body), 400)
    assert message in error["message"]
    assert "\n" not in error["message"]


def test_nothing_changes_unless_the_server_was_started_so(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    _, app = app_with(tmp_path, f"sql={tmp_path / 'a'}", runtime=False)
    for path, body in ((LOAD, {"lora_name": "x", "lora_path": "a"}), (UNLOAD, {"lora_name": "sql"})):
        assert "--runtime-lora-folder" in error_of(post(app, path, body), 400)["message"]


def test_flags_that_cannot_work_end_the_start(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        make_app(lora_modules=[f"sql={path}"])
    for text in ("sql", "=a", "sql=", "{}", '{"name": 1, "path": 2}', "{"):
        with pytest.raises(ConfigError, match="lora_modules must be NAME=PATH or"):
            app_with(tmp_path, text)
    with pytest.raises(ConfigError, match="is the model's own name"):
        app_with(tmp_path, f"{MODEL}={path}")
    with pytest.raises(ConfigError, match="is no folder"):
        make_app(FakeEngine(enable_lora=True), runtime_lora_folder=str(tmp_path / "nothing"))
