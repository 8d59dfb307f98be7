"""Answers to command lines: the claims of guides that do not hold are named, and the better lines can be run."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.advice.explain.command_line import parse_command
from headrace.advice.explain.explain import CLAIMS, Answer, Explanation, explain, explain_line
from headrace.advice.explain.remark import VERDICTS
from headrace.advice.flags.table import flags_by_name, variables_by_name
from headrace.cli.arguments import build_config
from headrace.cli.bench.command import build_parser as bench_parser
from headrace.cli.serve import build_parser as serve_parser
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from headrace.models.registry import DESCRIBED
from headrace.planner.chips import CHIPS, find_chip
from headrace.planner.plan import make_plan
from headrace.planner.plan_request import PlanRequest
from tests.advice.explain.test_command_line import COMMANDS, name_of, shell_text
from tests.sampled import sampled

BLOG = (
    "VLLM_ROCM_USE_AITER=1 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 VLLM_ROCM_USE_AITER_MHA=0 HIP_FORCE_DEV_KERNARG=1 "
    "vllm serve openai/gpt-oss-120b --tensor-parallel-size 1 --max-model-len 8192 --trust-remote-code --dtype bfloat16 "
    "--kv-cache-dtype fp8 --gpu-memory-utilization 0.92 --no-enable-chunked-prefill --max-num-seqs 512 --port 8080"
)

KIMI = "KimiK25ForConditionalGeneration"


def explained(text: str, gpu: str | None = None) -> Explanation:
    (only,) = explain(text, find_chip(gpu) if gpu else None)
    return only


def answer(text: str, key: str, gpu: str | None = None) -> Answer:
    found = [answer for answer in explained(text, gpu).answers if answer.setting.key == key]
    assert found, key
    return found[-1]


def test_the_blog_line_with_all_its_claims() -> None:
    whole = explained(BLOG)
    assert set(whole.claims) >= {
        "quick-reduce-helps-on-one-gpu",
        "kv-dtype-shrinks-weights",
        "models-need-trust-remote-code",
        "max-model-len-preallocates",
        "seqs-times-length-must-fit",
        "mha-off-gives-flash-attention",
        "four-variables-belong-together",
        "chunked-prefill-off-is-faster",
        "utilization-is-for-the-kv-cache",
    }
    assert (whole.case.chip.name, whole.case.chip_guessed) == ("mi300x", True)
    kv = answer(BLOG, "--kv-cache-dtype")
    assert "292 MiB -> 146 MiB" in kv.why
    assert "60.8 GiB (mxfp4)" in kv.why
    dropped = {str(a.setting) for a in whole.answers if a.better == "drop"}
    assert {"--trust-remote-code", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4", "--no-enable-chunked-prefill"} <= dropped
    assert whole.better["vllm"] == (
        "VLLM_ROCM_USE_AITER=1 HIP_FORCE_DEV_KERNARG=1 vllm serve openai/gpt-oss-120b "
        "--attention-backend ROCM_AITER_UNIFIED_ATTN --max-model-len 8192 --kv-cache-dtype fp8 "
        "--gpu-memory-utilization 0.92 --max-num-seqs 512 --port 8080"
    )
    assert any("60.8 GiB of mxfp4 weights" in found.text for found in whole.findings)


LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
QUARK = "amd/Llama-3.1-405B-Instruct-FP8-KV"
OPINIONS = [
    # line (flags alone: of vLLM, for LLAMA), gpu, setting, verdict, part of what is said, claim
    ("--kv-cache-dtype fp8", "h200", "--kv-cache-dtype", "helps", "cannot shrink weights", "kv-dtype-shrinks-weights"),
    (f"headrace serve {LLAMA} --kv-cache-dtype fp8", "h200", "--kv-cache-dtype", "helps",
     "rounds K and V, which moves answers", "kv-dtype-shrinks-weights"),
    ("--kv-cache-dtype fp8_e5m2", "h200", "--kv-cache-dtype", "costs", "2 bits of mantissa"),
    (f"VLLM_ROCM_USE_AITER=1 vllm serve {LLAMA} --kv-cache-dtype fp8", None, "--kv-cache-dtype", "helps",
     "AMD's pages contradict each other", "kv-dtype-shrinks-weights"),
    (f"vllm serve {QUARK} --kv-cache-dtype fp8", None, "--kv-cache-dtype", "helps", "Scales come with this"),
    ("--calculate-kv-scales", None, "--calculate-kv-scales", "no effect", "an fp8 cache"),
    (f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 vllm serve {LLAMA}", "mi300x", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
     "no effect", "no all-reduce", "quick-reduce-helps-on-one-gpu"),
    (f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 vllm serve {LLAMA} -tp 8", "mi300x",
     "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "depends", "INT4 rounds"),
    (f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 vllm serve {LLAMA} -tp 8", "h200",
     "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "no effect", "not on NVIDIA H200"),
    (f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 headrace serve {LLAMA} -tp 8", "h200",
     "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "depends", "from the size on where it was measured to be faster"),
    (f"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4 headrace serve {LLAMA} -tp 8", "mi300x",
     "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "no effect", "RCCL"),
    (f"headrace serve {LLAMA} -tp 8 --quick-reduce-quantization INT8", "h200",
     "--quick-reduce-quantization", "depends", "INT8 rounds"),
    ("vllm serve deepseek-ai/DeepSeek-V3 --trust-remote-code", None, "--trust-remote-code", "not needed", "native",
     "models-need-trust-remote-code"),
    ("vllm serve ./model --max-num-seqs 128 --max-model-len 8192", None, "--max-num-seqs", "fine", "paged",
     "seqs-times-length-must-fit"),
    ("vllm serve ./model --max-num-seqs 128", None, "--max-num-seqs", "fine", "TTFT only gets worse",
     "fewer-seqs-lower-ttft"),
    ("vllm serve ./model --max-num-seqs 9000 --max-num-batched-tokens 8192", None, "--max-num-seqs", "wrong",
     "no room"),
    (f"NCCL_MIN_NCHANNELS=112 vllm serve {LLAMA} -tp 8", "h200", "NCCL_MIN_NCHANNELS", "costs", "AMD's number",
     "112-channels-everywhere"),
    (f"NCCL_MIN_NCHANNELS=112 vllm serve {LLAMA}", "mi300x", "NCCL_MIN_NCHANNELS", "no effect", "one GPU",
     "112-channels-everywhere"),
    (f"NCCL_MIN_NCHANNELS=112 vllm serve {LLAMA} -tp 8", "mi300x", "NCCL_MIN_NCHANNELS", "depends", "left it out",
     "112-channels-everywhere"),
    (f"vllm serve {QUARK} --quantization fp8 -tp 8", None, "--quantization", "not needed",
     "holds fp8 weights already", "fp8-flag-on-a-quantized-checkpoint"),
    ("vllm serve RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16 --quantization gptq", None, "--quantization",
     "wrong", "compressed-tensors", "format-follows-from-the-flag"),
    ("vllm serve hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 --quantization awq", None, "--quantization",
     "not needed", "int4", "format-follows-from-the-flag"),
    ("--quantization fp8", "mi300x", "--quantization", "helps", "ptpc_fp8 is as fast"),
    ("--quantization ptpc_fp8", "h200", "--quantization", "wrong", "ROCm alone"),
    ("--quantization fp8", "a100", "--quantization", "depends", "no fp8 units"),
    (f"VLLM_ROCM_USE_AITER_MOE=1 vllm serve {LLAMA}", "mi300x", "VLLM_ROCM_USE_AITER_MOE", "no effect",
     "needs the master switch", "aiter-switches-work-alone"),
    (f"VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_MOE=1 vllm serve {LLAMA}", None, "VLLM_ROCM_USE_AITER_MOE",
     "no effect", "no experts"),
    (f"VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_LINEAR=1 vllm serve {LLAMA}", None, "VLLM_ROCM_USE_AITER_LINEAR",
     "not needed", "its default"),
    (f"VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_RMSNORM=0 vllm serve {LLAMA}", None, "VLLM_ROCM_USE_AITER_RMSNORM",
     "costs", "Triton's kernel runs instead"),
    ("VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_FP4BMM=1 vllm serve deepseek-ai/DeepSeek-R1 -tp 8", "mi300x",
     "VLLM_ROCM_USE_AITER_FP4BMM", "wrong", "no fp4 units"),
    (f"VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION=1 vllm serve {LLAMA}", None,
     "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION", "no effect", "only with VLLM_ROCM_USE_AITER_MHA=0"),
    (f"VLLM_ROCM_USE_AITER=1 vllm serve {LLAMA}", "h200", "VLLM_ROCM_USE_AITER", "no effect", "AMD's GPUs alone"),
    (f"VLLM_ROCM_USE_AITER=1 vllm serve {LLAMA}", "mi300x", "VLLM_ROCM_USE_AITER", "helps", "Tensor Engine",
     "without-aiter-generic-torch-runs"),
    (f"VLLM_ROCM_USE_AITER=0 vllm serve {LLAMA}", "mi300x", "VLLM_ROCM_USE_AITER", "costs", "Triton kernels"),
    ("vllm serve ./model --no-enable-chunked-prefill", None, "--enable-chunked-prefill", "costs",
     "without a measurement", "chunked-prefill-off-is-faster"),
    ("vllm serve ./model --enable-chunked-prefill False", None, "--enable-chunked-prefill", "costs", "long prompt"),
    ("vllm serve deepseek-ai/DeepSeek-R1 --block-size 1 -tp 8", "mi300x", "--block-size", "not needed",
     "blocks of 16", "latent-attention-needs-block-size-1"),
    ("vllm serve deepseek-ai/DeepSeek-V3.2 --block-size 1 -tp 8", "mi300x", "--block-size", "fine", "sparse"),
    ("--block-size 1", None, "--block-size", "costs", "nothing gained"),
    ("--max-num-batched-tokens 65536", "mi300x", "--max-num-batched-tokens", "costs",
     "large ones TTFT and throughput", "larger-steps-improve-itl"),
    ("--no-enable-chunked-prefill --max-num-batched-tokens 2048 --max-model-len 8192", None,
     "--max-num-batched-tokens", "wrong", "must fit into one step"),
    ("vllm serve ./model --no-async-scheduling", None, "--async-scheduling", "costs", "91 -> 87 ms",
     "async-scheduling-hurts-latency"),
    ("--num-speculative-tokens 5 --speculative-model x --max-num-seqs 8", None, "--num-speculative-tokens", "depends",
     "5 at a time", "more-draft-tokens-are-better"),
    ("--speculative-config '{\"num_speculative_tokens\": 2}' --max-num-seqs 300", None, "--speculative-config",
     "costs", "At 300 at once"),
    ("--speculative-config '{\"method\": \"ngram\", \"num_speculative_tokens\": 5}' --max-num-seqs 1024", "h200",
     "--speculative-config", "costs", "paying up to "),
    (f"headrace serve {LLAMA} --speculative-config '{{\"method\": \"ngram\"}}' --max-num-seqs 1024", "h200",
     "--speculative-config", "helps", "With more, steps have no guesses"),
    ("vllm serve ./model --num_scheduler-steps 10", None, "--num-scheduler-steps", "no effect", "first engine"),
    ("vllm serve ./model --swap-space 16", None, "--swap-space", "no effect", "never swaps"),
    ("VLLM_USE_V1=0 vllm serve ./model", None, "VLLM_USE_V1", "wrong", "gone"),
    ("--gpu-memory-utilization 0.99", "mi300x", "--gpu-memory-utilization", "costs", "1.9 GiB of 192",
     "utilization-is-for-the-kv-cache"),
    ("--gpu-memory-utilization 0.45", None, "--gpu-memory-utilization", "fine", "second instance"),
    ("--dtype float16", None, "--dtype", "costs", "65,504"),
    ("--max-model-len 200000", None, "--max-model-len", "wrong", "ends at 131,072"),
    ("-tp 8", "mi300x", "--tensor-parallel-size", "fine", "replicas", "replicas-always-beat-tensor-parallelism"),
    ("-tp 3", "mi300x", "--tensor-parallel-size", "wrong", "32 attention heads"),
    (f"CUDA_VISIBLE_DEVICES=0 vllm serve {LLAMA} -tp 2", None, "--tensor-parallel-size", "wrong", "1 left visible"),
    ("HIP_VISIBLE_DEVICES=0 CUDA_VISIBLE_DEVICES=1 vllm serve m", None, "HIP_VISIBLE_DEVICES", "wrong", "hide GPUs",
     "both-visible-devices"),
    ("-tp 8 --enable-expert-parallel", None, "--enable-expert-parallel", "no effect", "no experts",
     "experts-always-want-expert-parallelism"),
    ("vllm serve meta-llama/Llama-4-Maverick-17B-128E-Instruct -tp 8 --enable-expert-parallel", None,
     "--enable-expert-parallel", "costs", "0.78%", "experts-always-want-expert-parallelism"),
    ("vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --enable-expert-parallel", None, "--enable-expert-parallel", "depends",
     "contradict each other", "experts-always-want-expert-parallelism"),
    ("vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --attention-backend ROCM_AITER_FA", "mi300x", "--attention-backend",
     "wrong", "ordinary keys"),
    ("--attention-backend ROCM_AITER_MLA", "mi300x", "--attention-backend", "wrong", "latents"),
    ("--attention-backend ROCM_ATTN", "mi300x", "--attention-backend", "depends", "2.7-4.4"),
    ("--attention-backend ROCM_AITER_FA", "mi300x", "--attention-backend", "depends", "need the master switch"),
    ("--compilation-config '{\"cudagraph_mode\": \"SOME\"}'", None, "--compilation-config", "wrong",
     "FULL_AND_PIECEWISE"),
    ("--compilation-config '{\"full_cuda_graph\": true}'", None, "--compilation-config", "fine", "old spelling"),
    ("RCCL_DEBUG=INFO vllm serve m -tp 8", None, "RCCL_DEBUG", "no effect", "RCCL reads NCCL_DEBUG", "rccl-names"),
    ("vllm serve m --disable-nccl-for-dp-synchronization", None, "--disable-nccl-for-dp-synchronization", "no effect",
     "one replica"),
    ("vllm serve m --host 0.0.0.0", None, "--host", "costs", "no --api-key"),
    ("vllm bench throughput --model m --num-prompts 100 --max-num-seqs 64", None, "--num-prompts", "costs",
     "no multiple"),
    ("vllm serve m --made-up-flag 3", None, "--made-up-flag", "unknown", "no flag of that name"),
    ("vllm serve m --max-num-seq 3", None, "--max-num-seq", "unknown", "did you mean --max-num-seqs?"),
    ("-tp eight", None, "--tensor-parallel-size", "wrong", "must be a whole number"),
    ("--gpu-memory-utilization 1.5", None, "--gpu-memory-utilization", "wrong", "between 0"),
    ("--block-size 7", None, "--block-size", "wrong", "vLLM takes 1, 8, 16"),
    ("headrace serve demo --block-size 128", None, "--block-size", "wrong", "must be one of 1, 16, 32, 64"),
    ("--gpu-memory-utilization 0", "h200", "--gpu-memory-utilization", "wrong", "0.01 and 1"),
    ("--max-num-seqs 0", "h200", "--max-num-seqs", "wrong", "at least 1, got '0'"),
    ("--max-num-batched-tokens 0", "h200", "--max-num-batched-tokens", "wrong", "at least 1"),
    ("--tensor-parallel-size 0", "h200", "--tensor-parallel-size", "wrong", "at least 1"),
    ("--max-model-len 0", "h200", "--max-model-len", "wrong", "at least 1 or auto"),
    ("--max-model-len auto", "h200", "--max-model-len", "fine", "has room for"),
    ("--max-model-len -1", "h200", "--max-model-len", "fine", "has room for"),
    ("--dtype fp16", "h200", "--dtype", "wrong", "must be one of auto, half, float16"),
    ("--kv-cache-dtype fp7", "h200", "--kv-cache-dtype", "wrong", "must be one of auto"),
    ("--port 70000", "h200", "--port", "wrong", "between 0 and 65535"),
    ("vllm serve m --kv-cache-dtype nvfp4", None, "--kv-cache-dtype", "fine", ""),
    ("headrace serve m --kv-cache-dtype nvfp4", None, "--kv-cache-dtype", "wrong", "must be one of auto, float16"),
    ("vllm serve m --load-format tensorizer", None, "--load-format", "fine", ""),
    ("headrace serve m --load-format tensorizer", None, "--load-format", "wrong", "auto, safetensors, dummy"),
    ("vllm serve m --uvicorn-log-level trace", None, "--uvicorn-log-level", "fine", ""),
    ("headrace serve RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16 --quantization gptq", None,
     "--quantization", "not needed", "holds int4 weights already", "format-follows-from-the-flag"),
    ("headrace serve demo --quantization awq", None, "--quantization", "wrong", "config.json says"),
    ("vllm serve hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 --quantization fp8", None, "--quantization",
     "wrong", "holds int4 weights"),
    ("vllm serve m --mm-encoder-tp-mode both", None, "--mm-encoder-tp-mode", "wrong", "weights, data"),
]  # fmt: skip


def opinion(text: str, gpu: str | None) -> Explanation:
    return explained(f"vllm serve {LLAMA} {text}" if text.startswith("-") else text, gpu)


@pytest.mark.parametrize("row", OPINIONS, ids=[f"{o[2]} {o[3]}: {o[4]}" for o in OPINIONS])
def test_opinions(row: tuple[Any, ...]) -> None:
    text, gpu, key, verdict, part, *claim = row
    found = [answer for answer in opinion(text, gpu).answers if answer.setting.key == key][-1]
    assert (found.verdict, part in found.why) == (verdict, True), found.why
    assert found.claim in (claim or [found.claim])


def test_every_claim_is_met_by_some_line() -> None:
    met = {claim for text, gpu, *_ in OPINIONS for claim in opinion(text, gpu).claims}
    assert met | set(explained(BLOG).claims) == set(CLAIMS)


@sampled(
    ("record", "gpu"), COMMANDS, [None, "mi300x", "mi355x", "h200", "a100", "cpu"],
    say=lambda value: name_of(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_every_published_command_is_answered(record: dict[str, Any], gpu: str | None) -> None:
    line = parse_command(shell_text(record))
    whole = explain_line(line, find_chip(gpu) if gpu else None)
    assert len(whole.answers) == len(line.settings)
    for found in whole.answers:
        assert found.verdict in VERDICTS
        assert found.verdict != "unknown"
        assert found.does
        assert found.here
        assert not found.why.endswith(";")
        assert found.claim in CLAIMS or not found.claim
    assert whole.notice.startswith("headrace: ")
    assert whole.to_json()["better"] == whole.better


@pytest.mark.parametrize("record", [r for r in COMMANDS if r["argv"] != ["-h"]], ids=name_of)
def test_better_lines_are_better_and_headrace_takes_its_own(
    record: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = explained(shell_text(record))
    if record["command"] == "quantize":
        assert whole.better == {}
        return
    again = explained(whole.better["vllm"], "mi300x")
    left = [a for a in again.answers if a.verdict in ("wrong", "no effect") or a.better == "drop"]
    assert not left, [(str(a.setting), a.why) for a in left]
    if "headrace" in whole.better:
        line = parse_command(whole.better["headrace"])
        words = whole.better["headrace"].partition(f"headrace {line.program} ")[2]
        parser = serve_parser() if line.program == "serve" else bench_parser(line.program.split()[1])

        values = parser.parse(shlex.split(words))
        if line.program != "bench serve":
            build_config(EngineConfig, values)
        assert "no effect" not in capsys.readouterr().err


PLANNED = [("llama-3.1-405b", "mi300x", 8), ("gpt-oss-120b", "mi300x", 1), ("deepseek-r1", "mi300x", 8),
           ("deepseek-v3.2", "mi355x", 8), ("llama-3.1-8b", "h200", 1), ("deepseek-r1", "h200", 8),
           ("llama-3.1-70b", "mi300x", 8)]  # fmt: skip


@sampled(("planned", "engine", "concurrency"), PLANNED, ["headrace", "vllm"], [4, 1024])
def test_what_a_plan_writes_needs_no_better_line(planned: tuple[str, str, int], engine: str, concurrency: int) -> None:
    model, gpu, count = planned
    asked = PlanRequest(model=model, gpu=gpu, num_gpus=count, engine=engine, concurrency=concurrency)
    for whole in explain(make_plan(asked).command.line, find_chip(gpu)):
        bad = [a for a in whole.answers if a.better or a.verdict in ("wrong", "no effect", "unknown")]
        assert not bad, [(str(a.setting), a.why) for a in bad]


def test_values_that_headrace_lacks_are_refused_and_have_no_line_for_it() -> None:
    whole = explained(f"vllm serve {LLAMA} --block-size 128")
    assert "headrace: refused: --block-size must be one of 1, 16, 32, 64; got '128'" in whole.notice
    assert "headrace" not in whole.better


def test_what_headrace_refuses_has_no_line_for_it() -> None:
    whole = explained("vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --decode-context-parallel-size 8", "mi300x")
    assert "headrace" not in whole.better
    assert "headrace: refused: --decode-context-parallel-size must be 1, got '8'" in whole.notice


def test_what_headrace_cannot_run_yet_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DESCRIBED, KIMI, replace(DESCRIBED[KIMI], module=""))
    planned = explained("vllm serve moonshotai/Kimi-K2.5 --tensor-parallel-size 8", "mi300x")
    assert planned.gaps[0].startswith(f"headrace has no {KIMI} yet")
    assert list(planned.better) == ["vllm"]
    assert explained(BLOG).gaps == ()
    assert explained(f"vllm serve {LLAMA}").gaps == ()


def test_a_line_that_does_not_fit_gets_one_that_does() -> None:
    whole = explained("vllm serve meta-llama/Llama-3.3-70B-Instruct", "mi300x")
    memory = next(found for found in whole.findings if found.title == "memory")
    assert memory.verdict == "wrong"
    mended = explained(whole.better["vllm"], "mi300x")
    assert [found.verdict for found in mended.findings if found.title == "memory"] == ["fine"]


def test_wrong_values_are_in_no_better_line() -> None:
    flags = "--max-num-seqs 0 --dtype fp16 --kv-cache-dtype fp7 --max-model-len 0 -tp 0 --gpu-memory-utilization 1.5"
    whole = explained(f"vllm serve {LLAMA} {flags} --port 80", "h200")
    assert {found.verdict for found in whole.answers[:-1]} == {"wrong"}
    assert whole.better["vllm"] == f"vllm serve {LLAMA} --port 80"
    assert [found.verdict for found in whole.findings] == ["fine"]


def test_a_length_that_the_engine_finds_is_kept_for_vllm_and_left_out_for_headrace() -> None:
    whole = explained("vllm serve meta-llama/Llama-3.1-70B --max-model-len auto", "mi300x")
    assert [found.verdict for found in whole.findings if found.title == "memory"] == ["fine"]
    assert whole.better["vllm"].endswith("--max-model-len auto")
    assert whole.better["headrace"] == "headrace serve meta-llama/Llama-3.1-70B"


def test_a_missing_master_switch_is_added() -> None:
    whole = explained(f"vllm serve {LLAMA}", "mi300x")
    assert whole.better["vllm"] == f"VLLM_ROCM_USE_AITER=1 vllm serve {LLAMA}"
    assert "VLLM_ROCM" not in explained(f"vllm serve {LLAMA}", "h200").better["vllm"]


def test_stray_words_and_unknown_models_are_said() -> None:
    whole = explained("vllm serve call so the runtime picks them up")
    assert [found.title for found in whole.findings] == ["words", "model"]
    assert "words that belong to no flag: so the runtime" in whole.notice


def test_a_line_without_faults_has_a_notice_too() -> None:
    assert explained(f"vllm serve {LLAMA}").notice == "headrace: note: every setting of this line has an effect"


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN=hidden VLLM_API_KEY=hidden vllm serve m --api-key hidden --hf-token hidden",
        "OPENAI_API_KEY=hidden VLLM_NEW_TOKEN=hidden vllm serve m --api-key=hidden --my-password hidden",
        "docker run -e HF_TOKEN=hidden myimage:1 --model m",
        "docker run -eHF_TOKEN=hidden -vX vllm/vllm-openai --model m",
        "docker run --env=MY_SECRET=hidden -e 'API_KEY=hidden' --secret hidden vllm/vllm-openai m",
        "vllm bench serve --model m --api-key hidden --header Authorization=hidden",
        "vllm serve m SOME_TOKEN=hidden",
        "vllm serve --model HF_TOKEN=hidden m --middleware -eMY_KEY=hidden --served-model-name a HF_TOKEN=hidden",
        "vllm serve m --env HF_TOKEN=hidden --made-up 'API_KEY=hidden x'",
        "docker run --label token=hidden --made-up KEY=hidden vllm/vllm-openai m",
        "HF_TOKEN=${TOKEN:-hidden} vllm serve m --api-key $(echo hidden)",
    ],
)
def test_secrets_are_never_repeated(text: str) -> None:
    whole = explained(text)
    assert "hidden" not in str(whole.to_json())
    assert "hidden" not in str(whole.better)
    assert not any("hidden" in str(found.setting) for found in whole.answers)


def test_containers_are_answered_too() -> None:
    whole = explained("docker run --privileged --shm-size 16G -e VLLM_ROCM_USE_AITER=1 rocm/vllm vllm serve m")
    assert [str(found.setting) for found in whole.answers] == [
        "VLLM_ROCM_USE_AITER=1",
        "--privileged",
        "--shm-size 16G",
    ]
    assert whole.better["vllm"] == "VLLM_ROCM_USE_AITER=1 vllm serve m"
    (ports, volume) = explained("docker run -p $PORT:8000 -v $HOME:/m vllm/vllm-openai m").answers
    assert (ports.verdict, volume.verdict) == ("fine", "fine")


def test_lines_of_headrace_are_answered_as_such() -> None:
    found = answer("headrace serve demo --enable-dbo --max-num-seqs 8", "--enable-dbo")
    assert (found.verdict, found.better) == ("no effect", "drop")
    assert "vllm" not in explained("headrace serve demo").better


NAMES = sorted({name for scope in ("engine", "server", "bench", "quantize") for name in flags_by_name(scope)})
VALUES = ["", "0", "1", "2", "8", "1024", "131072", "1k", "0.99", "true", "False", "auto", "fp8", "gptq", "FULL",
          '{"cudagraph_mode": "FULL"}', '{"cudagraph_mode": 2}', '{"full_cuda_graph": 1}', "{}",
          "data", "0,1", "x"]  # fmt: skip
MODELS = ["m", LLAMA, QUARK, "deepseek-ai/DeepSeek-V3.2", "openai/gpt-oss-120b", "Qwen/Qwen3-30B-A3B",
          "google/gemma-3-27b-it"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["serve", "bench latency", "bench throughput", "bench serve", "quantize"]),
    st.sampled_from(MODELS),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6),
    st.dictionaries(st.sampled_from(sorted(variables_by_name())), st.sampled_from(VALUES), max_size=4),
    st.sampled_from([None, *CHIPS]),
)
def test_whatever_stands_in_a_line_is_answered_or_refused(
    program: str, model: str, flags: list[tuple[str, str]], variables: dict[str, str], gpu: str | None
) -> None:
    argv = ["--model", model, *(word for flag in flags for word in flag if word)]
    try:
        whole = explained(shell_text({"command": program, "argv": argv, "env": variables}), gpu)
    except ConfigError:
        return
    assert all(found.verdict in VERDICTS and found.here for found in whole.answers)
    for text in whole.better.values():
        parse_command(text)


def test_figures_of_remarks() -> None:
    line = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-num-seqs 256 --max-model-len 8192 --kv-cache-dtype fp8"
    whole = explained(f"{line} --max-num-batched-tokens 8192", "h200")
    said = " ".join(answer.why for answer in whole.answers)
    for figure in ("(512 MiB, not 128 GiB)", "long takes 512 MiB", "1.0 GiB -> 512 MiB", "15.0 GiB", "about 224 ms"):
        assert figure in said
