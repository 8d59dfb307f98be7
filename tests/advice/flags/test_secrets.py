"""Values whose names say that they are secret are never shown; counts of tokens are."""

from __future__ import annotations

import pytest

from headrace.advice.flags.secrets import is_secret, masked
from headrace.advice.flags.table import find_flag, shown


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("HF_TOKEN", "x", True),
        ("OPENAI_API_KEY", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("DB_PASSWORD", "123456", True),
        ("MY_KEYS", "a,b", True),
        ("--auth-token", "x", True),
        ("--openai-api-key", "x", True),
        ("VLLM_SOME_KEY_FOR_ALL", "abc", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("VLLM_MAX_TOKENS_PER_EXPERT", "163840", False),
        ("--dbo-decode-token-threshold", "32", False),
        ("VLLM_USE_V1", "1", False),
    ],
)
def test_names(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hf_hidden vlm serve m",
        "HF_TOKEN='hf_hidden and' vlm serve m",
        'export OPENAI_API_KEY="hf_hidden"',
        "docker run -e HF_TOKEN=hf_hidden image",
        "docker run -eHF_TOKEN=hf_hidden image",
        "vlm serve m --api-key hf_hidden",
        "vlm serve m --api-key=hf_hidden",
        "vlm serve m --max-num-batched-tokens --api-key 'hf_hidden'",
        "curl -H 'Authorization: Bearer hf_hidden'",
        'vlm --extra \'{"api_key": "hf_hidden"}\'',
        "HF_TOKEN='hf_hidden that never ends",
    ],
)
def test_text_without_its_secrets(text: str) -> None:
    assert "hidden" not in masked(text)
    assert "***" in masked(text)


def test_text_without_secrets_stays() -> None:
    text = "TOKENIZERS_PARALLELISM=false vlm serve m --max-num-batched-tokens 8192 --keyword x --monkey=1"
    assert masked(text).replace("***", "x") == text


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HF_TOKEN", "x", "HF_TOKEN=***"),
        ("VLLM_MY_TOKEN", "x", "VLLM_MY_TOKEN=***"),
        ("VLLM_MAX_TOKENS_PER_EXPERT", "5", "VLLM_MAX_TOKENS_PER_EXPERT=5"),
        ("--my-token", "x", "--my-token ***"),
    ],
)
def test_what_is_shown_of_names_that_no_row_calls_secret(name: str, value: str, expected: str) -> None:
    assert shown(name, value, None) == expected


def test_flags_that_are_known_go_by_their_row() -> None:
    for name, expected in (("--max-num-batched-tokens", "x"), ("--api-key", "***"), ("--hf-token", "***")):
        found = find_flag(name, ("engine", "server"))
        assert shown(name, "x", found.known) == f"{name} {expected}"
    for name in ("--api-key", "--header"):
        found = find_flag(name, ("bench",))
        assert found.known.secret
