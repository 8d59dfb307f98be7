"""The routes of models that pool, asked by the clients that people have, on servers of tiny checkpoints."""

from __future__ import annotations

import asyncio
import base64
import collections
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from headrace.config import EngineConfig, ServerConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.server.app import build_app
from tests.clients.tasks import imported_where_used
from tests.models.pooling_models import pool, save, save_sentences, save_tokenizer
from tests.models.test_pooling import config_of, hidden_states
from tests.server.hostile import POOLS, Bodies
from tests.server.test_fuzz import COUNT, answers, asked_of, document_holds, no_garbage_of_before
from tests.serving import Serve
from tests.speed import PATIENCE

imported_where_used("langchain_openai")
SETTINGS = (
    "--dtype",
    "float32",
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "4",
    "--served-model-name",
    "tiny",
)
TEXTS = ["who are you?", "the other", "a much longer text than the others, so that it is cut into steps"]


class Embedder:
    def __init__(self, folder: Path, server: Serve) -> None:
        self.folder, self.server = folder, server
        self.url = server.url
        self.model: Any = None

    def expected(self, text: str) -> torch.Tensor:
        ids = [*text.encode()]
        return pool(hidden_states(self.model, [self.id_of(byte) for byte in ids]), "lasttoken")

    def id_of(self, byte: int) -> int:
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        (found,) = backend.encode(chr(byte)).ids
        return found

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = tmp_path_factory.mktemp("embedder")
    model = save("Qwen3ForCausalLM", config_of("Qwen3Model", is_matryoshka=True, vocab_size=512), folder)
    save_tokenizer(folder)
    save_sentences(folder, "lasttoken", prompts={"query": "Q: "})
    with Serve(str(folder), *SETTINGS) as server:
        found = Embedder(folder, server)
        found.model = model.model
        yield found
        assert "Traceback" not in server.text


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = tmp_path_factory.mktemp("ranker")
    config = config_of("Qwen3ForSequenceClassification", num_labels=1, vocab_size=512, pad_token_id=0)
    model = save("Qwen3ForSequenceClassification", config, folder)
    save_tokenizer(folder)
    with Serve(str(folder), *SETTINGS) as server:
        found = Embedder(folder, server)
        found.model = model
        yield found
        assert "Traceback" not in server.text


def test_the_openai_sdk_gets_vectors(embedder: Embedder) -> None:
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        usual = client.embeddings.create(model="tiny", input=TEXTS)  # which asks for base64
        plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        short = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=9)
        with pytest.raises(openai.BadRequestError, match="dimensions must be at most 60, got 99") as caught:
            client.embeddings.create(model="tiny", input="a", dimensions=99)
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="does not generate text"):
            client.completions.create(model="tiny", prompt="hi")
    assert usual.usage.prompt_tokens == usual.usage.total_tokens == sum(map(len, TEXTS))
    assert [one.index for one in usual.data] == [0, 1, 2]
    for text, one, other in zip(TEXTS, usual.data, plain.data, strict=True):
        assert (torch.tensor(one.embedding) - embedder.expected(text)).abs().max() < 1e-5
        assert (torch.tensor(other.embedding) - torch.tensor(one.embedding)).abs().max() < 1e-6
    first = embedder.expected(TEXTS[0])[:9]
    assert (torch.tensor(short.data[0].embedding) - first / first.norm()).abs().max() < 1e-5


def test_bodies_are_what_the_sdk_describes(embedder: Embedder) -> None:
    for wanted in ("float", "base64"):
        body = embedder.post("/v1/embeddings", model="tiny", input=TEXTS, encoding_format=wanted).json()
        if wanted == "base64":
            for one in body["data"]:
                one["embedding"] = [*struct.unpack("<60f", base64.b64decode(one["embedding"]))]
        found = openai.types.CreateEmbeddingResponse.model_validate(body)
        assert found.model_extra is not None
        assert {*found.model_extra} == {"id", "created"}


@pytest.mark.parametrize("which", ["embedder", "ranker"])
def test_any_body_is_answered_or_refused(which: str, request: pytest.FixtureRequest) -> None:
    server: Embedder = request.getfixturevalue(which)
    client = httpx.AsyncClient(base_url=server.url, timeout=PATIENCE)
    statuses = asyncio.run(answers(client, Bodies(0), POOLS, timed=False, count=200))
    assert min(statuses[200], statuses[400]) > 20, statuses
    assert server.post("/tokenize", prompt="ab").json()["count"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("which", ["embedder", "ranker"])
def test_no_body_holds_up_the_loop(which: str, seed: int, request: pytest.FixtureRequest) -> None:
    server: Embedder = request.getfixturevalue(which)

    async def go() -> collections.Counter[int]:
        config = EngineConfig(
            model=str(server.folder),
            dtype="float32",
            max_num_batched_tokens=64,
            max_num_seqs=4,
            served_model_name=["tiny"],
        )
        engine = await AsyncEngine.start(config)
        try:
            return await answers(asked_of(build_app(engine, ServerConfig(), ["tiny"])), Bodies(seed), POOLS, timed=True)
        finally:
            await engine.shutdown()

    with no_garbage_of_before():
        statuses = asyncio.run(go())
    assert min(statuses[200], statuses[400]) > COUNT / 10, statuses


@pytest.mark.slow
@pytest.mark.parametrize("which", ["embedder", "ranker"])
def test_the_document_of_the_api_holds(which: str, request: pytest.FixtureRequest) -> None:
    server: Embedder = request.getfixturevalue(which)
    assert document_holds(server.url, 12, POOLS) == {f"POST {path}" for path in POOLS}


def test_langchain_gets_vectors(embedder: Embedder) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model="tiny", base_url=f"{embedder.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    for text, vector in zip(TEXTS, client.embed_documents(TEXTS), strict=True):
        assert (torch.tensor(vector) - embedder.expected(text)).abs().max() < 1e-5
    assert client.embed_query(TEXTS[0]) == pytest.approx(embedder.expected(TEXTS[0]).tolist(), abs=1e-5)


def test_ids_prompts_and_cutting(embedder: Embedder) -> None:
    ids = [embedder.id_of(byte) for byte in TEXTS[0].encode()]
    expected = embedder.expected(TEXTS[0]).tolist()
    for given in (ids, [ids]):
        answer = embedder.post("/v1/embeddings", model="tiny", input=given).json()
        assert answer["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)
        assert (answer["object"], answer["data"][0]["object"]) == ("list", "embedding")
    named = embedder.post("/v1/embeddings", input="me", prompt_name="query").json()
    assert named["data"][0]["embedding"] == pytest.approx(embedder.expected("Q: me").tolist(), abs=1e-5)
    cut = embedder.post("/v1/embeddings", input="abcdefgh", truncate_prompt_tokens=3).json()
    assert cut["data"][0]["embedding"] == pytest.approx(embedder.expected("abc").tolist(), abs=1e-5)
    assert cut["usage"]["prompt_tokens"] == 3
    endless = embedder.post("/v1/embeddings", input="a" * 500_000, truncate_prompt_tokens=-1).json()
    assert endless["usage"]["prompt_tokens"] == 128
    tokens = embedder.post("/pooling", input=["ab", "c"], encoding_format="base64").json()
    raw = base64.b64decode(tokens["data"][0]["data"])
    assert struct.unpack("<60f", raw[240:]) == pytest.approx(embedder.expected("ab").tolist(), abs=1e-5)
    whole = embedder.post("/pooling", input="ab", task="embed").json()["data"][0]
    assert (whole["object"], whole["data"]) == ("pooling", pytest.approx(embedder.expected("ab").tolist(), abs=1e-5))


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "input is required"),
        ("/v1/embeddings", {"input": []}, "input", "input must not be empty"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", "input\\[1\\] must not be empty"),
        ("/v1/embeddings", {"input": [[5, "a"]]}, "input\\[0\\]\\[1\\]", "expected `int`"),
        ("/v1/embeddings", {"input": [[512]]}, "prompt", "token id 512, which is not in the model's vocabulary"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "input holds 2049 prompts"),
        ("/v1/embeddings", {"input": "a" * 129}, "prompt", "your prompt has 129 tokens"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "one of float, base64"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 200}, "truncate_prompt_tokens", "at most 128"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "not one of the model's: query"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "accepted: embed, token_embed"),
        ("/classify", {"input": "a"}, "model", "this model has no labels: it embeds"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "one first text, or as many"),
        ("/score", {"text_2": ["a"]}, "queries", "queries is required"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents must not be empty"),
        ("/rerank", {"query": "a", "documents": [{"a": 1}]}, "documents\\[0\\]", "expected `str`"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "integer between 0"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    embedder: Embedder, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    import re

    answer = embedder.post(path, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert re.fullmatch(param, error["param"]), error
    assert re.search(message, error["message"]), error


def test_a_model_that_embeds_ranks_by_cosines(embedder: Embedder) -> None:
    query, documents = TEXTS[0], TEXTS[1:]
    cosines = [float(embedder.expected(query) @ embedder.expected(text)) for text in documents]
    answer = embedder.post("/v1/score", text_1=query, text_2=documents).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(cosines, abs=1e-5)
    ranked = embedder.post("/v1/rerank", query=query, documents=documents).json()["results"]
    assert [one["index"] for one in ranked] == sorted(range(2), key=lambda place: -cosines[place])


def test_a_model_that_reads_pairs_ranks_documents(ranker: Embedder) -> None:
    query, documents = "who?", ["me", "nobody at all", "you"]
    ids = [[ranker.id_of(byte) for byte in (query + text).encode()] for text in documents]
    with torch.inference_mode():
        logits = [float(ranker.model(torch.tensor([one])).logits[0, 0]) for one in ids]
    likely = torch.tensor(logits).sigmoid().tolist()
    order = sorted(range(3), key=lambda place: -likely[place])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        mixed = [documents[0], {"text": documents[1]}, documents[2]]
        answer = ranker.post(path, model="tiny", query=query, documents=mixed, top_n=2).json()
        assert [one["index"] for one in answer["results"]] == order[:2]
        assert answer["results"][0]["document"] == {"text": documents[order[0]]}
        assert answer["results"][0]["relevance_score"] == pytest.approx(likely[order[0]], abs=1e-5)
    for path in ("/score", "/v1/score"):
        answer = ranker.post(path, queries=query, documents=documents, use_activation=False).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(logits, abs=1e-4)
        assert answer["data"][1]["object"] == "score"
    labels = ranker.post("/classify", input=["me"]).json()["data"][0]
    assert (labels["label"], labels["num_classes"], len(labels["probs"])) == ("LABEL_0", 1, 1)
    refused = ranker.post("/v1/embeddings", input="a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_a_request_that_is_bad_harms_only_itself(embedder: Embedder) -> None:
    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        return await client.post("/v1/embeddings", json=body)

    async def go() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=embedder.url, timeout=PATIENCE) as client:
            bodies = [{"input": TEXTS} if i % 2 else {"input": [[600]]} for i in range(20)]
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    answers = asyncio.run(go())
    assert [answer.status_code for answer in answers] == [400, 200] * 10
    for answer in answers[1::2]:
        for text, one in zip(TEXTS, answer.json()["data"], strict=True):
            assert one["embedding"] == pytest.approx(embedder.expected(text).tolist(), abs=1e-5)


def test_the_page_of_figures_counts_what_is_pooled(embedder: Embedder) -> None:
    text = httpx.get(f"{embedder.url}/metrics", timeout=PATIENCE).text
    count = next(line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total"))
    assert float(count.split()[-1]) > 0
