"""Models that pool give the vectors of sentence-transformers and the logits of transformers, in float32, however
prompts are cut into steps and whatever else is in the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace import LLM, PoolingParams, SamplingParams
from headrace.errors import ConfigError, HeadraceError, RequestError, UnsupportedModelError
from tests.models.pooling_models import DECODER, ODD, pool, save, save_sentences, save_tokenizer

PROMPTS = [[5], list(range(20, 90)), [8, 64, 22, 90, 41], [7] * 33, [8, 64, 22, 90, 41, 3, 3]]
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3Model": ("Qwen3Config", {}),
    "Qwen2Model": ("Qwen2Config", {"head_dim": None}),
    "MistralModel": ("MistralConfig", {"sliding_window": 9}),
    "LlamaModel": ("LlamaConfig", {}),
    "Gemma2Model": ("Gemma2Config", {"query_pre_attn_scalar": 20, "sliding_window": 9}),
}


def opened(folder: Path, **settings: Any) -> LLM:
    """Return an engine whose steps have few tokens, so that prompts are cut."""
    steps = {"max_num_batched_tokens": 24, "max_num_seqs": 3}
    return LLM(str(folder), **{"device": "cpu", "cpu_threads": 1, "dtype": "float32"} | steps | settings)


def as_prompts(ids: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": one} for one in ids]


def vectors(llm: LLM, ids: list[list[int]] = PROMPTS, **settings: Any) -> list[Tensor]:
    made = llm.embed(as_prompts(ids), use_tqdm=False, **settings)
    return [torch.tensor(one.outputs.embedding) for one in made]


def hidden_states(model: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    kind, own = DECODERS[f"{name.removesuffix('ForSequenceClassification').removesuffix('Model')}Model"]
    fields = {key: value for key, value in (DECODER | own | changes).items() if value is not None}
    return getattr(transformers, kind)(**fields)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_vectors_of_decoders_equal_sentence_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = save(name, config_of(name), tmp_path)
    save_sentences(tmp_path, mode)
    save_tokenizer(tmp_path)
    with opened(tmp_path) as llm:
        twice = vectors(llm), vectors(llm)
        hits = llm.stats().prefix_cache_hits
    assert bool(hits) == (mode == "lasttoken"), "the second time prompts are in the cache, where not all states count"
    for made in twice:
        for ids, vector in zip(PROMPTS, made, strict=True):
            expected = pool(hidden_states(model, ids), mode)
            assert (vector - expected).abs().max() < 1e-5
    assert len({tuple(vector.tolist()) for vector in twice[0]}) == len(PROMPTS)


def test_a_generating_checkpoint_with_files_of_sentence_transformers_embeds(tmp_path: Path) -> None:
    """Qwen3-Embedding is one: its config.json names Qwen3ForCausalLM."""
    model = save("Qwen3ForCausalLM", config_of("Qwen3Model", is_matryoshka=True), tmp_path)
    save_tokenizer(tmp_path)
    save_sentences(tmp_path, "lasttoken", prompts={"query": "Find: ", "document": ""}, default_prompt_name=None)
    with opened(tmp_path) as llm:
        whole = vectors(llm)
        short = vectors(llm, pooling_params=PoolingParams(dimensions=7))
        long = vectors(llm, pooling_params=PoolingParams(use_activation=False))
        with pytest.raises(RequestError, match="dimensions must be at most 60, got 61"):
            vectors(llm, pooling_params=PoolingParams(dimensions=61))
        with pytest.raises(RequestError, match="does not generate text"):
            llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
        with pytest.raises(RequestError, match="task 'classify' is not one of this model's"):
            llm.classify("abc", use_tqdm=False)
        with pytest.raises(RequestError, match="301, which is not in the model's vocabulary"):
            vectors(llm, [[301]])
        assert len(vectors(llm, [[4] * 128])[0]) == 60, "nothing follows a prompt that is pooled"
        with pytest.raises(RequestError, match="your prompt has 129 tokens"):
            vectors(llm, [[4] * 129])
        cut = llm.embed(as_prompts([[4] * 129]), use_tqdm=False, truncate_prompt_tokens=-1)
        assert len(cut[0].prompt_token_ids) == 128
    for ids, one, other, unscaled in zip(PROMPTS, whole, short, long, strict=True):
        expected = pool(hidden_states(model.model, ids), "lasttoken", normalize=False)
        assert (unscaled - expected).abs().max() < 1e-4
        assert (one - expected / expected.norm()).abs().max() < 1e-5
        assert (other - expected[:7] / expected[:7].norm()).abs().max() < 1e-5
    with LLM(str(tmp_path), runner="generate", device="cpu", cpu_threads=1) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)[0].finished
        with pytest.raises(RequestError, match="makes no vectors or scores"):
            llm.embed("abc", use_tqdm=False)


def test_linears_behind_pooling_are_read_from_their_folders(tmp_path: Path) -> None:
    model = save("LlamaModel", config_of("LlamaModel"), tmp_path)
    save_tokenizer(tmp_path)
    first, second = (torch.randn(90, 60), torch.randn(90)), (torch.randn(33, 90), torch.randn(33))
    tanh, identity = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    save_sentences(tmp_path, "mean_tokens", True, ((*first, tanh), (*second, identity)))
    with opened(tmp_path) as llm:
        made = vectors(llm)
    for ids, vector in zip(PROMPTS, made, strict=True):
        pooled = pool(hidden_states(model, ids), "mean_tokens", normalize=False)
        expected = torch.tanh(pooled @ first[0].T + first[1]) @ second[0].T + second[1]
        assert (vector - expected / expected.norm()).abs().max() < 1e-5


def test_each_token_has_a_vector_whatever_the_steps(tmp_path: Path) -> None:
    model = save("Qwen3Model", config_of("Qwen3Model"), tmp_path)
    save_tokenizer(tmp_path)
    # the cache is so small that some are preempted, and computed again
    with opened(tmp_path, num_gpu_blocks_override=9, max_model_len=96) as llm:
        for _ in range(2):
            made = llm.encode(as_prompts(PROMPTS), use_tqdm=False, pooling_task="token_embed")
            for ids, one in zip(PROMPTS, made, strict=True):
                expected = torch.nn.functional.normalize(hidden_states(model, ids), dim=-1)
                assert one.outputs.data.shape == expected.shape
                assert (one.outputs.data - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", [f"{name.removesuffix('Model')}ForSequenceClassification" for name in DECODERS])
def test_logits_of_classifiers_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, config_of(name, num_labels=4, pad_token_id=0), tmp_path)
    save_tokenizer(tmp_path)
    with opened(tmp_path) as llm:
        logits = llm.encode(as_prompts(PROMPTS), PoolingParams(use_activation=False), use_tqdm=False)
        likely = llm.classify(as_prompts(PROMPTS), use_tqdm=False)
        with pytest.raises(RequestError, match="several labels"):
            llm.score("a", "b", use_tqdm=False)
    for ids, one, other in zip(PROMPTS, logits, likely, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0]
        assert (one.outputs.data - expected).abs().max() < 1e-4
        assert (torch.tensor(other.outputs.probs) - expected.softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_a_generating_model_scores_pairs_by_two_tokens(tied: bool, tmp_path: Path) -> None:
    """Qwen3-Reranker: the probability of `yes` against `no`."""
    fields = {"tie_word_embeddings": tied, "classifier_from_token": ["n", "y"], "max_position_embeddings": 1024}
    model = save("Qwen3ForCausalLM", config_of("Qwen3Model", **fields), tmp_path)
    save_tokenizer(tmp_path)
    with opened(tmp_path, convert="classify") as llm:
        scored = llm.score("who?", ["me", "you and he"], use_tqdm=False)
        texts = [llm.tokenizer.decode(one.prompt_token_ids) for one in scored]
        no, yes = llm.tokenizer.encode("n"), llm.tokenizer.encode("y")
    assert "<Query>: who?\n<Document>: you and he<|im_end|>" in texts[1]
    for one in scored:
        with torch.inference_mode():
            logits = model(torch.tensor([one.prompt_token_ids])).logits[0, -1]
        assert abs(one.outputs.score - float(torch.sigmoid(logits[yes] - logits[no]))) < 1e-5
    assert scored[0].outputs.score != scored[1].outputs.score


def test_a_pair_of_texts_scores_by_the_cosine_of_its_vectors(tmp_path: Path) -> None:
    save("LlamaModel", config_of("LlamaModel"), tmp_path)
    save_tokenizer(tmp_path)
    with opened(tmp_path) as llm:
        one, other = (torch.tensor(made.outputs.embedding) for made in llm.embed(["who", "me"], use_tqdm=False))
        (scored,) = llm.score("who", "me", use_tqdm=False)
    assert abs(scored.outputs.score - float(one @ other)) < 1e-6


def test_what_is_asked_for_and_cannot_be_is_named(tmp_path: Path) -> None:
    save("LlamaModel", config_of("LlamaModel"), tmp_path)
    save_tokenizer(tmp_path)
    cases: list[tuple[dict[str, Any], type[HeadraceError], str]] = [
        ({"runner": "generate"}, ConfigError, "LlamaModel has no head that generates text"),
        (
            {"task": "embed", "convert": "classify"},
            ConfigError,
            "convert is 'classify', but task 'embed' means 'embed'",
        ),
        ({"pooler_config": {"pooling_type": "MAX"}}, ConfigError, "pooling_type must be one of LAST, CLS, MEAN"),
        ({"pooler_config": {"kind": "MAX"}}, ConfigError, "pooler_config has 'kind'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, ConfigError, "generates no tokens"),
    ]
    for settings, kind, message in cases:
        with pytest.raises(kind, match=message):
            opened(tmp_path, **settings)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.WordWeights", "path": "1"}]))
    with pytest.raises(UnsupportedModelError, match="module 'WordWeights'"):
        opened(tmp_path)


ENCODER = {key: value for key, value in ODD.items() if key != "max_position_embeddings"}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("BertConfig", {"max_position_embeddings": 128, "hidden_act": "gelu_new"}),
    "Roberta": ("RobertaConfig", {"max_position_embeddings": 429, "type_vocab_size": 1, "pad_token_id": 300}),
    "XLMRoberta": ("XLMRobertaConfig", {"max_position_embeddings": 429, "type_vocab_size": 1, "pad_token_id": 300}),
    "ModernBert": (
        "ModernBertConfig",
        {"max_position_embeddings": 128, "local_attention": 10, "norm_bias": True, "classifier_pooling": "mean"}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}


def encoder_config(name: str, **changes: Any) -> Any:
    kind, own = ENCODERS[name]
    return getattr(transformers, kind)(**ENCODER | own | {"attn_implementation": "eager"} | changes)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens"])
def test_vectors_of_encoders_equal_sentence_transformers(name: str, mode: str, tmp_path: Path) -> None:
    model = save(f"{name}Model", encoder_config(name), tmp_path)
    save_tokenizer(tmp_path)
    save_sentences(tmp_path, mode, normalize=False)
    prompts = [*PROMPTS, [4] * 128]
    with opened(tmp_path, max_num_batched_tokens=160) as llm:
        made = vectors(llm, prompts)
        each = llm.encode(as_prompts(prompts), use_tqdm=False, pooling_task="token_embed")
        with pytest.raises(RequestError, match="your prompt has 129 tokens"):
            vectors(llm, [[4] * 129])
    for ids, vector, tokens in zip(prompts, made, each, strict=True):
        hidden = hidden_states(model, ids)
        assert (vector - pool(hidden, mode, normalize=False)).abs().max() < 1e-4
        assert (tokens.outputs.data - hidden).abs().max() < 1e-4


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_of_cross_encoders_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(f"{name}ForSequenceClassification", encoder_config(name, num_labels=1, vocab_size=512), tmp_path)
    save_tokenizer(tmp_path, ("<s>", "</s>"))
    pairs = [("who?", "me"), ("who?", "someone else, and much further away"), ("who?", "")]
    with opened(tmp_path, max_num_batched_tokens=160) as llm:
        queries, documents = zip(*pairs, strict=True)
        logits = llm.score(queries, documents, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
        likely = llm.score("who?", list(documents), use_tqdm=False)
        assert llm.tokenizer is not None
        backend = llm.tokenizer.backend
    for (query, document), one, other in zip(pairs, logits, likely, strict=True):
        encoded = backend.encode(query, document)
        given = {"input_ids": torch.tensor([encoded.ids])}
        if name == "Bert":
            given["token_type_ids"] = torch.tensor([encoded.type_ids])
        with torch.inference_mode():
            expected = float(model(**given).logits[0, 0])
        assert abs(one.outputs.score - expected) < 1e-4
        assert abs(other.outputs.score - float(torch.tensor(expected).sigmoid())) < 1e-5


def test_an_encoder_with_another_head_embeds_and_classifies_more_labels(tmp_path: Path) -> None:
    masked, labels = tmp_path / "masked", tmp_path / "labels"
    model = save("BertForMaskedLM", encoder_config("Bert"), masked)
    save_tokenizer(masked)
    with opened(masked, max_num_batched_tokens=160) as llm:
        (vector,) = vectors(llm, [PROMPTS[1]])
        with pytest.raises(RequestError, match="does not generate text"):
            llm.generate("abc", use_tqdm=False)
    expected = pool(hidden_states(model.bert, PROMPTS[1]), "cls_token")
    assert (vector - expected).abs().max() < 1e-5
    names = {0: "no", 1: "perhaps", 2: "yes"}
    classifier = save("BertForSequenceClassification", encoder_config("Bert", id2label=names), labels)
    save_tokenizer(labels)
    with opened(labels, max_num_batched_tokens=160) as llm:
        (made,) = llm.classify(as_prompts([PROMPTS[2]]), use_tqdm=False)
    with torch.inference_mode():
        likely = classifier(torch.tensor([PROMPTS[2]])).logits[0].softmax(-1)
    assert (torch.tensor(made.outputs.probs) - likely).abs().max() < 1e-5
    with pytest.raises(ConfigError, match="batch_invariant must be false"):
        opened(labels, batch_invariant=True)


def test_a_gemma_whose_tokens_see_later_ones_embeds(tmp_path: Path) -> None:
    """EmbeddingGemma: windows of half their width on either side, two linears behind the mean, and prompts."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"query_pre_attn_scalar": 20, "sliding_window": 10, "layer_types": kinds, "vocab_size": 512}
    config = transformers.Gemma3TextConfig(**DECODER | fields | {"use_bidirectional_attention": True})
    model = save("Gemma3TextModel", config, tmp_path)
    save_tokenizer(tmp_path, ("<s>", "</s>"))
    first, second = torch.randn(90, 60), torch.randn(33, 90)
    identity = "torch.nn.modules.linear.Identity"
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    save_sentences(
        tmp_path, "mean_tokens", True, ((first, None, identity), (second, None, identity)), prompts=prompts,
        default_prompt_name="query",
    )  # fmt: skip
    ids = [*PROMPTS, [4] * 128]
    with opened(tmp_path, max_num_batched_tokens=160) as llm:
        made = vectors(llm, ids)
        short = vectors(llm, ids, pooling_params=PoolingParams(use_activation=False))
        (of_text,) = llm.embed("what a pity", use_tqdm=False)
        assert llm.tokenizer is not None
        assert llm.tokenizer.decode(of_text.prompt_token_ids) == "task: search result | query: what a pity"
        marks = [llm.tokenizer.backend.token_to_id(mark) for mark in ("<s>", "</s>")]
        assert [of_text.prompt_token_ids[0], of_text.prompt_token_ids[-1]] == marks
    made.append(torch.tensor(of_text.outputs.embedding))
    for one, vector in zip([*ids, of_text.prompt_token_ids], made, strict=True):
        expected = pool(hidden_states(model, one), "mean_tokens", normalize=False) @ first.T @ second.T
        assert (vector - expected / expected.norm()).abs().max() < 1e-5
    assert all(vector.norm() > 2 for vector in short)
    seen = pool(hidden_states(model, ids[1][:1]), "mean_tokens")
    assert (pool(hidden_states(model, ids[1])[:1], "mean_tokens") - seen).abs().max() > 1e-2, "later tokens count"


@pytest.mark.parametrize("name", ["LlamaModel", "Qwen2Model", "Qwen3Model"])
def test_a_decoder_that_is_not_causal_embeds(name: str, tmp_path: Path) -> None:
    config = config_of(name, is_causal=False)
    model = save(name, config, tmp_path)
    save_tokenizer(tmp_path)
    save_sentences(tmp_path, "mean_tokens")
    with opened(tmp_path, max_num_batched_tokens=160) as llm:
        made = vectors(llm)
    for ids, vector in zip(PROMPTS, made, strict=True):
        assert (vector - pool(hidden_states(model, ids), "mean_tokens")).abs().max() < 1e-5
    model.config.is_causal = True
    causal = pool(hidden_states(model, PROMPTS[1]), "mean_tokens")
    assert (made[1] - causal).abs().max() > 1e-2, "later tokens count"
    with pytest.raises(UnsupportedModelError, match="`is_causal` is False; it makes vectors"):
        opened(
            tmp_path, hf_overrides={"architectures": [f"{name.removesuffix('Model')}ForCausalLM"]}, runner="generate"
        )


def test_attention_to_later_tokens_is_refused_where_it_cannot_be_had(tmp_path: Path) -> None:
    for name, kind, message in (
        ("Gemma3ForCausalLM", "Gemma3TextConfig", "it makes vectors .--runner pooling., and generates no text"),
        ("MistralModel", "MistralConfig", "`is_causal` is false; must be true with sliding windows"),
        ("Gemma2Model", "Gemma2Config", "`use_bidirectional_attention` is True; accepted for this family: False"),
    ):
        fields = DECODER | {"query_pre_attn_scalar": 20, "use_bidirectional_attention": True, "sliding_window": 10}
        folder = tmp_path / name
        fields |= {"is_causal": False} if name.startswith("Mistral") else {}
        save(name, getattr(transformers, kind)(**fields), folder)
        save_tokenizer(folder)
        with pytest.raises(UnsupportedModelError, match=message):
            opened(folder)


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("sentence_bert_config.json", "max_seq_length"),
        ("sentence_roberta_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ],
)
def test_texts_beyond_the_trained_length_are_refused_or_cut_as_asked(file: str, field: str, tmp_path: Path) -> None:
    model = save("BertModel", encoder_config("Bert", vocab_size=512), tmp_path)
    save_tokenizer(tmp_path, ("<s>", "</s>"))
    save_sentences(tmp_path, "mean_tokens")
    path = tmp_path / file
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | {field: 21}))
    text = "a text of more than twenty-one bytes"
    with pytest.raises(ConfigError, match=f"max_model_len must be at most 21 .the model's {field}., got 22"):
        opened(tmp_path, max_model_len=22)
    with opened(tmp_path, max_num_batched_tokens=160) as llm:
        with pytest.raises(RequestError, match=r"maximum context length is 21 tokens\. However, your prompt has 38"):
            llm.embed(text, use_tqdm=False)
        (made,) = llm.embed(text, use_tqdm=False, truncate_prompt_tokens=-1)
        assert llm.max_model_len == 21
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text, truncation=True, max_length=21).input_ids
    assert made.prompt_token_ids == ids
    expected = pool(hidden_states(model, ids), "mean_tokens")
    assert (torch.tensor(made.outputs.embedding) - expected).abs().max() < 1e-5


def test_lengths_beyond_the_positions_that_there_are_count_for_nothing(tmp_path: Path) -> None:
    save("RobertaModel", encoder_config("Roberta"), tmp_path)
    save_tokenizer(tmp_path)
    save_sentences(tmp_path, "mean_tokens")
    for file, field, most in (
        ("tokenizer_config.json", "model_max_length", 10**30),
        ("sentence_bert_config.json", "max_seq_length", 514),
    ):
        path = tmp_path / file
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(kept | {field: most}))
        with pytest.raises(ConfigError, match=r"at most 128 .the model's max_position_embeddings., got 129"):
            opened(tmp_path, max_model_len=129)
