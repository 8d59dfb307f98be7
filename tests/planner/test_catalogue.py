"""The catalogue: totals as published, layers as the reference implementation has them, names as people write them."""

from __future__ import annotations

import copy
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.planner.catalogue import catalogue, find_config, find_model
from headrace.planner.shapes import shape_of

WANTED = """llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.3-70b llama-4-scout llama-4-maverick mistral-7b
mixtral-8x7b mixtral-8x22b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 deepseek-r1 deepseek-v3.2
kimi-k2.5 gpt-oss-20b gpt-oss-120b gemma-3-27b glm-5 mistral-large-3 minimax-m2.5""".split()
REFERENCES = {
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "MistralLarge3ForCausalLM": "Mistral4ForCausalLM",
}
"""architecture that transformers has not -> one that is built of the same layers"""


def test_the_models_that_are_promised_are_there() -> None:
    assert set(WANTED) <= catalogue().keys()


@pytest.mark.parametrize("name", catalogue())
def test_parameters_are_those_published(name: str) -> None:
    entry, found = catalogue()[name], find_model(name)
    assert found.total_weights == pytest.approx(entry.parameters, rel=0.01)
    assert found.source == entry.source
    assert entry.source.startswith("https://huggingface.co/")
    assert entry.source.endswith(("/config.json", "/params.json"))
    assert entry.parameters_source.startswith("https://")
    if abs(found.total_weights / entry.parameters - 1) > 1e-4:
        assert entry.note, f"{name} differs from the published total: say why"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if place % 4 else []) for place, name in enumerate(catalogue())],
)
def test_layers_weigh_what_the_reference_implementation_builds(name: str) -> None:
    """Transformers builds the architecture, with few layers and experts, without memory; parameters are compared to
    the last one."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = _few_layers(catalogue()[name].config)
    if (architecture := config["architectures"][0]) in REFERENCES:
        config = {**config.get("text_config", config), "architectures": [REFERENCES[architecture]]}
    model_class = getattr(transformers, config["architectures"][0])
    raw = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        built = model_class(model_class.config_class(**copy.deepcopy(raw)))
    expected = sum(parameter.numel() for parameter in built.parameters())
    expected += sum(buffer.numel() for name, buffer in built.named_buffers() if name.endswith("correction_bias"))
    found = shape_of(config, name)
    assert found.total_weights - found.spec.draft_weights == expected


def _few_layers(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 6 if "sliding_window" in text else 4
    for experts in ("num_experts", "num_local_experts", "n_routed_experts"):
        if experts in text:
            text[experts] = 16
    if "vision_config" in config:
        vision = config["vision_config"]
        vision[next(key for key in vision if key.endswith(("num_hidden_layers", "depth")))] = 2
        if "deepstack_visual_indexes" in vision:
            vision["deepstack_visual_indexes"] = [0, 1]
        vision["vision_use_head"] = False  # SigLIP's, which is in no checkpoint
    return config


@pytest.mark.parametrize(
    ("text", "name", "weight_format", "fp8_kv_cache"),
    [
        ("llama-3.1-8b", "llama-3.1-8b", "bf16", False),
        ("Llama-3.1-8B", "llama-3.1-8b", "bf16", False),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", "bf16", False),
        ("meta-llama/Llama-4-Scout-17B-16E", "llama-4-scout", "bf16", False),
        ("Qwen3 30B A3B", "qwen3-30b-a3b", "bf16", False),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "llama-3.1-405b", "fp8", True),
        ("amd/Mixtral-8x22B-Instruct-v0.1-FP8-KV", "mixtral-8x22b", "fp8", True),
        ("amd/Llama-3.3-70B-Instruct-MXFP4-Preview", "llama-3.3-70b", "mxfp4", False),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama-3.1-70b", "int4", False),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "llama-3.1-70b", "int4", False),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama-3.3-70b", "nvfp4", False),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16", "llama-3.1-8b", "w8a16", False),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b", "fp8", False),
        ("./Meta-Llama-3-8B-Instruct-FP8-KV/", "llama-3-8b", "fp8", True),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1", "fp8", False),
        ("unsloth/gpt-oss-120b-BF16", "gpt-oss-120b", "bf16", False),
        ("google/gemma-3-27b-it", "gemma-3-27b", "bf16", False),
    ],
)
def test_names_as_people_write_them(text: str, name: str, weight_format: str, fp8_kv_cache: bool) -> None:
    found = find_model(text)
    assert (found.name, found.weight_format, found.fp8_kv_cache) == (name, weight_format, fp8_kv_cache)


@pytest.mark.parametrize(
    "text", ["llama-3.1-9b", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "Qwen/Qwen3-8B-Embedding", "no/such", ""]
)
def test_a_miss_is_told_near_names(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no folder.*no Hugging Face id.*catalogue; (near names|it has): .*\w"):
        find_model(text)
    if text == "llama-3.1-9b":
        with pytest.raises(ConfigError, match=r"near names: llama-3\.1-8b"):
            find_model(text)


def test_a_folder_and_its_config_json(tmp_path: Path) -> None:
    config = catalogue()["qwen3-8b"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    for text in (str(tmp_path), str(tmp_path / "config.json")):
        found = find_model(text)
        assert (found.name, found.source) == (text, str(tmp_path / "config.json"))
        assert found.total_weights == find_model("qwen3-8b").total_weights
    assert find_config(str(tmp_path)).config == config


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_config_json_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json (is not valid JSON|must hold a JSON object)"):
        find_model(str(tmp_path))


@pytest.mark.parametrize("text", ["~nosuchuser/model", "x" * 300, "a/" + "x" * 300, "~nosuchuser/config.json"])
def test_a_name_that_no_file_can_have_is_a_miss(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no folder.*no Hugging Face id"):
        find_model(text)


def test_a_config_json_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def refuse(path: Path, **kwargs: str) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"/config\.json cannot be read: Permission denied"):
        find_model(str(tmp_path))


def test_the_embedded_model() -> None:
    assert find_model("demo").num_layers > 0


def test_an_id_in_the_hub_cache_goes_before_the_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--Qwen--Qwen3-8B"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123")
    assert find_model("Qwen/Qwen3-8B").name == "qwen3-8b"
    (folder / "snapshots" / "0123").mkdir(parents=True)
    longer = {**catalogue()["qwen3-8b"].config, "max_position_embeddings": 131072}
    (folder / "snapshots" / "0123" / "config.json").write_text(json.dumps(longer))
    found = find_model("Qwen/Qwen3-8B")
    assert (found.name, found.spec.max_position_embeddings) == ("Qwen/Qwen3-8B", 131072)
