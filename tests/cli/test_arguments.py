"""Every spelling of a flag that vLLM's users type, and what each mistake gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.arguments import FlagParser, build_config, human_int
from headrace.cli.bench.command import build_parser as bench_parser
from headrace.cli.generate import build_parser as generate_parser
from headrace.cli.plan import build_parser as plan_parser
from headrace.cli.serve import build_parser as serve_parser
from headrace.config import EngineConfig, ServerConfig
from headrace.environment import ENVIRONMENT_KNOBS
from headrace.errors import ConfigError
from headrace.knobs import knob


def parse(line: str) -> dict[str, Any]:
    return vars(serve_parser().parse(line.split()))


SPELLINGS = [
    ("demo", {"model": "demo"}),
    ("--model demo", {"model": "demo"}),
    ("demo --model demo", {"model": "demo"}),
    ("--port 80 demo", {"port": 80, "model": "demo"}),
    ("--max-model-len 4096", {"max_model_len": 4096}),
    ("--max_model_len=4096", {"max_model_len": 4096}),
    ("--max-model-len 8k", {"max_model_len": 8000}),
    ("--max-model-len 8K", {"max_model_len": 8192}),
    ("--max-num-batched-tokens 2M", {"max_num_batched_tokens": 2 * 1024 * 1024}),
    ("--gpu-memory-utilization .95", {"gpu_memory_utilization": 0.95}),
    ("-tp 2", {"tensor_parallel_size": 2}),
    ("-tp=2", {"tensor_parallel_size": 2}),
    ("--tensor_parallel_size 2", {"tensor_parallel_size": 2}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--enforce-eager demo", {"enforce_eager": True, "model": "demo"}),
    ("--no-enforce-eager", {"enforce_eager": False}),
    ("--enforce-eager false", {"enforce_eager": False}),
    ("--enable-chunked-prefill False", {"enable_chunked_prefill": False}),
    ("--enable-chunked-prefill=false", {"enable_chunked_prefill": False}),
    ("--enable_chunked_prefill True demo", {"enable_chunked_prefill": True, "model": "demo"}),
    ("--no-enable-chunked-prefill", {"enable_chunked_prefill": False}),
    ("--no_enable_chunked_prefill", {"enable_chunked_prefill": False}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--disable-prefix-caching", {"enable_prefix_caching": False}),
    ("--no-async-scheduling", {"async_scheduling": False}),
    ("--disable-log-requests", {"disable_log_requests": True}),
    ("--enable-log-requests", {"disable_log_requests": False}),
    ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
    ("--served-model-name a --served-model-name b", {"served_model_name": ["a", "b"]}),
    ("--api-key a b --port 1", {"api_key": ["a", "b"], "port": 1}),
    ('--compilation-config {"cudagraph_mode":"NONE"}', {"compilation_config": {"cudagraph_mode": "NONE"}}),
    ("--compilation-config.cudagraph_mode NONE", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    ("--compilation_config.cudagraph-mode=NONE", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    ("--compilation-config.a.b 1 --compilation-config.a.c x", {"compilation_config": {"a": {"b": 1, "c": "x"}}}),
    ('--compilation-config {"a":1} --compilation-config.b [2]', {"compilation_config": {"a": 1, "b": [2]}}),
    ("-- demo", {"model": "demo"}),
]


@pytest.mark.parametrize(("line", "expected"), SPELLINGS, ids=[line for line, _ in SPELLINGS])
def test_spellings(line: str, expected: dict[str, Any]) -> None:
    assert parse(line) == expected


MISTAKES = [
    ("--max-model-length 5", "unknown flag --max-model-length; did you mean --max-model-len?"),
    ("--no-enforce-eagr", "unknown flag --no-enforce-eagr; did you mean --no-enforce-eager?"),
    ("--qqqqqqqq", "unknown flag --qqqqqqqq: no flag of headrace's or vLLM's; `headrace serve --help` lists them"),
    ("-x", "unknown flag -x"),
    ("--max-model-len x", "--max-model-len must be a whole number such as 4096, 8k or 8K, got 'x'"),
    ("--max-model-len 0", "--max-model-len must be at least 1, got 0"),
    ("--max-model-len", "--max-model-len expected one argument"),
    ("-tp two", "--tensor-parallel-size must be a whole number"),
    ("--dtype int4", "--dtype must be one of auto, half, float16, bfloat16, float, float32; got 'int4'"),
    ("--num-gpu-blocks-override 0", "--num-gpu-blocks-override must be at least 1, got 0"),
    ("--block-size 17", "--block-size must be one of 1, 16, 32, 64; got 17"),
    ("--gpu-memory-utilization much", "--gpu-memory-utilization must be a number, got 'much'"),
    ("--enforce-eager=maybe", "--enforce-eager must be true or false, got 'maybe'"),
    ("--compilation-config [1]", "--compilation-config must be a JSON object, got '[1]'"),
    ("--compilation-config", "--compilation-config needs a value"),
    ("--compilation-config.a 1 --compilation-config.a.b 2", "'a' is not a JSON object"),
    ("a b", "unexpected argument b"),
    ("a --model b", "two models given: 'a' and --model 'b'"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistakes_name_flag_value_and_what_is_accepted(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(line)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("-1", -1), ("1k", 1000), ("1K", 1024), ("1.5k", 1500), ("25.6k", 25600), ("1m", 10**6), ("1G", 2**30)],
)
def test_human_numbers(text: str, number: int) -> None:
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1kk", "0x10", "1 k"])
def test_no_human_numbers(text: str) -> None:
    with pytest.raises(ValueError):
        human_int(text)


def test_values_that_look_like_flags() -> None:
    values = generate_parser().parse(["--prompt", "- a list", "--prompt=--x_y=1", "--seed", "-1"])
    assert (values.prompt, values.seed) == (["- a list", "--x_y=1"], -1)


def test_only_what_was_given_is_taken_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    assert build_config(ServerConfig, serve_parser().parse([])).api_key == ["from-environment"]
    assert build_config(ServerConfig, serve_parser().parse(["--api-key", "flag"])).api_key == ["flag"]
    values = bench_parser("latency").parse([])
    assert build_config(EngineConfig, values, enable_prefix_caching=False).enable_prefix_caching is False
    values = bench_parser("latency").parse(["--enable-prefix-caching"])
    assert build_config(EngineConfig, values, enable_prefix_caching=False).enable_prefix_caching is True


@pytest.mark.parametrize(
    ("variable", "flags"), [("", []), (" ", []), (None, ["--api-key", ""]), (None, ["--api-key="])]
)
def test_an_empty_key_ends_the_start(variable: str | None, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a variable brings: whoever sets it believes that there is a key."""
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    with pytest.raises(ConfigError, match=r"api_key must not be empty \(--api-key, VLLM_API_KEY\)"):
        build_config(ServerConfig, serve_parser().parse(flags))


def test_a_knob_is_a_flag_with_its_aliases() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Options:
        size: int = knob(3, "The size.", minimum=1, aliases=("--length",), group="mine")

    parser = FlagParser("x", "Summary.", "  none", model=False)
    parser.add_knobs(Options)
    assert build_config(Options, parser.parse(["--length", "2k"])).size == 2000
    assert build_config(Options, parser.parse([])).size == 3


def test_flags_of_older_editions_are_accepted_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--num_scheduler_steps 10 --use-v2-block-manager --swap-space=16 demo") == {"model": "demo"}
    title, *notes = capsys.readouterr().err.splitlines()
    assert title == "headrace: note: no effect here (`headrace explain` says more):"
    assert [note.split(":")[0].strip() for note in notes] == [
        "--num-scheduler-steps 10",
        "--use-v2-block-manager",
        "--swap-space 16",
    ]


@pytest.mark.parametrize(
    "flag",
    ["--guided-decoding-backend auto", "--structured-outputs-config.backend outlines", "--grammar-backend xgrammar"],
)
def test_what_holds_output_to_a_grammar_is_said_of_every_flag_that_would_choose_it(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse(flag + " demo") == {"model": "demo"}
    assert "llguidance holds outputs to grammars" in capsys.readouterr().err


@pytest.mark.parametrize("parser", [serve_parser(), generate_parser(), *map(bench_parser, ["latency", "throughput"])])
def test_help_names_every_engine_knob(parser: FlagParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for name in EngineConfig.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "examples:" in text
    assert "(default:" in text


AMD_COMMANDS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "advice" / "explain" / "amd_commands.jsonl").read_text().splitlines()
    if '"command": "quantize"' not in line
]
REFUSED = {
    "call so the": "unexpected argument so the ROCm runtime",
}
"""What of AMD's pages needs what we lack, or is no command at all"""


@pytest.mark.parametrize("record", AMD_COMMANDS, ids=lambda record: " ".join([record["command"], *record["argv"]])[:80])
def test_published_commands_are_taken_as_they_are(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in record["env"].items():
        monkeypatch.setenv(name, value)
    parser = serve_parser() if record["command"] == "serve" else bench_parser(record["command"].split()[1])
    refusal = next((text for part, text in REFUSED.items() if part in " ".join(record["argv"])), None)
    if record["argv"] == ["-h"]:
        with pytest.raises(SystemExit):
            parser.parse(record["argv"])
        return
    if refusal is not None:
        with pytest.raises(ConfigError) as caught:
            parser.parse(record["argv"])
        assert refusal in str(caught.value)
        return
    values = parser.parse(record["argv"])
    notes = capsys.readouterr().err
    assert notes.count("headrace: note") <= 1, "one notice"
    if record["command"] != "bench serve":
        assert build_config(EngineConfig, values).model == vars(values).get("model", "demo")
        for name, value in record["env"].items():
            if name.startswith("VLLM_") and name not in ENVIRONMENT_KNOBS:
                assert f"{name}={value}" in notes


def test_flags_of_vllm_become_ours_or_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    values = parse(
        "m -cc.cudagraph_mode=NONE --cudagraph-capture-sizes 1 2 4 --max-cudagraph-capture-size=8 -pp 1 -q awq "
        "--attention-backend ROCM_AITER_FA --trust-remote-code --speculative_config.method mtp --spec-tokens 2 -O3 "
        "--runner generate"
    )
    sizes = {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [1, 2, 4], "max_cudagraph_capture_size": 8}
    guesses = {"method": "mtp", "num_speculative_tokens": 2}
    assert values == {
        "model": "m", "compilation_config": sizes, "pipeline_parallel_size": 1, "quantization": "awq",
        "runner": "generate", "speculative_config": guesses,
    }  # fmt: skip
    notes = [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()[1:]]
    assert notes == [
        "--attention-backend ROCM_AITER_FA",
        "--trust-remote-code",
        "-O3",
    ]


def test_flags_of_ours_keep_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--attention-backend TRITON_ATTN -q fp8 --trust-remote-code false"
    assert parse(line) == {"attention_backend": "TRITON_ATTN", "quantization": "fp8", "trust_remote_code": False}
    assert capsys.readouterr().err == ""


def test_the_environment_is_told_once_and_wrong_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "ROCM_AITER_FA")
    values = serve_parser().parse(["m", "--swap-space", "4"])
    assert capsys.readouterr().err.count("headrace: note") == 1
    assert build_config(EngineConfig, values).attention_backend is None
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_ATTN")
    assert build_config(EngineConfig, values).attention_backend == "TRITON_ATTN"
    bench_parser("serve").parse([])
    assert capsys.readouterr().err == "", "a client has no engine"
    monkeypatch.setenv("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT5")
    with pytest.raises(ConfigError, match="QUICK_REDUCE_QUANTIZATION must be one of NONE, FP, INT8, INT6, INT4"):
        serve_parser().parse(["m"])


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("latency", "--num-prompts 3", "unknown flag --num-prompts"),
        ("throughput", "--backend hf", "--backend must be vllm, got 'hf': headrace measures itself"),
        ("serve", "--tensor-parallel-size 8", "unknown flag --tensor-parallel-size"),
        ("serve", "--use-beam-search", "--use-beam-search is not supported: the benchmark does not do this"),
    ],
)
def test_what_a_benchmark_does_not_take(name: str, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench_parser(name).parse(line.split())
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("parser", "flag", "message"),
    [
        (generate_parser, "--port", "`headrace generate` does not take it; it is for `headrace serve`"),
        (
            plan_parser,
            "--served-model-name",
            "`headrace plan` does not take it; it is for `headrace serve`,",
        ),
        (serve_parser, "--random-input-len", "`headrace serve` does not take it; it is for a benchmark"),
        (plan_parser, "--swap-space", "it is vLLM's, and preempted requests are recomputed, not swapped"),
        (plan_parser, "--num-gpu", "unknown flag --num-gpu; did you mean --num-gpus?"),
        (plan_parser, "--frobnicate", "no flag of headrace's or vLLM's; `headrace plan --help` lists them"),
    ],
)
def test_a_flag_of_another_command_or_of_nobody_says_whose_it_is(
    parser: Callable[[], FlagParser], flag: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse([flag, "3"])
    assert str(caught.value).startswith(f"unknown flag {flag}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["--ignore-eos", "--backend vllm", "--async-engine"])
def test_what_offline_benchmarks_do_anyway(line: str) -> None:
    assert vars(bench_parser("throughput").parse(line.split())) == {}
