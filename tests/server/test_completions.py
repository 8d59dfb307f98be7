"""Shapes of /v1/completions, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from headrace.request import Logprob
from headrace.server.answers import Usage
from headrace.server.generation import UsageCount
from headrace.server.protocol import StreamOptions
from tests.server.fake_engine import MODEL, TEXT, FakeEngine, chat, complete, error_of, events, make_app, post


def test_answer_has_openai_shape() -> None:
    answer = complete(make_app(), max_tokens=4).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {"index": 0, "text": "Once", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_cannot_run_keeps_the_others_from_running(stream: bool) -> None:
    engine = FakeEngine()
    answer = complete(make_app(engine), prompt=["a", "b", "c" * 300], stream=stream)
    assert "maximum context length" in error_of(answer, 400)["message"]
    assert engine.requests == []


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_logprobs_of_too_many_prompt_tokens(fields: dict[str, Any]) -> None:
    answer = complete(make_app(), prompt=[[5] * 250] * 256, max_tokens=1, **fields)
    assert "one request may ask for 1048576" in error_of(answer, 400)["message"]


def test_default_is_sixteen_tokens() -> None:
    assert complete(make_app()).json()["usage"]["completion_tokens"] == 16


def test_finish_reason_stop() -> None:
    choice = complete(make_app(), max_tokens=100).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("Hello", 1), ([75, 76], 1), (["a", "b", "c"], 3), ([[75], [76, 77]], 2)],
)  # fmt: skip
def test_every_form_of_prompt(prompt: object, count: int) -> None:
    engine = FakeEngine()
    answer = complete(make_app(engine), prompt=prompt, n=2, max_tokens=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
    assert len(engine.requests) == count
    assert len({request["id"] for request in engine.requests}) == count
    assert not engine.active
    assert not engine.aborted


def test_choice_index_is_prompt_index_times_n_plus_i() -> None:
    answer = complete(make_app(), prompt=["a", "bb"], n=2, max_tokens=1, echo=True).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "aO"), (1, "aO"), (2, "bbO"), (3, "bbO")]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4


def test_logprobs() -> None:
    logprobs = complete(make_app(), max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["O", "n"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0]
    assert logprobs["text_offset"] == [0, 1]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3]
    assert logprobs["top_logprobs"][0]["O"] == -1.0


def test_logprobs_zero_gives_the_sampled_token_alone() -> None:
    logprobs = complete(make_app(), max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"O": -1.0}]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_what_json_cannot_say_is_the_lowest_logprob(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM; JSON has no infinity."""
    entry = {5: Logprob(value, 9, "x"), 6: Logprob(-0.1, 1, "y")}
    monkeypatch.setattr(FakeEngine, "_logprob", lambda self, token_id, k: entry | {token_id: entry[5]})
    choice = complete(make_app(), max_tokens=1, logprobs=2, echo=True, prompt_logprobs=1).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [None, *[-9999.0] * 5]
    assert choice["logprobs"]["top_logprobs"][-1]["x"] == -9999.0
    assert choice["prompt_logprobs"][1]["5"]["logprob"] == -9999.0
    content = chat(make_app(), max_tokens=1, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["logprob"] == -9999.0


def test_tokens_as_ids() -> None:
    logprobs = complete(make_app(), max_tokens=1, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"][0].startswith("token_id:")
    assert all(key.startswith("token_id:") for key in logprobs["top_logprobs"][0])


def test_echo_with_logprobs_as_lm_eval_sends_it() -> None:
    """{"prompt": [[ids], ...], "max_tokens": 1, "logprobs": 1, "echo": true}: prompt + one token."""
    body = {"prompt": [[75, 76, 77], [78, 79]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    choices = complete(make_app(), **body, seed=1234).json()["choices"]
    for choice, length in zip(choices, (3, 2), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == [None, *[-1.0] * length]
        assert logprobs["top_logprobs"][0] is None
        assert all(max(top.values()) == -0.5 for top in logprobs["top_logprobs"][1:])
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert logprobs["text_offset"] == list(range(length + 1))


def test_offsets_of_an_echo_are_those_of_its_text() -> None:
    """<s> is a token of the prompt and no part of the text."""
    choice = complete(make_app(), prompt=[1, 75, 76], max_tokens=1, logprobs=0, echo=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "<s>"
    assert logprobs["text_offset"] == [0, 0, 1, 2]
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


def test_echo_of_the_prompt_alone() -> None:
    answer = complete(make_app(), max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    assert len(choice["logprobs"]["tokens"]) == 5
    assert answer["usage"]["completion_tokens"] == 0
    assert error_of(complete(make_app(), max_tokens=0), 400)["param"] == "max_tokens"


def test_prompt_logprobs_and_token_ids() -> None:
    choice = complete(make_app(), max_tokens=1, prompt_logprobs=1, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    first = choice["prompt_logprobs"][1]
    assert first[str(choice["prompt_token_ids"][1])] == {"logprob": -1.0, "rank": 2, "decoded_token": "e"}
    assert len(choice["token_ids"]) == 1
    assert "prompt_logprobs" not in complete(make_app(), max_tokens=1).json()["choices"][0]


def test_stream() -> None:
    found = events(complete(make_app(), max_tokens=4, stream=True))
    assert found[-1] == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in found[:-1]] == list("Once")
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]] == [None, None, None, "length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in found[:-1]}) == 1
    assert all("usage" not in chunk for chunk in found[:-1])


def test_stream_writes_several_tokens_at_once_where_several_have_come() -> None:
    engine = FakeEngine()
    engine.tokens_a_step = 3
    found = events(complete(make_app(engine), max_tokens=4, stream=True, logprobs=0))
    assert [chunk["choices"][0]["text"] for chunk in found[:-1]] == ["Onc", "e"]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in found[:-1]] == [[0, 1, 2], [3]]


def test_stream_usage() -> None:
    found = events(complete(make_app(), max_tokens=2, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in found[:2]] == [None, None]
    assert found[2]["choices"] == []
    assert found[2]["usage"]["completion_tokens"] == 2
    assert found[2]["usage"]["prompt_tokens"] == 5
    assert found[3] == "[DONE]"


@pytest.mark.parametrize("prompt", ["Hello", ["Hello", "there"]])
def test_usage_counts_cached_tokens(prompt: str | list[str]) -> None:
    engine = FakeEngine()
    engine.cached = 2
    count = 2 if isinstance(prompt, str) else 4
    usage = complete(make_app(engine), prompt=prompt, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": count}
    options = {"include_usage": True}
    found = events(complete(make_app(engine), prompt=prompt, max_tokens=2, stream=True, stream_options=options))
    assert found[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": count}


def test_continuous_usage_is_each_choices_own() -> None:
    count = UsageCount(StreamOptions(include_usage=True, continuous_usage_stats=True))
    count.prompt_tokens, count.completion_tokens = {0: 5}, {0: 3, 1: 7}
    assert [count.in_event(0, choice) for choice in (0, 1)] == [Usage(5, 3, 8), Usage(5, 7, 12)]


def test_stream_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(complete(make_app(), max_tokens=3, n=2, stream=True, stream_options=options))
    by_choice = [chunk["usage"]["completion_tokens"] for chunk in found[:-2] if chunk["choices"][0]["index"] == 1]
    assert by_choice == [1, 2, 3]
    assert found[-2]["usage"]["completion_tokens"] == 6


def test_stream_of_several_prompts_with_echo() -> None:
    found = events(complete(make_app(), prompt=["a", "bb"], n=2, max_tokens=2, echo=True, stream=True))
    texts: dict[int, str] = {}
    for chunk in found[:-1]:
        choice = chunk["choices"][0]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "aOn", 1: "aOn", 2: "bbOn", 3: "bbOn"}


def test_stream_echo_with_logprobs() -> None:
    found = events(complete(make_app(), max_tokens=2, echo=True, stream=True, logprobs=1))
    first, second = (chunk["choices"][0] for chunk in found[:-1])
    assert first["text"] == "HelloO"
    assert first["logprobs"]["token_logprobs"] == [None, *[-1.0] * 5]
    assert first["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert second["logprobs"]["text_offset"] == [6]


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine(scheduling_policy="priority")
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.1, "seed": 3, "stop_token_ids": [9], "min_tokens": 1, "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "allowed_token_ids": [5, 6], "bad_words": ["x"], "logit_bias": {"5": -1.0}, "max_tokens": 2,
    }  # fmt: skip
    answer = complete(
        make_app(engine), **fields, stop="wheel", add_special_tokens=False, priority=3, cache_salt="salt", best_of=1,
        user="someone", suffix=None, response_format={"type": "text"}, unknown_field=[1],
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    request = engine.requests[0]
    fields["logit_bias"] = {5: -1.0}
    assert {name: getattr(request["params"], name) for name in fields} == fields
    assert request["params"].stop == ["wheel"]
    assert (request["special"], request["priority"], request["salt"]) == (False, 3, "salt")


def test_sampling_defaults_fill_what_is_left_out() -> None:
    engine = FakeEngine()
    engine.default_sampling = {"temperature": 0.5, "top_k": 7}
    assert complete(make_app(engine), temperature=0.0, top_p=None).status_code == 200
    params = engine.requests[0]["params"]
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 7, 1.0)


def test_null_means_default() -> None:
    names = (
        "n temperature top_p top_k stop max_tokens logprobs echo stream stream_options seed logit_bias model".split()
    )
    engine = FakeEngine()
    assert complete(make_app(engine), **dict.fromkeys(names)).status_code == 200
    assert engine.requests[0]["params"].temperature == 1.0


def test_without_tokenizer_ids_come_back() -> None:
    app = make_app(FakeEngine(with_tokenizer=False))
    choice = complete(app, prompt=[75], max_tokens=2, logprobs=1, return_token_ids=True).json()["choices"][0]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert "token ids" in error_of(complete(app), 400)["message"]


def test_request_id_is_never_the_engines_key() -> None:
    """CVE-2026-116176: X-Request-Id reached a socket's connect."""
    engine = FakeEngine()
    app = make_app(engine, enable_request_id_headers=True)

    def ask(request_id: str) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 1, "request_id": "ipc:///tmp/x"}
        return post(app, "/v1/completions", body, headers={"x-request-id": request_id})

    for _ in range(2):
        answer = ask("abc-1")
        assert answer.headers["x-request-id"] == "abc-1"
        assert answer.json()["id"] != "abc-1"
    answer = ask("tcp://evil:1/" + "x" * 100)
    assert answer.headers["x-request-id"] == answer.json()["id"] == engine.requests[-1]["id"]
    assert len({request["id"] for request in engine.requests}) == 3
    assert all(request["id"].startswith("cmpl-") for request in engine.requests)
    assert "x-request-id" not in complete(make_app()).headers


def test_a_search_with_beams() -> None:
    """The scripted model thinks its second best token likelier than what it says, so beams leave its text."""
    body = complete(make_app(), use_beam_search=True, n=2, best_of=3, max_tokens=3).json()
    assert len(body["choices"]) == 2
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"stream": True}, "stream"), ({"logprobs": 1}, "logprobs"), ({"stop": "x"}, "stop"),
     ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 11}, "beam_width")],
)  # fmt: skip
def test_what_does_not_go_with_beams(fields: dict[str, Any], param: str) -> None:
    assert error_of(complete(make_app(), use_beam_search=True, max_tokens=2, **fields), 400)["param"] == param
