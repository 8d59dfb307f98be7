"""config.json as a model's folder has it: what is read of it, and one line for a value that is none of its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ModelNotFoundError, UnsupportedModelError
from headrace.hub import DEMO_FOLDER
from headrace.model_config import Fields, ModelConfig
from headrace.models.served import resolve

DEMO: dict[str, Any] = json.loads((DEMO_FOLDER / "config.json").read_text())


def config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(DEMO | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": None}, "`rms_norm_eps` is null; must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is NaN; must be a finite number above 0"),
        ({"rope_theta": float("inf")}, "`rope_theta` is Infinity; must be a finite number above 1"),
        ({"rope_theta": 10**400}, "`rope_theta` is 1000.*must be a finite number above 1"),
        ({"rope_parameters": {"rope_theta": "10000"}}, '`rope_parameters.rope_theta` is "10000"; must be a finite'),
        ({"rope_parameters": "default"}, '`rope_parameters` is "default"; must be an object'),
        ({"rope_scaling": "linear"}, '`rope_scaling` is "linear"; must be an object'),
        ({"quantization_config": "fp8"}, '`quantization_config` is "fp8"; must be an object'),
        ({"vocab_size": "abc"}, '`vocab_size` is "abc"; must be an integer from 1 to 2147483647'),
        ({"vocab_size": True}, "`vocab_size` is true; must be an integer from 1"),
        ({"hidden_size": -4096}, "`hidden_size` is -4096; must be an integer from 1"),
        ({"hidden_size": 2.5}, "`hidden_size` is 2.5; must be an integer from 1"),
        ({"hidden_size": float("inf")}, "`hidden_size` is Infinity; must be an integer from 1"),
        ({"intermediate_size": 2**31}, "`intermediate_size` is 2147483648; must be an integer from 1 to 2147483647"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000; must be an integer from 1 to 10000"),
        ({"num_attention_heads": 0}, "`num_attention_heads` is 0; must be an integer from 1"),
        ({"num_attention_heads": 512, "head_dim": None}, r"`num_attention_heads` is 512; must be at most hidden_size"),
        ({"num_key_value_heads": [4]}, r"`num_key_value_heads` is \[4\]; must be an integer from 1"),
        ({"max_position_embeddings": -1}, "`max_position_embeddings` is -1; must be an integer from 1"),
        ({"tie_word_embeddings": "false"}, '`tie_word_embeddings` is "false"; must be true or false'),
        ({"hidden_act": ["silu"]}, r'`hidden_act` is \["silu"\]; must be a text'),
        ({"dtype": 16}, "`dtype` is 16; must be a text"),
        ({"eos_token_id": "x"}, '`eos_token_id` is "x"; must be a token id or a list of them'),
        ({"bos_token_id": [None]}, r"`bos_token_id` is \[null\]; must be a token id or a list of them"),
        ({"architectures": "LlamaForCausalLM"}, '`architectures` is "LlamaForCausalLM"; must be a list of texts'),
        ({"architectures": []}, "names no architecture"),
    ],
)
def test_a_value_that_is_none_of_its_field_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        resolve(config(**changes))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_missing_field_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json of LlamaForCausalLM lacks `vocab_size`"):
        ModelConfig.from_dict({name: value for name, value in DEMO.items() if name != "vocab_size"})


def test_null_is_as_good_as_absent_and_whole_numbers_may_be_written_as_floats() -> None:
    found = config(head_dim=None, num_key_value_heads=None, rope_scaling=None, max_position_embeddings=1024.0)
    assert (found.head_dim, found.num_kv_heads) == (32, 8)
    assert found.max_position_embeddings == 1024
    assert type(found.max_position_embeddings) is int


def test_token_ids_of_both_files_are_put_together() -> None:
    found = ModelConfig.from_dict(DEMO | {"eos_token_id": [1, 5]}, {"eos_token_id": 7})
    assert found.eos_token_ids == (1, 5, 7)
    with pytest.raises(UnsupportedModelError, match=r'generation_config.json: `eos_token_id` is "x"; must be a token'):
        ModelConfig.from_dict(DEMO, {"eos_token_id": "x"})


def test_a_bos_token_outside_of_the_vocabulary_is_none() -> None:
    assert config(bos_token_id=-1).bos_token_id is None
    assert config(bos_token_id=DEMO["vocab_size"]).bos_token_id is None
    assert config(bos_token_id=5).bos_token_id == 5


def test_fields_inside_an_object_are_named_with_it() -> None:
    fields = Fields({"a": {"b": {"c": 3}}}, "here")
    assert fields.object("a").object("b").integer("c") == 3
    with pytest.raises(UnsupportedModelError, match=r"here: `a.b.c` is 3; must be a text"):
        fields.object("a").object("b").text("c")
    with pytest.raises(UnsupportedModelError, match=r"here lacks `a.d`"):
        fields.object("a").text("d")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        (None, "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_holds_no_object(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEMO))
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelNotFoundError, match=f"/{name} {message}") as caught:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_link_to_nowhere_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    with pytest.raises(ModelNotFoundError, match=r"config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(DEMO))
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blob")
    with pytest.raises(ModelNotFoundError, match=r"generation_config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path)
