"""`bench serve` against a scripted server: load, results, faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.bench import serve
from headrace.cli.bench.client import ClientError, EventSplitter, HttpClient
from headrace.cli.main import main
from headrace.errors import ConfigError
from tests.cli.fake_server import FakeServer, running
from tests.speed import PATIENCE


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


def bench(fake: FakeServer, *argv: str) -> int:
    return main(["bench", "serve", "--port", str(fake.port), "--ready-check-timeout-sec", "0", *argv])


def test_random_load_sends_token_ids_and_writes_vllms_json(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "result.json"
    argv = ["--num-prompts", "20", "--input-len", "8", "--output-len", "5", "--vocab-size", "50", "--ignore-eos"]
    assert bench(fake, *argv, "--output-json", str(out), "--save-detailed", "--metadata", "gpu=none") == 0
    assert len(fake.bodies) == 20
    body = fake.bodies[0]
    assert len(body["prompt"]) == 8
    assert all(0 <= token < 50 for token in body["prompt"])
    assert body | {"prompt": None} == {
        "model": "fake",
        "prompt": None,
        "max_tokens": 5,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    result = json.loads(out.read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (20, 0, 20)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 100)
    assert (result["request_rate"], result["backend"], result["model_id"]) == ("inf", "openai", "fake")
    for key in ("date", "burstiness", "max_concurrency", "duration", "request_throughput", "output_throughput"):
        assert key in result
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert all(f"{statistic}_{metric}_ms" in result for statistic in ("mean", "median", "std", "p99"))
    assert [len(gaps) for gaps in result["itls"]] == [4] * 20
    assert result["gpu"] == "none"
    text = capsys.readouterr().out
    assert "============ Serving Benchmark Result ============" in text
    assert "CPU share of each client process:" in text
    assert result["events_per_output_token"] == 1.0
    assert "Token events per output token:           1.000" in text


def test_connections_are_kept_and_concurrency_is_held(fake: FakeServer) -> None:
    fake.chunk_delay = 0.001
    assert bench(fake, "--num-prompts", "12", "--input-len", "2", "--output-len", "4", "--max-concurrency", "3") == 0
    assert fake.most_at_once == 3
    assert fake.connections == 1 + 3  # one had asked for the models


def test_request_rate_spreads_the_load(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    argv = ["--num-prompts", "10", "--input-len", "2", "--output-len", "2", "--request-rate", "40"]
    assert bench(fake, *argv, "--output-json", str(out), "--save-detailed") == 0
    result = json.loads(out.read_text())
    assert result["request_rate"] == 40.0
    assert 0.2 < result["duration"] < 2.0
    assert result["start_times"] == sorted(result["start_times"])
    assert result["start_times"][-1] - result["start_times"][0] > 0.1


def test_several_client_processes_share_the_load(fake: FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    fake.chunk_delay = 0.02  # so that requests are under way together
    argv = ["--num-prompts", "11", "--input-len", "2", "--output-len", "3", "--max-concurrency", "4"]
    assert bench(fake, *argv, "--num-client-processes", "2", "--output-json", str(out), "--save-detailed") == 0
    result = json.loads(out.read_text())
    assert (result["completed"], result["total_output_tokens"]) == (11, 33)
    assert len(result["client_cpu_shares"]) == 2
    assert fake.most_at_once <= 4
    assert sorted(map(json.dumps, [b["prompt"] for b in fake.bodies])) == sorted(
        {json.dumps(b["prompt"]) for b in fake.bodies}
    )


def test_trace_replay(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    records = [{"timestamp": 200 * i, "input_length": 600, "output_length": 2, "hash_ids": [7, i]} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, records)))
    assert bench(fake, "--dataset-path", str(trace), "--trace-speed", "2") == 0
    assert "Replaying 4 requests of a trace over 0.3 s" in capsys.readouterr().out
    assert len({json.dumps(b["prompt"][:512]) for b in fake.bodies}) == 1
    assert len({json.dumps(b["prompt"]) for b in fake.bodies}) == 4


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def test_chat_sends_text(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_lazy_tokenizer", lambda options: WordTokenizer)
    argv = ["--backend", "openai-chat", "--num-prompts", "2", "--input-len", "3", "--output-len", "4"]
    assert bench(fake, *argv, "--extra-body.top_k", "5") == 0
    body = fake.bodies[0]
    assert body["messages"][0]["role"] == "user"
    assert len(body["messages"][0]["content"].split()) == 3
    assert (body["max_completion_tokens"], body["top_k"]) == (4, 5)
    assert "/v1/chat/completions" in fake.headers[-1]


def test_sharegpt_sends_text(fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_lazy_tokenizer", lambda options: WordTokenizer)
    file = tmp_path / "talks.json"
    talk = [{"value": "how do you do today"}, {"value": "I am very well"}]
    file.write_text(json.dumps([{"conversations": talk}]))
    assert bench(fake, "--dataset-path", str(file), "--num-prompts", "2") == 0
    assert [(b["prompt"], b["max_tokens"]) for b in fake.bodies] == [("how do you do today", 4)] * 2


def test_texts_without_tokenizer_name_the_flag(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(fake, "--backend", "openai-chat", "--num-prompts", "1") == 2
    assert "give --tokenizer" in capsys.readouterr().err


def test_test_run_and_warm_up_use_prompts_of_their_own(fake: FakeServer) -> None:
    argv = ["bench", "serve", "--port", str(fake.port), "--num-prompts", "2", "--input-len", "4", "--output-len", "2"]
    assert main([*argv, "--num-warmups", "3"]) == 0
    prompts = [json.dumps(b["prompt"]) for b in fake.bodies]
    assert len(prompts) == 1 + 3 + 2
    assert len(set(prompts[:4])) == 1
    assert prompts[0] not in prompts[4:]


def test_key_is_sent_and_never_printed(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    bench(fake, "--num-prompts", "1", "--input-len", "1", "--output-len", "1", "--api-key", "s3cret")
    assert "authorization: Bearer s3cret" in fake.headers[-1]
    assert "s3cret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("status", 'HTTP 400: {"error": {"message": "max_tokens is too large"}}'),
        ("error", "the engine died"),
        ("cut", "closed the connection in the middle"),
    ],
)
def test_failed_requests_are_counted_and_told(
    fault: str, error: str, fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fault = fault
    assert bench(fake, "--num-prompts", "3", "--input-len", "2", "--output-len", "4") == 1
    captured = capsys.readouterr()
    assert f"{'Failed requests:':<40} 3" in captured.out
    assert captured.err.count("failed request") == 1
    assert error in captured.err


def test_a_refused_test_run_ends_the_benchmark(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fault = "status"
    assert main(["bench", "serve", "--port", str(fake.port), "--num-prompts", "5"]) == 1
    assert "initial test run failed: HTTP 400" in capsys.readouterr().err


def test_where_nothing_listens_the_benchmark_ends_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.sleep", lambda seconds: pytest.fail("waits"))
    assert main(["bench", "serve", "--port", "1"]) == 1
    assert capsys.readouterr().err == (
        "headrace: error: cannot connect to 127.0.0.1:1: Connection refused; start a server there (headrace serve), or "
        "give --ready-check-timeout-sec 600 to wait for one\n"
    )


def test_a_server_that_is_still_to_come_is_waited_for_as_long_as_asked_with_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PROGRESS_SECONDS", 0.05)
    monkeypatch.setattr(serve, "POLL", 0.05)
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0.2"]) == 1
    *progress, last = capsys.readouterr().err.splitlines()
    assert len(progress) >= 2
    waiting = "waiting for http://127.0.0.1:1, 0 of 0.2 s: cannot connect to 127.0.0.1:1: Connection refused"
    assert {*progress} == {waiting}
    assert last == "headrace: error: cannot connect to 127.0.0.1:1: Connection refused"


def test_requests_beyond_the_servers_limit_are_announced(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    bench(fake, "--num-prompts", "2", "--input-len", "4095", "--output-len", "2")
    assert "2 of 2 requests exceed the server's max_model_len (4096)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "wanted", "facts"),
    [
        (b'{"data": [{"id": "a", "root": "/m", "max_model_len": 9}, {"id": "b"}]}', None, ("a", "/m", 9)),
        (b'{"data": [{"id": "a", "max_model_len": 9}, {"id": "b"}]}', "b", ("b", None, None)),
        (b'{"data": []}', "x", ("x", None, None)),
        (b"nonsense", "x", ("x", None, None)),
    ],
)
def test_facts_of_the_model_list(body: bytes, wanted: str | None, facts: tuple[Any, ...]) -> None:
    found = serve.facts_of(body, wanted)
    assert (found.model, found.root, found.max_model_len) == facts


def test_a_server_without_models_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="give --model"):
        serve.facts_of(b'{"data": []}', None)


def test_vocab_size_is_read_where_a_config_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 321}')
    from headrace.cli.bench.options import ServeBenchOptions

    facts = serve.ServerFacts("name", str(tmp_path), None)
    assert serve.known_vocab_size(ServeBenchOptions(), facts) == 321
    assert serve.known_vocab_size(ServeBenchOptions(), serve.ServerFacts("name", None, None)) is None


STREAM = b": ping\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: three\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 1000])
def test_events_come_whole_however_the_bytes_are_cut(size: int) -> None:
    seen: list[bytes] = []
    splitter = EventSplitter(lambda payload, now: seen.append(payload))
    for i in range(0, len(STREAM), size):
        splitter.feed(STREAM[i : i + size], 0.0)
    assert seen == [b"one", b"two", b"three"]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def client_of(handle: Handler, seconds: float = PATIENCE) -> AsyncIterator[HttpClient]:
    """A client of a server that handles each connection so. `seconds`: for how long it waits."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, seconds)
    try:
        yield client
    finally:
        client.close()
        server.close()


async def test_a_closed_idle_connection_is_replaced() -> None:
    """The server hangs up after each answer although it did not say so."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.close()

    async with client_of(handle) as client:
        for pause in (0.0, 0.0, 0.05, 0.0):
            assert (await client.get("/"))[0] == 200
            await asyncio.sleep(pause)


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
async def test_a_server_that_speaks_no_http(answer: bytes) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with client_of(handle) as client:
        with pytest.raises(ClientError):
            await client.get("/")


async def test_a_silent_server_times_out() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with client_of(handle, 0.05) as client:
        with pytest.raises(ClientError, match=r"no answer within 0\.05 s"):
            await client.get("/")
