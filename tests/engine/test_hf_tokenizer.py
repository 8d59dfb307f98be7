"""What `LLM.get_tokenizer` returns beyond what test_tokenizer.py compares with transformers: arrays, and refusals."""

import numpy as np
import pytest

from headrace.engine.hf_tokenizer import HFTokenizer
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import RequestError
from tests.engine.fakes import model_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    folder = model_folder(tmp_path_factory.mktemp("model"))
    return HFTokenizer(Tokenizer.from_folder(folder), "a/model")


def test_arrays_decode_like_lists(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.encode("hello")
    assert tokenizer.decode(np.array(ids)) == "hello"
    assert tokenizer.decode(np.array([ids, ids])) == ["hello", "hello"]
    assert tokenizer.decode(np.array(ids)[0]) == "h"
    assert tokenizer.decode([]) == ""


def test_entries_are_attributes_too(tokenizer: HFTokenizer) -> None:
    found = tokenizer("ab", padding=False, return_tensors=None)
    assert found.attention_mask == found["attention_mask"] == [1, 1]
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = found.token_type_ids


@pytest.mark.parametrize("options", [{"return_tensors": "pt"}, {"padding": True}, {"truncation": True}], ids=str)
def test_what_the_tokenizer_does_not_do_is_refused_by_name(tokenizer: HFTokenizer, options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=f"does not take {name}=") as caught:
        tokenizer("ab", **options)
    assert caught.value.param == name


def test_a_template_that_is_none_is_the_requests_fault(tokenizer: HFTokenizer) -> None:
    with pytest.raises(RequestError, match="not a valid jinja template") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template="{% if %}")
    assert caught.value.param == "chat_template"


@pytest.mark.parametrize(
    ("messages", "add_generation_prompt", "message"),
    [
        ([{"role": "assistant", "content": "x"}], True, "needs add_generation_prompt to be false"),
        ([], False, "needs a last message whose content is text"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x"}]}], False, "content is text"),
        ([{"role": "assistant", "content": " "}], False, "does not show the last message's text"),
    ],
)
def test_what_cannot_be_continued(
    tokenizer: HFTokenizer, messages: list, add_generation_prompt: bool, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=True
        )
