"""Models, tokenize, detokenize, health, metrics, version and the description of the API."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import __version__
from headrace.cache_groups import same_layout
from headrace.model_config import ModelConfig
from headrace.planner.catalogue import catalogue
from headrace.planner.record import Decision
from headrace.planner.served import expect, predict_memory, report_memory
from headrace.step import WorkerFacts
from tests.server.fake_engine import FakeEngine, error_of, make_app, post, send


def test_models() -> None:
    data = send(make_app(), "GET", "/v1/models").json()
    assert data["object"] == "list"
    assert [card["id"] for card in data["data"]] == ["tiny", "alias"]
    assert data["data"][0]["object"] == "model"
    assert data["data"][0]["max_model_len"] == 256
    assert send(make_app(), "GET", "/v1/models/alias").json()["id"] == "alias"


def test_tokenize_and_back() -> None:
    app = make_app()
    answer = post(app, "/tokenize", {"prompt": "Hé", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 3
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][0] == "H"
    assert post(app, "/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "Hé"}
    assert post(app, "/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_tokenize_messages() -> None:
    app = make_app()
    answer = post(app, "/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert post(app, "/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == "<|user|>Hi</s><|assistant|>"
    assert answer["token_strs"] is None


def test_tokenize_counts_what_is_too_long_but_not_without_bound() -> None:
    app = make_app()
    assert post(app, "/tokenize", {"prompt": "a" * 1000}).json()["count"] == 1000
    assert "maximum context length" in error_of(post(app, "/tokenize", {"prompt": "a" * 100_000}), 400)["message"]


BAD = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [512]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [5] * 257}, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_tokenize(path: str, body: Any, param: str) -> None:
    assert error_of(post(make_app(), path, body), 400)["param"] == param


def test_without_tokenizer() -> None:
    app = make_app(FakeEngine(with_tokenizer=False))
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert "without tokenizer" in error_of(post(app, path, body), 400)["message"]


def test_health_and_ping() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        engine.dead = False
        assert send(app, method, path).status_code == 200
        engine.dead = True
        error_of(send(app, method, path), 503)


def test_metrics_and_version() -> None:
    answer = send(make_app(), "GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:num_requests_running" in answer.text
    assert send(make_app(), "GET", "/version").json() == {"version": __version__}


def test_the_plan_is_told_with_reasons() -> None:
    engine = FakeEngine(objective="throughput")
    engine.decisions = [
        Decision("max_num_seqs", 64, "room for the 64 that are expected", "1024"),
        Decision("cudagraph_mode", "NONE", "given", source="user"),
    ]
    told = send(make_app(engine), "GET", "/v1/plan").json()
    assert (told["model"], told["objective"], told["kv_cache_tokens"]) == ("tiny", "throughput", 4096)
    assert told["decisions"][0] == {
        "field": "max_num_seqs",
        "value": 64,
        "reason": "room for the 64 that are expected",
        "runner_up": "1024",
        "source": "derived",
    }
    assert told["decisions"][1]["source"] == "user"
    assert told["workload"] is told["prediction"] is told["memory"] is None


def test_the_plan_tells_what_is_expected() -> None:
    engine = FakeEngine(expected_input_len=128, expected_output_len=64, expected_concurrency=8, max_num_seqs=8,
                        max_num_batched_tokens=8192)  # fmt: skip
    raw = catalogue()["llama-3.1-8b"].config
    facts = [WorkerFacts("cuda", "NVIDIA H200", 150_109_106_995, 0, same_layout(16), 0, "ANY")]
    engine.expected = expect(engine.config, ModelConfig.from_dict(raw), facts, 1000)
    told = send(make_app(engine), "GET", "/v1/plan").json()
    assert [told["workload"][name] for name in ("input_len", "output_len", "concurrency")] == [128, 64, 8]
    assert told["workload_source"] == "as flags say"
    assert 2 < told["prediction"]["itl_ms"] < 20


def test_the_plan_tells_memory_as_predicted_and_as_reported() -> None:
    engine = FakeEngine(max_num_seqs=8, max_num_batched_tokens=8192)
    model = ModelConfig.from_dict(catalogue()["llama-3.1-8b"].config)
    facts = [
        WorkerFacts(
            "cuda", "NVIDIA H200", 150_109_106_995, 10**11, same_layout(16, 2**21), 16_061_000_000, "ANY", step_bytes=7
        )
    ]
    engine.memory = report_memory(engine.config, predict_memory(engine.config, model, facts), facts, 1000)
    told = send(make_app(engine), "GET", "/v1/plan").json()["memory"]
    weights = next(part for part in told["parts"] if part["name"] == "weights")
    assert weights == {"name": "weights", "predicted": 16_060_522_496, "reported": 16_061_000_000}
    assert told["kv_cache"] == 1000 * 2**21


def test_openapi_describes_every_route_and_shape() -> None:
    schema = send(make_app(), "GET", "/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rsplit("/")[-1]]["properties"]
    assert {"prompt", "max_tokens", "temperature", "min_p", "cache_salt", "return_tokens_as_token_ids"} <= fields.keys()
    assert len(fields["prompt"]["oneOf"]) == 4
    references = str(schema).split("#/components/schemas/")[1:]
    assert {reference.split("'")[0] for reference in references} <= schema["components"]["schemas"].keys()
    assert "securitySchemes" not in schema["components"]
    keyed = send(make_app(api_key=["k"]), "GET", "/openapi.json", headers={"authorization": "Bearer k"}).json()
    assert keyed["components"]["securitySchemes"]
    open_to_all = {path for path, methods in keyed["paths"].items() if methods.get("get", {}).get("security") == []}
    assert open_to_all == {"/health"}
    assert all("head" not in methods for methods in keyed["paths"].values())


def test_docs_need_no_internet() -> None:
    page = send(make_app(), "GET", "/docs").text
    assert "/v1/chat/completions" in page
    assert "max_completion_tokens" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page
