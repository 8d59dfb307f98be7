"""Offline inference with scripted tokens: order, parameters, chat, refusals."""

import copy
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from headrace.errors import ConfigError, HeadraceError, RequestError, SomeRequestsError
from tests.engine.fakes import FAIL_TOKEN, model_folder
from tests.serving import demo_copy

ECHO = "tests.engine.fakes:make_echo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
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
        defaults = llm.get_default_sampling_params()
        assert defaults == SamplingParams(temperature=0.6, top_p=0.9)
        defaults.temperature = 0.1
        assert llm.get_default_sampling_params().temperature == 0.6
    with LLM(str(folder), executor=ECHO, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p .*7; --generation-config vllm"):
        LLM(str(folder), executor=ECHO)


@pytest.mark.parametrize(
    "prompts",
    [
        "ab",
        ["ab"],
        [100, 101],
        [[100, 101]],
        TokensPrompt(prompt_token_ids=[100, 101]),
        [TextPrompt(prompt="ab")],
        {"prompt": "ab", "prompt_token_ids": [100, 101], "multi_modal_data": None, "cache_salt": "salt"},
    ],
    ids=["text", "texts", "ids", "lists of ids", "TokensPrompt", "TextPrompts", "both"],
)
def test_every_way_to_give_a_prompt(llm: LLM, prompts: object) -> None:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)  # type: ignore[arg-type]
    assert len(outputs) == 1
    assert outputs[0].outputs[0].token_ids == outputs[0].prompt_token_ids * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "ab", "multi_modal_data": {"image": "x"}}, "prompt has 'multi_modal_data'"),
        ({"prompt_embeds": [1.0]}, "prompt has 'prompt_embeds'"),
        ({}, "must be a text or a list of token ids"),
        ({"prompt": 5}, "must be a text or a list of token ids"),
        ({"prompt": "ab", "cache_salt": 5}, "cache_salt must be a text"),
    ],
)
def test_prompts_of_other_kinds_are_refused(llm: LLM, prompt: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(["ab", prompt], use_tqdm=False)
    assert llm._outputs.num_requests == 0


def test_a_cache_salt_keeps_blocks_apart(llm: LLM) -> None:
    ids = list(range(100, 148))
    params = SamplingParams(max_tokens=1)
    cached = [
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, params, use_tqdm=False)[0].num_cached_tokens
        for salt in ("mine", "mine", "other")
    ]
    assert cached == [0, 32, 0]


def test_adapters_are_refused_where_none_can_be_had_and_none_of_them_is_taken(llm: LLM) -> None:
    params, adapter = SamplingParams(max_tokens=1), LoRARequest("a", 1, "/a")
    assert len(llm.generate(["a", "b"], params, lora_request=[None, None], use_tqdm=False)) == 2
    with pytest.raises(RequestError, match="lora_request must be None unless the LLM has enable_lora=True"):
        llm.generate("a", params, lora_request=adapter)
    with pytest.raises(RequestError, match="lora_request must be one a prompt: 2 prompts, got 1"):
        llm.generate(["a", "b"], params, lora_request=[adapter])


def test_parameters_may_be_assigned_to_between_calls(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 2
    params.stop = "b"  # type: ignore[assignment]
    assert texts(llm.generate("ab", params, use_tqdm=False)) == ["a"]
    params.top_p = 7
    with pytest.raises(RequestError, match="top_p must be in"):
        llm.generate(["ab", "cd"], [SamplingParams(), params], use_tqdm=False)


def test_outputs_have_the_attributes_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate("ab", SamplingParams(max_tokens=3), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert output.finished
    assert output.outputs[0].finished()
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params", "prompt_logprobs"):
        assert getattr(output, name) is None
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 3
    moments = [output.metrics.queued_ts, output.metrics.first_token_ts, output.metrics.last_token_ts]
    assert 0 < moments[0] <= moments[1] <= moments[2] <= output.metrics.finished_ts


def test_a_request_finishes_when_its_last_token_comes_whatever_runs_beside_it(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 60)]
    short, long = (output.metrics for output in llm.generate(["ab", "cd"], params, use_tqdm=False))
    assert short is not None
    assert long is not None
    assert short.finished_ts < long.last_token_ts


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


def test_chat_with_another_template_and_with_a_message_to_continue(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    params = SamplingParams(max_tokens=1)
    template = "{{ messages[0].content }}{{ mood }}"
    (output,) = llm.chat(conversation, params, False, chat_template=template, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "hi!"
    (output,) = llm.chat(conversation, params, False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<|user|>hi</s><|assistant|>Well, "
    with pytest.raises(RequestError, match="continue_final_message needs add_generation_prompt to be false"):
        llm.chat(conversation, params, False, continue_final_message=True)


def test_chat_shows_content_in_parts_as_text_and_no_fields_that_are_null(llm: LLM) -> None:
    """As OpenAI's clients return messages: with every field, of which templates only ask if it is there."""
    first, second = f"one {random.random()}", f"two {random.random()}"
    parts = [{"type": "text", "text": first}, {"type": "output_text", "text": second}]
    nulls = {"refusal": None, "tool_calls": None, "function_call": None}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, **nulls},
        {"role": "user", "content": [second]},
    ]
    template = "{% for m in messages %}[{{ m.content }}{{ 'tool_calls' in m }}]{% endfor %}"
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), False, chat_template=template)
    assert output.prompt == f"[{first}\n{second}False][False][{second}False]"
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), False, tools=[], chat_template="{{ tools is none }}")
    assert output.prompt == "True"
    for content, words in (
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], r"content\[0\] is of type 'image_url'"),
        ([{"type": "text", "text": 5}], r"content\[0\] has no text"),
        (5, "content must be a text or a list of parts, got 5"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.chat([{"role": "user", "content": content}])


def test_chat_reads_arguments_of_past_calls_as_objects_or_as_their_json(llm: LLM) -> None:
    """OpenAI's clients hold them as text, of which `items` would make letters and `tojson` a quoted string."""
    loop = "{% for m in messages %}{% for call in m.tool_calls %}{% set given = call.function.arguments %}"
    keys = (
        loop
        + "{% for key, value in given.items() %}{{ key }}={{ value | tojson }};{% endfor %}{% endfor %}{% endfor %}"
    )
    whole = loop + "{{ given | tojson }}{% endfor %}{% endfor %}"
    place, number = f"Zürich {random.random()}", random.randrange(1000)

    def prompt(arguments: Any, template: str) -> str:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        before = copy.deepcopy(messages)
        (output,) = llm.chat(messages, SamplingParams(max_tokens=1), False, chat_template=template + "!")
        assert messages == before
        return output.prompt.removesuffix("!")

    arguments = {"place": place, "days": [number, None]}
    for given in (arguments, json.dumps(arguments)):
        assert prompt(given, keys) == f'place="{place}";days=[{number}, null];'
        assert json.loads(prompt(given, whole)) == arguments
    assert prompt("", whole) == prompt(None, whole) == "{}"
    assert prompt('{"place": "Zü', whole) == '"{\\"place\\": \\"Zü"'  # an agent shows the model its own mistakes
    assert prompt('{"place": "Zü', keys) == 'arguments="{\\"place\\": \\"Zü";'
    with pytest.raises(RequestError, match="chat template"):
        prompt(number, keys)


def test_an_answer_that_its_grammar_completes_has_its_last_token() -> None:
    constraint = StructuredOutputsParams(choice=["yes", "no", "maybe"])
    with LLM("demo", max_model_len=64, max_num_seqs=4) as llm:
        for stop in ([], ["never"]):  # with stop strings text is made as it comes, else at the end
            params = SamplingParams(temperature=5, n=16, structured_outputs=constraint, stop=stop)
            choices = llm.generate(["Is it?"], params)[0].outputs
            assert {choice.text for choice in choices} <= {"yes", "no", "maybe"}
            assert {choice.finish_reason for choice in choices} == {"stop"}


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
        with pytest.raises(HeadraceError, match="no tokenizer, as skip_tokenizer_init is set"):
            llm.get_tokenizer()


def test_the_tokenizer_is_like_transformers(llm: LLM, folder: Path) -> None:
    """tests/engine/test_tokenizer.py compares them name by name."""
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|user|>hi</s><|assistant|>"
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.name_or_path) == ("</s>", 2, str(folder))


@pytest.mark.parametrize(("name", "why"), [("sleep", ": the engine has no such mode"), ("nothing", "")])
def test_methods_of_vllm_that_are_not_here_say_why(llm: LLM, name: str, why: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"^LLM has no attribute '{name}'{why}"):
        getattr(llm, name)


def test_keywords_of_vllm(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tests/advice/flags/test_keywords.py has the others."""
    with pytest.raises(ConfigError, match="enable_prompt_adapter=True is not supported: adapters are low-rank"):
        LLM(str(folder), executor=ECHO, enable_prompt_adapter=True)
    with caplog.at_level(logging.WARNING, "headrace.llm"):
        llm = LLM(model=folder, executor=ECHO, enable_lora=False, swap_space=4, trust_remote_code=True, seed=None)
    llm.shutdown()
    (record,) = [record for record in caplog.records if record.name == "headrace.llm"]
    for said in ("no effect here", "swap_space=4: preempted requests are recomputed", "trust_remote_code=True: code"):
        assert said in record.getMessage()
    caplog.clear()
    with LLM(str(folder), executor=ECHO, max_num_seqs=2, enforce_eager=True):
        assert not [record for record in caplog.records if record.name == "headrace.llm"]


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
