"""Offline inference with scripted tokens: order, parameters, chat, refusals."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError, HeadraceError, RequestError, SomeRequestsError
from tests.e2e.serving import demo_copy
from tests.engine.fakes import FAIL_TOKEN, model_folder

ECHO = "tests.engine.fakes:make_echo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), executor=ECHO, max_num_seqs=4) as llm:
        yield llm


def texts(outputs: list) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [f"p{i:02}" for i in range(20)]
    params = [SamplingParams(max_tokens=3 * (1 + i % 5)) for i in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert texts(outputs) == [prompt * (1 + i % 5) for i, prompt in enumerate(prompts)]
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize("trusted", [False, True])
def test_code_in_a_models_folder_is_never_run(trusted: bool, tmp_path: Path) -> None:
    """CVE-2025-66448 and its like: `auto_map` names classes in files of the repository. Nothing of it is imported,
    whether we are asked to trust it or not, and the weights are used as config.json describes them."""
    folder, marker = demo_copy(tmp_path), tmp_path / "imported"
    poison = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Poison: pass\n"
    for name in ("poison", "configuration_llama", "modeling_llama", "tokenization_llama", "conftest", "__init__"):
        (folder / f"{name}.py").write_text(poison)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        known = json.loads((folder / name).read_text())
        kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
        known["auto_map"] = dict.fromkeys(kinds, "poison.Poison") | {"AutoTokenizer": ["poison.Poison", None]}
        known["custom_generate"] = "poison"
        (folder / name).write_text(json.dumps(known))
    with LLM(str(folder), device="cpu", cpu_threads=1, trust_remote_code=trusted) as llm:
        (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4
    assert not marker.exists()


def test_defaults_are_vllms(llm: LLM) -> None:
    (output,) = llm.generate("ab")
    assert len(output.outputs[0].token_ids) == 16


def test_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.9, "min_p": null, "do_sample": true}'
    )
    with LLM(str(folder), executor=ECHO) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_p=0.9)
    with LLM(str(folder), executor=ECHO, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p .*7; --generation-config vllm"):
        LLM(str(folder), executor=ECHO)


@pytest.mark.parametrize(
    "prompts",
    ["ab", ["ab"], [100, 101], [[100, 101]], {"prompt_token_ids": [100, 101]}, [{"prompt": "ab"}]],
    ids=["text", "texts", "ids", "lists of ids", "mapping", "mappings"],
)
def test_every_way_to_give_a_prompt(llm: LLM, prompts: object) -> None:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)  # type: ignore[arg-type]
    assert len(outputs) == 1
    assert outputs[0].outputs[0].token_ids == outputs[0].prompt_token_ids * 2


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_n_and_stop(llm: LLM) -> None:
    (output,) = llm.generate("abcd", SamplingParams(n=2, stop="cd"), use_tqdm=False)
    assert [(c.index, c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
        (0, "ab", "stop", "cd"),
        (1, "ab", "stop", "cd"),
    ]


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    one = llm.chat(conversation, SamplingParams(max_tokens=3, skip_special_tokens=False), use_tqdm=False)
    assert one[0].prompt == "<|user|>hi</s><|assistant|>"
    assert one[0].prompt_token_ids.count(2) == 1
    assert len(llm.chat([conversation, conversation], use_tqdm=False)) == 2
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        llm.chat(conversation, chat_template_kwargs={"eos_token": "x"})


def test_an_invalid_prompt_stops_all_before_any_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["ok", [], "ok"], use_tqdm=False)
    assert llm._outputs.num_requests == 0
    assert texts(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts, got 1"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_what_others_brought_outlives_a_failed_step(llm: LLM) -> None:
    prompts = [[5, 6], [FAIL_TOKEN], [7, 8]]
    params = SamplingParams(max_tokens=2, detokenize=False)
    with pytest.raises(SomeRequestsError, match=r"of 3 requests failed, .* number .*: .*scripted failure") as caught:
        llm.generate(prompts, params, use_tqdm=False)
    whole = [entry for entry in caught.value.outputs if not isinstance(entry, HeadraceError)]
    assert isinstance(caught.value.outputs[1], HeadraceError)
    assert all(len(output.outputs[0].token_ids) == 2 for output in whole)
    assert len(llm.generate(prompts[:1], params, use_tqdm=False)) == 1


def test_a_failed_step_is_raised_and_the_engine_lives_on(llm: LLM) -> None:
    with pytest.raises(HeadraceError, match="scripted failure"):
        llm.generate([[FAIL_TOKEN]], use_tqdm=False)
    assert texts(llm.generate("ab", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ab"]


def test_progress_goes_to_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Processed prompts" in captured.err
    llm.generate(["a", "b"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_without_tokenizer(folder: Path) -> None:
    with LLM(str(folder), executor=ECHO, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([[7, 8]], SamplingParams(max_tokens=3, logprobs=0), use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ([7, 8, 7], "")
        with pytest.raises(RequestError, match="token ids"):
            llm.generate("text")
        with pytest.raises(RequestError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_the_environment_counts_unless_a_keyword_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with LLM(str(folder), executor=ECHO) as llm:
        assert llm.config.batch_invariant
    with LLM(str(folder), executor=ECHO, batch_invariant=False) as llm:
        assert not llm.config.batch_invariant


def test_unknown_keyword_and_use_after_shutdown(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no_such_knob"):
        LLM(str(folder), executor=ECHO, no_such_knob=1)
    llm = LLM(str(folder), executor=ECHO)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(HeadraceError, match="shut down"):
        llm.generate("a")
