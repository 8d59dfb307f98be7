"""What goes to the core and what comes back: limits, fan-out to n, late stop strings, merging and counting."""

import time

import pytest

from headrace.cache_groups import same_layout
from headrace.config import EngineConfig
from headrace.engine import input_processor
from headrace.engine.input_processor import MAX_PROMPT_LOGPROBS, InputProcessor, ModelLimits
from headrace.engine.messages import Abort
from headrace.engine.metrics import EngineMetrics
from headrace.engine.output_processor import OutputKind, OutputProcessor
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import EngineDeadError, HeadraceError, QueueFullError, RequestError
from headrace.model_config import ModelConfig
from headrace.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    RequestOutput,
    SchedulerStats,
)
from headrace.sampling_params import SamplingParams
from headrace.step import ExpertLoad, Logprobs
from tests.engine.fakes import EOS, MODEL_CONFIG, VOCAB_SIZE, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), {"eos_token": "</s>"}, {})
LIMITS = ModelLimits(VOCAB_SIZE, 64, (EOS,))


def inputs(tokenizer: Tokenizer | None = TOKENIZER, **config: object) -> InputProcessor:
    return InputProcessor(LIMITS, EngineConfig(**config), tokenizer)  # type: ignore[arg-type]


def process(prompt: list[int], processor: InputProcessor | None = None, **params: object) -> list[EngineCoreRequest]:
    return (processor or inputs()).process("r", prompt, SamplingParams(**params), arrival_time=1.0)  # type: ignore[arg-type]


class TestInput:
    def test_n_requests_with_ids_and_seeds_of_their_own(self) -> None:
        first, second, third = process([5, 6], n=3, seed=7, prompt_logprobs=2)
        assert [r.request_id for r in (first, second, third)] == ["r-0", "r-1", "r-2"]
        assert [r.seed for r in (first, second, third)] == [7, 8, 9]
        assert first.params.prompt_logprobs == 2
        assert second.params.prompt_logprobs is None  # the first scores the prompt for all

    def test_seeds_stay_within_64_bits(self) -> None:
        assert [r.seed for r in process([5], n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]

    def test_drawn_seeds_differ_and_come_from_the_engines(self) -> None:
        one, two = inputs(seed=1), inputs(seed=1)
        drawn = [process([5], one)[0].seed for _ in range(3)]
        assert len(set(drawn)) == 3
        assert drawn == [process([5], two)[0].seed for _ in range(3)]

    def test_max_tokens_none_is_what_is_left(self) -> None:
        assert process([5] * 60, max_tokens=None)[0].max_tokens == 4

    def test_eos_unless_ignored(self) -> None:
        assert process([5], stop_token_ids=[9])[0].stop_token_ids == [9, EOS]
        assert process([5], ignore_eos=True)[0].stop_token_ids == []

    def test_bad_words_with_and_without_leading_space(self) -> None:
        plain, spaced = TOKENIZER.encode("no"), TOKENIZER.encode(" no")
        assert process([5], bad_words=["no"])[0].bad_words_token_ids == [plain, spaced]

    def test_strings_stay_on_this_side(self) -> None:
        params = process([5], stop=["x"], bad_words=["no"])[0].params
        assert (params.stop, params.bad_words, params.n) == ([], [], 1)

    @pytest.mark.parametrize(
        ("prompt", "params", "param", "message"),
        [
            ([], {}, "prompt", "must not be empty"),
            ("abc", {}, "prompt", "list of token ids"),
            ([1.5], {}, "prompt", "list of token ids"),
            ([True], {}, "prompt", "list of token ids"),
            ([VOCAB_SIZE], {}, "prompt", "token id 512, which is not in the model's vocabulary"),
            ([-1], {}, "prompt", "token id -1"),
            ([5] * 64, {}, "prompt", "maximum context length is 64 tokens"),
            ([None] * 64, {}, "prompt", "maximum context length is 64 tokens"),
            ([5] * 50, {"max_tokens": 15}, "max_tokens", r"you requested 65 tokens \(50 in the prompt, 15 in"),
            ([5] * 60, {"max_tokens": None, "min_tokens": 5}, "min_tokens", "room for 4"),
            ([5], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "512"),
            ([5], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias", "512"),
            ([5], {"allowed_token_ids": [5, 600]}, "allowed_token_ids", "600"),
            ([5], {"allowed_token_ids": [5] * 513}, "allowed_token_ids", "513 ids, and the model's vocabulary 512"),
            ([5], {"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids", "leaves nothing to sample"),
            ([5], {"allowed_token_ids": [9], "min_tokens": 1, "stop_token_ids": [9]}, "allowed_token_ids", "nothing"),
            ([5], {"allowed_token_ids": TOKENIZER.encode("n"), "bad_words": ["n"]}, "allowed_token_ids", "bad_words"),
        ],
    )
    def test_refusals_name_field_value_and_limit(
        self, prompt: list[int], params: dict[str, object], param: str, message: str
    ) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            process(prompt, **params)
        assert caught.value.param == param

    def test_stops_may_be_all_that_is_allowed(self) -> None:
        assert process([5], allowed_token_ids=[EOS])[0].params.allowed_token_ids == [EOS]

    def test_prompts_of_one_request_are_checked_before_they_run(self) -> None:
        processor, params = inputs(), SamplingParams(max_tokens=4, prompt_logprobs=20)
        assert processor.prepare("ab", params) == TOKENIZER.encode("ab")
        for prompt, message in (([5] * 61, "you requested 65 tokens"), ([], "empty"), ([600], "600")):
            with pytest.raises(RequestError, match=message):
                processor.prepare(prompt, params)
        processor.check_together(MAX_PROMPT_LOGPROBS // 21, params)
        processor.check_together(MAX_PROMPT_LOGPROBS, SamplingParams())
        with pytest.raises(RequestError, match=rf"1050000 values; one request may ask for {MAX_PROMPT_LOGPROBS}"):
            processor.check_together(50_000, params)

    def test_priority_needs_its_policy(self) -> None:
        request = inputs(scheduling_policy="priority").process("r", [5], SamplingParams(), arrival_time=0, priority=-3)
        assert request[0].priority == -3
        for processor, priority in ((inputs(), 1), (inputs(scheduling_policy="priority"), 2**40)):
            with pytest.raises(RequestError, match="priority"):
                processor.process("r", [5], SamplingParams(), arrival_time=0, priority=priority)

    @pytest.mark.parametrize("salt", ["", "x" * 257, "\ud800", 5])
    def test_cache_salt(self, salt: str) -> None:
        with pytest.raises(RequestError, match="cache_salt"):
            inputs().process("r", [5], SamplingParams(), arrival_time=0, cache_salt=salt)

    def test_without_tokenizer(self) -> None:
        processor = inputs(None)
        assert process([5], processor)[0].prompt_token_ids == [5]
        with pytest.raises(RequestError, match="list of token ids"):
            processor.tokenize("text")
        for params in ({"stop": "x"}, {"bad_words": ["x"]}):
            with pytest.raises(RequestError, match="needs a tokenizer"):
                process([5], processor, **params)

    def test_long_texts_are_refused_before_they_are_tokenized(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured: list[int] = []
        encode = TOKENIZER.encode

        def counted(text: str, add_special_tokens: bool = True) -> list[int]:
            measured.append(len(text))
            return encode(text, add_special_tokens)

        monkeypatch.setattr(TOKENIZER, "encode", counted)
        with pytest.raises(RequestError, match="at least 65 tokens"):
            inputs().tokenize("x" * (64 * 256 + 1))
        assert measured == []
        monkeypatch.setattr(input_processor, "MEASURED_BYTES", 256)
        monkeypatch.setattr(input_processor, "MEASURED_CHARS", 400)
        with pytest.raises(RequestError, match="more than 399 tokens"):
            inputs().tokenize("x" * 16000)
        assert measured == [400]

    def test_a_small_cache_bounds_the_context(self) -> None:
        model = ModelConfig.from_dict(MODEL_CONFIG)
        config = EngineConfig(max_model_len=100, block_size=16)
        assert ModelLimits.of(config, model, same_layout(16), 4, TOKENIZER).max_model_len == 65
        assert "no more than 64 tokens" in ModelLimits.of(config, model, same_layout(16), 4, None).why
        assert ModelLimits.of(config, model, same_layout(16), 40, None) == ModelLimits(VOCAB_SIZE, 100, (EOS,))


class Front:
    """Input and output processor with one request in between, and a core that says what the test says."""

    def __init__(
        self, kind: OutputKind = "delta", arrival_time: float | None = None, slow: bool = False, **params: object
    ) -> None:
        """`slow`: nobody reads `outputs` as they come."""
        self.outputs: list[RequestOutput] = []
        self.error: HeadraceError | None = None
        self.metrics = EngineMetrics("model", 64, {"block_size": 16})
        self.processor = OutputProcessor(TOKENIZER, self.metrics)
        prompt = TOKENIZER.encode("ab")
        sampling = SamplingParams(max_tokens=None, **params)  # type: ignore[arg-type]
        requests = inputs().process("r", prompt, sampling, arrival_time=arrival_time or time.monotonic())
        self.request = self.processor.add("r", "ab", requests, sampling, kind, (lambda: None) if slow else self.read)

    def read(self) -> None:
        """What a reader does that keeps up."""
        output, self.error = self.request.take(), self.request.error
        assert output is not None or self.error is not None, "called without a change"
        if output is not None:
            self.outputs.append(output)

    def step(self, *outputs: EngineCoreOutput, timestamp: float | None = None) -> list[Abort]:
        now = timestamp or time.monotonic()
        return self.processor.process(EngineCoreOutputs(outputs=list(outputs), stats=SchedulerStats(), timestamp=now))

    def text(self, text: str, index: int = 0, **more: object) -> list[Abort]:
        return self.step(EngineCoreOutput(request_id=f"r-{index}", new_token_ids=TOKENIZER.encode(text), **more))  # type: ignore[arg-type]

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "model", "engine": "0", **labels})


class TestOutput:
    def test_steps_in_one_message_end_a_choice_once(self) -> None:
        front = Front(n=2)
        tokens = TOKENIZER.encode("xyz")
        front.step(
            EngineCoreOutput(request_id="r-0", new_token_ids=tokens[:1]),
            EngineCoreOutput(request_id="r-1", new_token_ids=tokens[:1]),
            EngineCoreOutput(request_id="r-0", new_token_ids=tokens[1:2], finish_reason=FinishReason.LENGTH),
            EngineCoreOutput(request_id="r-1", new_token_ids=tokens[1:2]),
        )
        (output,) = front.outputs
        found = [(choice.index, choice.text, choice.finish_reason) for choice in output.outputs]
        assert found == [(0, "xy", "length"), (1, "xy", None)]

    def test_every_choice_of_a_failed_request_is_counted(self) -> None:
        front = Front(n=4)
        front.text("x", index=1, finish_reason=FinishReason.LENGTH)
        front.step(EngineCoreOutput(request_id="r-2", new_token_ids=[], finish_reason=FinishReason.ERROR, error="no"))
        counts = {kind: front.value("vllm:request_success_total", finished_reason=kind) for kind in ("error", "length")}
        assert counts == {"error": 3, "length": 1}
        dead = Front(n=3)
        dead.processor.fail_all(EngineDeadError("gone"))
        assert dead.value("vllm:request_success_total", finished_reason="error") == 3

    def test_increments(self) -> None:
        front = Front()
        front.text("x")
        front.text("y", finish_reason=FinishReason.LENGTH)
        assert [o.outputs[0].text for o in front.outputs] == ["x", "y"]
        assert [o.finished for o in front.outputs] == [False, True]
        assert front.outputs[1].outputs[0].finish_reason == "length"
        assert front.processor.num_requests == 0

    def test_one_final_output(self) -> None:
        front = Front("final", n=2)
        front.text("x", 0)
        front.text("p", 1, finish_reason=FinishReason.LENGTH)
        assert front.outputs == []
        front.text("y", 0, finish_reason=FinishReason.LENGTH)
        (output,) = front.outputs
        assert [c.text for c in output.outputs] == ["xy", "p"]
        assert output.finished

    def test_metrics_come_with_the_last_output_under_the_names_of_vllm(self) -> None:
        before, started = time.time(), time.monotonic()
        front = Front(n=2, arrival_time=started)
        scheduled, first, last = started + 0.5, started + 1.0, started + 2.0
        for index in (0, 1):
            front.step(
                EngineCoreOutput(request_id=f"r-{index}", new_token_ids=[5], scheduled_time=scheduled),
                timestamp=first + index / 4,
            )
        assert [output.metrics for output in front.outputs] == [None, None]
        for index in (0, 1):
            front.step(
                EngineCoreOutput(request_id=f"r-{index}", new_token_ids=[6], finish_reason=FinishReason.LENGTH),
                timestamp=last - index / 4,
            )
        found = front.outputs[-1].metrics
        assert found is not None
        assert (found.queued_ts, found.scheduled_ts, found.num_generation_tokens) == (started, scheduled, 4)
        assert (found.first_token_ts, found.last_token_ts) == (first, last)
        assert (found.time_in_queue, found.first_token_latency) == (scheduled - started, first - started)
        assert found.arrival_time == pytest.approx(before, abs=30)  # wall time: seconds since 1970
        wall = (found.first_scheduled_time, found.first_token_time, found.last_token_time)
        assert wall == pytest.approx([found.arrival_time + after for after in (0.5, 1.0, 2.0)])
        assert found.finished_ts >= started
        assert found.finished_time is not None
        with pytest.raises(AttributeError):
            found.finished_ts = 0.0  # type: ignore[misc]

    def test_metrics_of_a_request_without_a_token(self) -> None:
        front = Front("final")
        front.processor.finish_aborted("r")
        found = front.outputs[-1].metrics
        assert found is not None
        assert (found.scheduled_ts, found.first_token_ts, found.first_token_latency) == (0.0, 0.0, 0.0)
        assert (found.first_token_time, found.time_in_queue, found.num_generation_tokens) == (None, None, 0)

    def test_choices_of_one_step_come_together(self) -> None:
        front = Front(n=2)
        front.step(*(EngineCoreOutput(request_id=f"r-{i}", new_token_ids=TOKENIZER.encode("x")) for i in (0, 1)))
        (output,) = front.outputs
        assert [choice.index for choice in output.outputs] == [0, 1]

    def test_a_late_stop_takes_back_what_came_after_it(self) -> None:
        front = Front(stop="cd", slow=True)
        assert front.text("abc") == []
        assert front.text("def") == [Abort("r-0", 4)]
        assert front.text("ghi") == []  # it was under way
        whole = front.request.take()
        assert whole is not None
        assert (whole.outputs[0].text, whole.outputs[0].token_ids) == ("ab", TOKENIZER.encode("abcd"))
        assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == ("stop", "cd")
        assert front.value("vllm:generation_tokens_total") == 4
        assert front.value("vllm:request_generation_tokens_sum") == 4

    def test_a_stop_string_in_the_cores_last_token_still_counts(self) -> None:
        front = Front(stop="z")
        front.text("xyz", finish_reason=FinishReason.LENGTH)
        choice = front.outputs[0].outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("xy", "stop", "z")

    def test_held_text_comes_out_at_the_end(self) -> None:
        front = Front(stop="xyz")
        front.text("xy")
        assert front.outputs[0].outputs[0].text == ""
        front.text("!", finish_reason=FinishReason.STOP, stop_token_id=36)
        choice = front.outputs[1].outputs[0]
        assert (choice.text, choice.stop_reason) == ("xy", 36)

    def test_the_last_token_of_a_grammar_is_text(self) -> None:
        front = Front()
        front.text("ab}", finish_reason=FinishReason.STOP, completes_grammar=True)
        choice = front.outputs[0].outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab}", "stop", None)

    def test_logprobs(self) -> None:
        front = Front(logprobs=2)
        entry = Logprobs([70, 71, 70], [-2.0, -0.1, -2.0], 5)
        front.step(EngineCoreOutput(request_id="r-0", new_token_ids=[70], new_logprobs=[entry]))
        choice = front.outputs[0].outputs[0]
        assert choice.logprobs is not None
        assert choice.cumulative_logprob == -2.0
        (position,) = choice.logprobs
        assert [(i, lp.logprob, lp.rank) for i, lp in position.items()] == [(70, -2.0, 5), (71, -0.1, 1)]
        assert position[70].decoded_token == TOKENIZER.token_text(70)

    def test_prompt_logprobs_come_once_when_complete(self) -> None:
        front = Front(prompt_logprobs=0, n=2)
        entry = Logprobs([70], [-2.0], 1)
        front.step(EngineCoreOutput(request_id="r-0", new_token_ids=[], new_prompt_logprobs=[entry]))
        assert front.outputs == []
        front.text("x", 1)
        front.text("x", 0)
        front.text("y", 0)
        found = [output.prompt_logprobs for output in front.outputs]
        assert found[0] is None
        assert found[1] is not None
        assert found[1][0] is None
        assert list(found[1][1] or ()) == [70]
        assert found[2] is None

    @pytest.mark.parametrize(
        ("how", "kind"), [({"retry_after": 7}, QueueFullError), ({"invalid": True}, RequestError), ({}, HeadraceError)]
    )
    def test_an_error_is_what_the_core_says_it_is(self, how: dict[str, int], kind: type[HeadraceError]) -> None:
        error = EngineCoreOutput.failed("r-0", "no", **how).exception()
        assert (type(error), str(error)) == (kind, "no")
        assert getattr(error, "retry_after", 0) == how.get("retry_after", 0)

    def test_an_error_ends_the_request_and_its_other_choices(self) -> None:
        front = Front(n=3)
        aborts = front.step(
            EngineCoreOutput(request_id="r-1", new_token_ids=[], finish_reason=FinishReason.ERROR, error="broken")
        )
        assert aborts == [Abort("r-0"), Abort("r-2")]
        assert "broken" in str(front.error)
        assert front.text("x", 0) == []

    def test_abort_from_outside_hands_out_what_there_is(self) -> None:
        front = Front(stop="xyz", n=2)
        front.text("x")
        assert front.processor.finish_aborted("r") == [Abort("r-0"), Abort("r-1")]
        last = front.outputs[-1]
        assert last.finished
        assert [(c.text, c.finish_reason) for c in last.outputs] == [("x", "abort"), ("", "abort")]
        assert front.value("vllm:request_success_total", finished_reason="abort") == 2

    def test_an_id_in_use(self) -> None:
        front = Front()
        with pytest.raises(RequestError, match="in use"):
            front.processor.add("r", None, process([5]), SamplingParams(), "delta", lambda: None)

    def test_a_slow_reader_gets_several_steps_as_one(self) -> None:
        front = Front(logprobs=0, n=2, slow=True)
        for text, index in (("a", 0), ("b", 1), ("c", 0)):
            ids = TOKENIZER.encode(text)
            logprobs = [Logprobs(ids, [-1.0], 1)]
            front.step(EngineCoreOutput(request_id=f"r-{index}", new_token_ids=ids, new_logprobs=logprobs))
        merged = front.request.take()
        assert merged is not None
        assert front.request.take() is None
        assert [(c.index, c.text, len(c.token_ids), len(c.logprobs or ())) for c in merged.outputs] == [
            (0, "ac", 2, 2),
            (1, "b", 1, 1),
        ]
        assert merged.outputs[0].cumulative_logprob == -2.0


class TestMetrics:
    def test_names_of_vllm(self) -> None:
        front = Front()
        front.step(EngineCoreOutput(request_id="r-0", new_token_ids=[70], scheduled_time=time.monotonic()))
        front.text("y", finish_reason=FinishReason.LENGTH)
        text = front.metrics.render().decode()
        for name in (
            "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prompt_tokens_total "
            "generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total request_success_total "
            "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket "
            "time_per_output_token_seconds_bucket request_time_per_output_token_seconds_bucket "
            "request_queue_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket "
            "request_inference_time_seconds_bucket request_prompt_tokens_bucket request_generation_tokens_bucket "
            "request_params_n_bucket request_params_max_tokens_bucket iteration_tokens_total_bucket cache_config_info"
        ).split():
            assert f"\nvllm:{name}{{" in text, name
        assert 'finished_reason="length"' in text
        assert front.value("vllm:prompt_tokens_total") == 2
        assert front.value("vllm:generation_tokens_total") == 2
        assert front.value("vllm:iteration_tokens_total_sum") == 4
        assert front.value("vllm:time_to_first_token_seconds_count") == 1
        assert front.value("vllm:inter_token_latency_seconds_count") == 1
        assert front.value("vllm:request_queue_time_seconds_count") == 1

    def test_memory_of_graphs_and_steps_that_found_none(self) -> None:
        metrics = EngineMetrics("model", 64, {})
        for short, graph_bytes in ((0, {"full": 10, "piecewise": 20}), (2, {"full": 30})):
            stats = SchedulerStats(num_short_steps=short, graph_bytes=graph_bytes)
            metrics.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats))
        labels = {"model_name": "model", "engine": "0"}
        value = metrics.registry.get_sample_value
        assert value("headrace:steps_out_of_memory_total", labels) == 2
        assert value("headrace:cuda_graph_memory_bytes", {**labels, "kind": "full"}) == 30
        assert value("headrace:cuda_graph_memory_bytes", {**labels, "kind": "piecewise"}) == 0

    def test_where_tokens_of_experts_went(self) -> None:
        metrics, load = EngineMetrics("model", 64, {}), ExpertLoad()
        for counted in (None, ExpertLoad([3, 9], 10), None, ExpertLoad([2, 2], 3)):
            load = load if counted is None else load.plus(counted)
            stats = SchedulerStats(expert_load=load)
            metrics.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats))
        labels, value = {"model_name": "model", "engine": "0"}, metrics.registry.get_sample_value
        assert [value("headrace:expert_tokens_total", {**labels, "rank": rank}) for rank in "01"] == [5, 11]
        assert value("headrace:expert_tokens_of_busiest_total", labels) == 13

    def test_the_cores_counters_and_gauges(self) -> None:
        metrics = EngineMetrics("model", 64, {})
        for preemptions in (2, 5):
            stats = SchedulerStats(
                num_running=3, num_waiting=1, num_blocks=10, num_free_blocks=4, num_preemptions=preemptions
            )
            metrics.begin_iteration(EngineCoreOutputs(outputs=[], stats=stats))
        labels = {"model_name": "model", "engine": "0"}
        values = {
            name: metrics.registry.get_sample_value(f"vllm:{name}", labels)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        }
        assert values == {
            "num_requests_running": 3,
            "num_requests_waiting": 1,
            "kv_cache_usage_perc": 0.6,
            "num_preemptions_total": 5,
        }

    def test_two_engines_do_not_share_a_registry(self) -> None:
        assert Front().metrics.registry is not Front().metrics.registry
