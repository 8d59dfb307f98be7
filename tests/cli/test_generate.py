"""`headrace generate`: where prompts come from, what the engine is asked, what is printed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from headrace.cli.generate import SAMPLING_HELP, parse_prompts
from headrace.cli.main import main
from headrace.errors import ConfigError
from headrace.sampling_params import COMPATIBLE_ONLY, SamplingParams
from tests.cli.fake_llm import FakeLLM


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one\n\n two \n", ["one", " two "]),
        ('{"prompt": "a"}\n{"prompt_token_ids": [1, 2]}\n', ["a", [1, 2]]),
        ('{"prompt": [3]}', [[3]]),
        ('{"name": "not a prompt record"}\nplain', ['{"name": "not a prompt record"}', "plain"]),
        ("", []),
        ("\n  \n", []),
    ],
)
def test_prompts_of_a_file(text: str, prompts: list[object]) -> None:
    assert parse_prompts(text, "file") == prompts


@pytest.mark.parametrize("line", ["plain", '{"prompt": 5}', '{"prompt_token_ids": []}', '{"prompt_token_ids": ["a"]}'])
def test_a_bad_line_among_json_lines_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="file, line 3: needs"):
        parse_prompts('{"prompt": "a"}\n\n' + line, "file")


def test_every_sampling_parameter_is_a_flag_with_help() -> None:
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    assert list(SAMPLING_HELP) == [name for name in names if name not in COMPATIBLE_ONLY]


def test_flags_reach_the_engine(fake_llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "generate --prompt x demo -tp 2 --temperature 0 --top-p 0.5 --top-k 7 --stop . ! --stop-token-ids 1 2 --seed 5"
        " --n 2 --logit-bias.3 -1 --no-skip-special-tokens --ignore-eos --max-tokens 4 --allowed-token-ids 1 2"
    )
    assert main(line.split()) == 0
    (llm,) = fake_llm.made
    assert (llm.config.model, llm.config.tensor_parallel_size, llm.config.seed) == ("demo", 2, 5)
    prompts, (params,) = llm.calls[0]
    assert prompts == ["x"]
    assert params == SamplingParams(
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        stop=[".", "!"],
        stop_token_ids=[1, 2],
        seed=5,
        n=2,
        logit_bias={3: -1.0},
        skip_special_tokens=False,
        ignore_eos=True,
        max_tokens=4,
        allowed_token_ids=[1, 2],
    )
    assert not llm.alive
    assert capsys.readouterr().out == "x é0\n\nx é1\n"


def test_defaults(fake_llm: type[FakeLLM]) -> None:
    assert main(["generate", "demo", "--prompt", "a", "--prompt", "b"]) == 0
    prompts, params = fake_llm.made[0].calls[0]
    assert prompts == ["a", "b"]
    assert params[0] == SamplingParams(max_tokens=128)


def test_json_lines(fake_llm: type[FakeLLM], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt_token_ids": [8, 9]}\n')
    assert (
        main(["generate", "demo", "--prompts-file", str(file), "--json", "--max-tokens", "2", "--logprobs", "0"]) == 0
    )
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    entry = {"logprob": -0.5, "rank": 1}
    assert first == {
        "prompt": "a",
        "text": " é0",
        "token_ids": [0, 1],
        "finish_reason": "length",
        "logprobs": [{"0": entry | {"decoded_token": "t0"}}, {"1": entry | {"decoded_token": "t1"}}],
    }
    assert second["prompt"] == [8, 9]


def test_standard_input(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["generate", "demo", "--json"]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["one", "two"]
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert main(["generate", "demo", "--prompts-file", "-"]) == 0
    assert fake_llm.made[1].calls[0][0] == ["three"]


def test_the_demo_has_a_prompt_of_its_own_at_a_terminal(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["generate", "demo"]) == 0
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert main(["generate", "org/other"]) == 2
    assert "no prompt given" in capsys.readouterr().err


def test_the_engine_is_closed_when_a_prompt_is_refused(
    fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConfigError("too long")

    monkeypatch.setattr(fake_llm, "generate", refuse)
    assert main(["generate", "demo", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "headrace: error: too long\n"
    assert not fake_llm.made[0].alive
