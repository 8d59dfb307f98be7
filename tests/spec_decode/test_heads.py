"""Heads in their published layouts guess what the papers say, in the midst of serving, and change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.attention.batch import Batch
from headrace.errors import UserError
from headrace.spec_decode.drafter import Tables, rows_of
from headrace.spec_decode.head import HeadDrafter
from tests.spec_decode import heads

SIZES = {"h": 48, "q": 64, "k": 32, "f": 72, "v": 131, "r": 50}
HEADS, KV_HEADS, LAYERS, GUESSES = 4, 2, 6, 3
LLAMA: dict[str, Any] = {
    "vocab_size": SIZES["v"], "hidden_size": SIZES["h"], "intermediate_size": SIZES["f"], "head_dim": 16,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256,
    "rms_norm_eps": heads.EPS, "rope_theta": heads.THETA, "tie_word_embeddings": False, "num_hidden_layers": LAYERS,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3,
}  # fmt: skip
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
STATES_BETWEEN = ["linear_attention", "full_attention"] * 2
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "deepseek": ("DeepseekV3ForCausalLM", EXPERTS | LATENT | {"num_key_value_heads": 4, "head_dim": None}),
    "glm": ("Glm4MoeForCausalLM", EXPERTS | {"use_qk_norm": True}),
    "mimo": ("Qwen2ForCausalLM", {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "ernie": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_layer_start_index": 1}
        | {"num_hidden_layers": 3, "moe_layer_end_index": 2},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "layer_types": STATES_BETWEEN},
    ),
}  # fmt: skip
HEAD_CONFIG = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "max_position_embeddings": 64}
SMALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_model_len": 120, "max_num_seqs": 4,
    "max_num_batched_tokens": 20, "num_gpu_blocks_override": 16, "skip_tokenizer_init": True,
}  # fmt: skip


def save_target(name: str, folder: Path, layers: int | None = None) -> Any:
    """A model of random weights, in transformers; the last `layers` of its layers are not saved."""
    architecture, fields = TARGETS[name]
    model_class = getattr(transformers, architecture)
    fields = {**LLAMA, **fields}
    if layers:
        fields["num_hidden_layers"] += layers
    torch.manual_seed(3)
    model = model_class(model_class.config_class(**{k: v for k, v in fields.items() if v is not None})).eval().float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return model


def with_head(name: str, layout: str, folder: Path) -> tuple[Any, heads.PlainHead, dict[str, Any]]:
    """A target and its head, on disk and in plain torch, and the speculative_config."""
    if layout in ("eagle", "eagle3"):
        model = save_target(name, folder / "target")
        w = heads.random_weights(heads.shapes(layout, SIZES))
        given = {"method": layout, "model": str(folder / "head"), "num_speculative_tokens": GUESSES}
        if layout == "eagle":
            w["fc.bias"] = torch.randn(SIZES["h"])
            heads.save_head(folder / "head", {**HEAD_CONFIG, "bias": True}, w)
            return model, heads.eagle(model, w, HEADS, KV_HEADS), given
        w["d2t"], w["t2d"] = heads.own_tokens(SIZES["v"], SIZES["r"])
        config = {**HEAD_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SIZES["r"]}
        heads.save_head(folder / "head", config, w)
        return model, heads.eagle3(model, w, HEADS, KV_HEADS, (2, LAYERS // 2, LAYERS - 3)), given
    model = save_target(name, folder / "target", layers=1)
    count = model.config.num_hidden_layers - 1
    w = heads.random_weights(heads.shapes(layout, SIZES, n=count))
    own, of = f"model.layers.{count}.", heads.block_name(layout, n=count)
    file = folder / "target" / "model.safetensors"
    kept = {}
    for held, one in load_file(file).items():
        kept[held.replace(own, of) if held.startswith(own) else held] = one
    save_file(kept, file)
    fields: dict[str, Any] = {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    fields["layer_types"] = (getattr(model.config, "layer_types", None) or [])[:count] or None
    if layout == "mimo":
        fields["architectures"] = ["MiMoForCausalLM"]
    heads.add_tensors(folder / "target", w, fields)
    block = model.model.layers[count]
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    return model, heads.further(model, w, block, layout), {"method": "mtp", "num_speculative_tokens": GUESSES}


CASES = [
    ("llama", "eagle"), ("qwen3", "eagle"), ("llama", "eagle3"), ("qwen3", "eagle3"),
    ("deepseek", "behind the layers"), ("glm", "behind the layers"), ("mimo", "mimo"), ("ernie", "ernie"),
    ("qwen3-next", "qwen"),
]  # fmt: skip


class Watched:
    """Keeps what a drafter guesses: (tokens, guesses, temperature, seed)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guesses: list[tuple[list[int], list[int], float, int]] = []
        propose = HeadDrafter.propose

        def watched(drafter: HeadDrafter, tables: Tables, batch: Batch, sampled: Tensor | None) -> Tensor | None:
            last = propose(drafter, tables, batch, sampled)
            for row in rows_of(batch, sampled).tolist():
                known, params = int(tables.num_known[row]), tables.sampling.gather(torch.tensor([row]))
                tokens = tables.token_table[row, : known + drafter.num_drafts].tolist()
                self.guesses.append((tokens[:known], tokens[known:], float(params.temperature), int(params.seed)))
            return last

        monkeypatch.setattr(HeadDrafter, "propose", watched)


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 7, 33, 19, 2, 45)
    return [{"prompt_token_ids": torch.randint(SIZES["v"], (n,), generator=generator).tolist()} for n in lengths]


def written(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts(), params, use_tqdm=False)]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_guesses_are_those_of_the_papers(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of prompts, mixed steps, and behind guesses that were right and wrong; drawn ones too."""
    model, plain, given = with_head(name, layout, tmp_path)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=11, detokenize=False) for i in range(6)]
    target = str(tmp_path / "target")
    with LLM(target, **SMALL) as llm:
        expected = written(llm, params)
    watched = Watched(monkeypatch)
    with LLM(target, **SMALL, enable_prefix_caching=False, speculative_config=given) as llm:
        assert written(llm, params) == expected
        counts = llm.stats().drafts
    assert counts.num_tokens > 0
    checked = [one for one in watched.guesses if one[0]]
    assert len({len(tokens) for tokens, *_ in checked}) > 20
    for tokens, guesses, temperature, seed in checked[:: max(1, len(checked) // 16)]:
        assert guesses == heads.plain_guesses(model, plain, tokens, GUESSES, temperature, seed)


def made_eagle3(folder: Path, changes: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """A head of EAGLE-3 in `folder`, but for some fields and tensors, and the speculative_config."""
    w = heads.random_weights(heads.shapes("eagle3", SIZES))
    w["d2t"], w["t2d"] = heads.own_tokens(SIZES["v"], SIZES["r"])
    config = {**HEAD_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SIZES["r"], **changes}
    heads.save_head(folder, config, w | (tensors or {}))
    return {"model": str(folder), "method": "eagle3", "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 40}, "a head of 40 numbers for hidden states of 40 and a vocabulary of 131 tokens; accepted"),
        ({"hidden_size": 40}, "one that fits the model, which has hidden states of 48 numbers and 131 tokens"),
        ({"target_hidden_size": 64}, "a head of 48 numbers for hidden states of 64 and a vocabulary of 131"),
        ({"vocab_size": 99}, "hidden states of 48 and a vocabulary of 99 tokens"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` is 2; must be 1 in a head"),
        ({"draft_vocab_size": 200}, "`draft_vocab_size` is 200; must be an integer from 1 to 131"),
        ({"norm_before_residual": True}, "`norm_before_residual` is true; must be false"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "`eagle_config.use_aux_hidden_state` is false"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"inputs of layers \[2, 3, 7\]; accepted: layers 1 to 6"),
        ({"architectures": ["MambaForCausalLM"]}, "has the architecture 'MambaForCausalLM'; accepted: that of a dense"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused_before_anything_is_loaded(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_target("llama", tmp_path / "target")
    given = made_eagle3(tmp_path / "head", changes)
    with pytest.raises(UserError, match=message):
        LLM(str(tmp_path / "target"), **SMALL, speculative_config=given)


def test_a_model_without_layers_for_further_tokens_says_so(tmp_path: Path) -> None:
    save_target("llama", tmp_path)
    given = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(UserError, match="this LlamaForCausalLM mentions no layers for further tokens"):
        LLM(str(tmp_path), **SMALL, speculative_config=given)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": torch.full((50,), 100)}, "d2t: its tokens stand for ids from 100 to 149; accepted: different ones of"),
        ({"d2t": -torch.arange(50)}, "d2t: its tokens stand for ids from 0 to 0"),
        ({"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, "holds tensor 'layers.1.mlp.up_proj.weight', which"),
    ],
)
def test_a_damaged_head_is_refused(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_target("llama", tmp_path / "target")
    given = made_eagle3(tmp_path / "head", {}, tensors)
    with pytest.raises(UserError, match=message):
        LLM(str(tmp_path / "target"), **SMALL, speculative_config=given)


def test_names_with_a_front_and_named_layers_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SpecForge's tools write them: `model.layers.0`, and the layers in front of those whose inputs are read."""
    model = save_target("qwen3", tmp_path / "target")
    w = heads.random_weights(heads.shapes("eagle3", {**SIZES, "r": SIZES["v"]}))
    w["d2t"], w["t2d"] = torch.zeros(SIZES["v"], dtype=torch.int64), torch.ones(SIZES["v"], dtype=torch.bool)
    config = {**HEAD_CONFIG, "architectures": ["LlamaForCausalLMEagle3"]}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 3]}}
    held = {f"model.{name.replace('midlayer', 'layers.0')}": one for name, one in w.items() if "2" not in name}
    heads.save_head(tmp_path / "head", config, held)
    watched = Watched(monkeypatch)
    given = {"model": str(tmp_path / "head"), "method": "eagle3", "num_speculative_tokens": GUESSES}
    with LLM(str(tmp_path / "target"), **SMALL, speculative_config=given) as llm:
        written(llm, [SamplingParams(temperature=0.0, max_tokens=5, detokenize=False)] * 6)
    plain = heads.eagle3(model, w, HEADS, KV_HEADS, (1, 5, 4))
    others = heads.eagle3(model, w, HEADS, KV_HEADS, (1, 4, 5))
    tokens, guesses, *_ = zip(*[one for one in watched.guesses if one[0]][::5], strict=True)
    assert list(guesses) == [heads.plain_guesses(model, plain, one, GUESSES) for one in tokens]
    assert list(guesses) != [heads.plain_guesses(model, others, one, GUESSES) for one in tokens]


@pytest.mark.parametrize(("name", "layout"), [("llama", "eagle3"), ("glm", "behind the layers")])
def test_heads_may_be_quantized_as_models_are(name: str, layout: str, tmp_path: Path) -> None:
    _, _, given = with_head(name, layout, tmp_path)
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9, detokenize=False) for i in range(6)]
    target, found = str(tmp_path / "target"), []
    fp8: dict[str, Any] = {} if layout == "eagle3" else {"quantization": "fp8"}
    for guesses in ({}, {**given, "quantization": "fp8"} if layout == "eagle3" else given):
        with LLM(target, **SMALL, **fp8, speculative_config=guesses) as llm:
            found.append(written(llm, params))
            notes = llm._core._executor._worker.notes  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert any(note.startswith("Draft: Quantization fp8") for note in notes)
