"""Shell lines of guides taken apart: what stands where, and as which fields."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.advice.explain.command_fields import fields_of
from headrace.advice.explain.command_line import CommandLine, parse_command, parse_commands
from headrace.config import QUANTIZATIONS
from headrace.errors import ConfigError
from headrace.planner.catalogue import catalogue
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest

COMMANDS: list[dict[str, Any]] = [
    json.loads(line) for line in Path(__file__).with_name("amd_commands.jsonl").read_text().splitlines()
]
"""The command lines of AMD's pages and of a blog, as data"""
PROGRAMS = {"quantize": "python3 quantize_quark.py"}


def name_of(record: dict[str, Any]) -> str:
    return f"{record['command']} {' '.join(record['argv'])}"[:80]


def shell_text(record: dict[str, Any]) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in record["env"].items()]
    program = PROGRAMS.get(record["command"], f"vllm {record['command']}")
    return " ".join([*variables, program, shlex.join(record["argv"])])


@pytest.mark.parametrize("record", COMMANDS, ids=name_of)
def test_every_published_command_parses(record: dict[str, Any]) -> None:
    line, argv = parse_command(shell_text(record)), record["argv"]
    assert all(setting.known is not None for setting in line.settings)
    assert (line.program, {**line.variables}) == (record["command"], record["env"])
    if "--model" in argv:
        assert line.model == argv[argv.index("--model") + 1]
    elif record["command"] == "serve":
        assert line.model == argv[0]
    fields_of(line)


NOT_PLANNED = ("visible_gpus", "attention_backend", "speculative_tokens")


def plan_keywords(line: CommandLine) -> dict[str, Any]:
    """What of a command line a plan can be asked for; formats that a checkpoint brings are not among it."""
    asked = {name: value for name, value in asdict(fields_of(line)).items() if value is not None}
    asked = {name: value for name, value in asked.items() if name not in NOT_PLANNED}
    if asked.get("quantization") not in QUANTIZATIONS:
        asked.pop("quantization", None)
    sizes = (asked.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    return asked | {"num_gpus": math.prod(sizes)} | ({"model": line.model} if line.model is not None else {})


NO_MODEL = ("call",)
"""a word of a sentence that a page has in a command's place"""


@pytest.mark.parametrize("record", COMMANDS, ids=name_of)
def test_every_published_command_yields_a_plan(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model that it names, or of a folder where it names one; where that cannot run, something that can."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(catalogue()["llama-3.1-8b"].config))
    monkeypatch.chdir(tmp_path)
    asked = plan_keywords(parse_command(shell_text(record)))
    if asked.get("model") in (None, *NO_MODEL):
        PlanRequest(**asked)
        return
    made = make_plan(PlanRequest(gpu="mi300x", **asked))
    assert ((made.command or made.gaps) and made.decisions) if made.feasible else (made.problems and made.alternatives)


def settings_of(line: CommandLine) -> list[str]:
    return [str(setting) for setting in line.settings]


SHELL = [
    ("vllm serve m -tp 8", "serve", "m", ["-tp 8"]),
    ("  A=1 VLLM_USE_V1='0'   vllm serve m", "serve", "m", ["VLLM_USE_V1=0"]),
    ("vllm serve m \\\n  --swap-space 16 \\\n  --port 1", "serve", "m", ["--swap-space 16", "--port 1"]),
    ("vllm serve m --no-enable-chunked-prefill --enable-prefix-caching False", "serve", "m",
     ["--no-enable-chunked-prefill", "--no-enable-prefix-caching"]),
    ("vllm serve --port 1 m", "serve", "m", ["--port 1"]),
    ("vllm serve --unknown m", "serve", "m", ["--unknown true"]),
    ("vllm serve m --unknown 3", "serve", "m", ["--unknown 3"]),
    ("vllm serve m --unknown=3", "serve", "m", ["--unknown 3"]),
    ("export NCCL_DEBUG=INFO\nexport NCCL_MIN_NCHANNELS=112\nvllm serve m", "serve", "m",
     ["NCCL_DEBUG=INFO", "NCCL_MIN_NCHANNELS=112"]),
    ("export VLLM_USE_V1=1; unset VLLM_USE_V1; vllm serve m", "serve", "m", []),
    ("MODEL=a/b; vllm serve $MODEL -tp ${TP}", "serve", "a/b", ["-tp ${TP}"]),
    ("vllm serve m 2>&1 | grep -i 'using.*backend'", "serve", "m", []),
    ("nohup vllm serve m --port 1 > log.txt 2>&1 &", "serve", "m", ["--port 1"]),
    ("sudo env HIP_VISIBLE_DEVICES=0 numactl --cpunodebind=0 vllm serve m", "serve", "m", ["HIP_VISIBLE_DEVICES=0"]),
    ("/opt/venv/bin/vllm serve m # a comment", "serve", "m", []),
    ("vllm serve <your-model> --tensor-parallel-size 2", "serve", "./your-model", ["--tensor-parallel-size 2"]),
    ("python3 -m vllm.entrypoints.openai.api_server --model a/b -tp 2", "serve", "a/b", ["--model a/b", "-tp 2"]),
    ("python -m vllm.entrypoints.cli.main serve m", "serve", "m", []),
    ("python3 /app/vllm/benchmarks/benchmark_throughput.py --model m --dataset f.json", "bench throughput", "m",
     ["--model m", "--dataset f.json"]),
    ("python benchmarks/benchmark_latency.py --model m", "bench latency", "m", ["--model m"]),
    ("python benchmarks/benchmark_serving.py --model m --request-rate inf", "bench serve", "m",
     ["--model m", "--request-rate inf"]),
    ("python3 quantize_quark.py --model_dir x --multi_gpu", "quantize", "x", ["--model-dir x", "--multi-gpu"]),
    ("huggingface-cli download a/b --exclude 'original/*' --local-dir c", "download", "a/b",
     ["--exclude original/*", "--local-dir c"]),
    ("headrace serve demo --max-model-len 8K", "serve", "demo", ["--max-model-len 8K"]),
    ("bash -c 'cd /app && VLLM_USE_V1=1 vllm serve m --port 1'", "serve", "m", ["VLLM_USE_V1=1", "--port 1"]),
    ("docker exec -it box vllm serve m", "serve", "m", []),
    ("vllm serve m --compilation-config '{\"a\": \"b; c\"}'", "serve", "m", ['--compilation-config {"a": "b; c"}']),
    ("vllm serve m --compilation-config.cudagraph_mode FULL", "serve", "m",
     ['--compilation-config {"cudagraph_mode": "FULL"}']),
    ("vllm serve m --served-model-name a b --port 1", "serve", "m", ["--served-model-name a b", "--port 1"]),
    ("HF_TOKEN=hf_secret vllm serve m --api-key k", "serve", "m", ["HF_TOKEN=***", "--api-key ***"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "program", "model", "expected"), SHELL, ids=[row[0][:60] for row in SHELL])
def test_shell(text: str, program: str, model: str, expected: list[str]) -> None:
    line = parse_command(text)
    assert (line.program, line.model, settings_of(line)) == (program, model, expected)


def test_docker_run() -> None:
    line = parse_command(
        "docker run -it --rm --network=host --ipc=host --shm-size 16G --device=/dev/kfd --device /dev/dri "
        "--group-add video -v $HOME/models:/m -e VLLM_ROCM_USE_AITER=1 --env HF_TOKEN=$TOKEN rocm/vllm-dev:main "
        "vllm serve m -tp 8"
    )
    assert (line.program, line.model) == ("serve", "m")
    assert settings_of(line) == ["VLLM_ROCM_USE_AITER=1", "HF_TOKEN=***", "-tp 8"]
    assert "--shm-size 16G" in [str(setting) for setting in line.container]
    assert all(setting.known is not None for setting in line.container)


CONTAINERS = [
    ("docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model a/b -tp 2", "a/b", ["--model a/b", "-tp 2"]),
    ("docker run --gpus all vllm/vllm-openai:latest a/b -tp 2", "a/b", ["-tp 2"]),
    ("docker run --gpus all vllm/vllm-openai:latest $MODEL -tp 2", "$MODEL", ["-tp 2"]),
    ("docker run vllm/vllm-openai:latest serve a/b -tp 2", "a/b", ["-tp 2"]),
    ("docker run vllm/vllm-openai:latest vllm serve a/b -tp 2", "a/b", ["-tp 2"]),
    ("docker run --read-only -P vllm/vllm-openai --model a/b", "a/b", ["--model a/b"]),
    ("docker run -e A=1 myimage:1 --port 1 --model=a/b", "a/b", ["--port 1", "--model a/b"]),
    ("docker run --entrypoint python3 myimage:1 -m vllm.entrypoints.openai.api_server --model a/b", "a/b",
     ["--model a/b"]),
    ("docker run --entrypoint=vllm myimage:1 serve a/b", "a/b", []),
    ("docker run --entrypoint /bin/bash vllm/vllm-openai -c 'export NCCL_DEBUG=INFO; vllm serve a/b'", "a/b",
     ["NCCL_DEBUG=INFO"]),
    ("docker run -eNCCL_DEBUG=INFO -eHF_TOKEN=x -v/a:/b -itp80:80 vllm/vllm-openai a/b", "a/b",
     ["NCCL_DEBUG=INFO", "HF_TOKEN=***"]),
    ("docker run --env=NCCL_DEBUG=INFO -e=HF_TOKEN=x vllm/vllm-openai a/b", "a/b",
     ["NCCL_DEBUG=INFO", "HF_TOKEN=***"]),
    ("export NCCL_DEBUG=INFO; docker run -e NCCL_DEBUG vllm/vllm-openai a/b", "a/b", ["NCCL_DEBUG=INFO"]),
    ("export NCCL_DEBUG=INFO; docker run vllm/vllm-openai a/b", "a/b", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "model", "expected"), CONTAINERS, ids=[row[0] for row in CONTAINERS])
def test_containers(text: str, model: str, expected: list[str]) -> None:
    line = parse_command(text)
    assert (line.program, line.model, settings_of(line), line.stray) == ("serve", model, expected, ())
    assert all(setting.known is not None for setting in line.container)


def test_short_flags_of_docker_in_one_word() -> None:
    line = parse_command("docker run -itv/a:/b -p80:80 -it -dw /x vllm/vllm-openai a/b")
    assert [str(setting) for setting in line.container] == ["-i", "-t", "-v /a:/b", "-p 80:80", "-it", "-d", "-w /x"]


@pytest.mark.parametrize(
    "text",
    [
        "docker run vllm/vllm-openai bash",
        "docker run myimage:1 python train.py --model a/b",
        "docker run myimage:1 train.py --model a/b",
        "docker run vllm/vllm-openai",
        "docker exec vllm --model a/b",
        "docker run",
    ],
)
def test_containers_that_serve_nothing(text: str) -> None:
    with pytest.raises(ConfigError, match="no command"):
        parse_command(text)


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hidden vlm serve Qwen/Qwen3-8B",
        "docker run -e HF_TOKEN=hidden -eMY_KEY=hidden --env API_SECRET=hidden myimage:1 --port 1",
        "python serve.py --api-key hidden --password=hidden",
    ],
)
def test_errors_hide_secrets(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_command(text)
    assert "hidden" not in str(caught.value)
    assert "***" in str(caught.value)


def test_a_loop_whose_lines_lack_their_backslashes() -> None:
    text = 'for i in $(seq 0 7); do\n  CUDA_VISIBLE_DEVICES="$i" vllm bench throughput \n  -tp 1 --model m &\ndone'
    line = parse_command(text)
    assert (line.program, line.model) == ("bench throughput", "m")
    assert settings_of(line) == ["CUDA_VISIBLE_DEVICES=$i", "-tp 1", "--model m"]


def test_several_commands() -> None:
    text = "CUDA_VISIBLE_DEVICES=0 vllm serve a --port 8000 & CUDA_VISIBLE_DEVICES=1 vllm serve b --port 8001"
    assert [(line.model, line.variables["CUDA_VISIBLE_DEVICES"]) for line in parse_commands(text)] == [
        ("a", "0"),
        ("b", "1"),
    ]


@pytest.mark.parametrize("text", ["", "ls -l", "docker run image", "vllm --help", "rocm-smi --setcomputepartition CPX"])
def test_lines_without_a_command_say_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="expected something like 'vllm serve MODEL --flags'"):
        parse_command(text)


def test_a_quote_that_never_ends() -> None:
    with pytest.raises(ConfigError, match="cannot be read as shell words: no closing quotation"):
        parse_command("vllm serve m --chat-template 'x")


def test_fields() -> None:
    line = parse_command(
        "CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve m -tp 2 -pp 1 --data_parallel_size=2 -ep --dtype auto -q awq "
        "--max-model-len 8K --max-num-seqs 256 --gpu-memory-utilization .92 --no-enable-chunked-prefill "
        "--compilation-config.cudagraph_mode FULL --attention-backend ROCM_ATTN "
        '--speculative_config \'{"method": "eagle3", "num_speculative_tokens": 2}\''
    )
    fields = fields_of(line)
    assert (fields.tensor_parallel_size, fields.data_parallel_size, fields.visible_gpus) == (2, 2, 4)
    assert (fields.enable_expert_parallel, fields.enable_chunked_prefill) == (True, False)
    assert (fields.dtype, fields.quantization, fields.max_model_len) == (None, "awq", 8192)
    assert (fields.compilation_config, fields.speculative_tokens) == ({"cudagraph_mode": "FULL"}, 2)
    assert (plan_keywords(line)["max_num_seqs"], plan_keywords(line)["num_gpus"]) == (256, 4)
    assert "quantization" not in plan_keywords(line)


@pytest.mark.parametrize(
    ("text", "lengths", "concurrency"),
    [
        ("vllm bench latency --model m --batch-size 64 --input-len 128 --output-len 2048", (128, 2048), 64),
        ("vllm bench throughput --model m --num-prompts 1500 --max-num-seqs 1024 --input-len 1k", (1000, None), 1024),
        ("vllm bench throughput --model m --num-prompts 100", (None, None), 100),
        ("vllm bench serve --model m --max-concurrency 32 --random-input-len 4096", (4096, None), 32),
        ("vllm bench serve --model m --request-rate 1", (None, None), None),
        ("vllm serve m --max-num-seqs 8", (None, None), None),
    ],
)
def test_lengths_and_load(text: str, lengths: tuple[int | None, int | None], concurrency: int | None) -> None:
    fields = fields_of(parse_command(text))
    assert ((fields.input_len, fields.output_len), fields.concurrency) == (lengths, concurrency)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm serve m -tp two", "--tensor-parallel-size must be a whole number, got 'two'"),
        ("vllm serve m --gpu-memory-utilization x", "--gpu-memory-utilization must be a number, got 'x'"),
        ("vllm serve m --compilation-config [1]", "--compilation-config must be a JSON object, got '\\[1\\]'"),
        ('vllm serve m --speculative-config \'{"num_speculative_tokens": "x"}\'', "must be a whole number, got 'x'"),
    ],
)
def test_values_that_cannot_be_read_name_their_flag(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fields_of(parse_command(text))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["vllm", "serve", "m", "-tp", "8", "--port", "=", "'", '"', "&&", ";", "|", "\\", "\n",
                                 "$X", "A=1", "export", "docker", "run", "-e", "--", "<x>", ">", "#", "{}", "-",
                                 "$(", "`", "${", ")", "--speculative-config.a", "1", "-eA=1", "-itv/a", "--model",
                                 "--entrypoint", "--config", "vllm/vllm-openai", "bash -c"]),
                max_size=12))  # fmt: skip
def test_no_line_breaks_the_parser(words: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        parse_commands(" ".join(words))
