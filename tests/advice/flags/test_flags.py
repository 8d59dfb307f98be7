"""Every name of AMD's guides is known, and is mapped, read below, or inert and refused with a reason; never ignored."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.advice.flags.table import (
    Known,
    Note,
    find_flag,
    find_variable,
    flags_by_name,
    foreign_value,
    judge,
    judge_variables,
    notice,
    variables_by_name,
)
from headrace.cli.bench.options import DatasetOptions, LatencyOptions, ServeBenchOptions, ThroughputOptions
from headrace.config import EngineConfig, ServerConfig
from headrace.environment import ENVIRONMENT_KNOBS
from headrace.errors import ConfigError

SCOPES = ("engine", "server", "bench", "offline", "quantize", "download", "docker")
ENGINE_FLAGS = """
    --enable-chunked-prefill --no-enable-chunked-prefill --async-scheduling --num-scheduler-steps --num_scheduler-steps
    --use-v2-block-manager --distributed-executor-backend --disable-log-requests --swap-space --enforce-eager --port
    --trust-remote-code --attention-backend --compilation-config --max-seq-len-to-capture --quantization
    --kv-cache-dtype --calculate-kv-scales --dtype -tp --tensor-parallel-size --pipeline-parallel-size
    --data-parallel-size
    --data-parallel-size-local --data-parallel-address --data-parallel-rank --disable-nccl-for-dp-synchronization
    --enable-expert-parallel --disable-custom-all-reduce --mm-encoder-tp-mode --speculative_config --speculative-config
    --speculative-model --num-speculative-tokens --gpu-memory-utilization --max-num-seqs --max-num-batched-tokens
    --max-model-len --block-size
""".split()
BENCH_FLAGS = """
    --batch-size --input-len --output-len --num-iters --num-iters-warmup --output-json --num-prompts --dataset
    --dataset-name --random-input-len --random-output-len --request-rate --max-concurrency --percentile-metrics
    --backend --disable-detokenize --ignore-eos
""".split()
QUANTIZE_FLAGS = """
    --model_dir --output_dir --quant_scheme --kv_cache_dtype --num_calib_data --model_export --no_weight_matrix_merge
    --multi_gpu
""".split()
VARIABLES = """
    VLLM_USE_V1 HF_HOME HF_TOKEN SAFETENSORS_FAST_GPU VLLM_MLA_DISABLE VLLM_USE_TRITON_FLASH_ATTN
    VLLM_V1_USE_PREFILL_DECODE_ATTENTION VLLM_ROCM_CUSTOM_PAGED_ATTN VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
    VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_RMSNORM
    VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FP8BMM
    VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
    VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING AITER_ONLINE_TUNE HIP_FORCE_DEV_KERNARG
    TORCH_BLAS_PREFER_HIPBLASLT PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_TUNING VLLM_USE_TRITON_AWQ
    VLLM_ALL2ALL_BACKEND VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB NCCL_MIN_NCHANNELS CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES
    RCCL_NET_GDR_LEVEL RCCL_DEBUG RCCL_DEBUG_SUBSYS VLLM_ATTENTION_BACKEND
""".split()


def rows() -> list[Known]:
    tables = [*map(flags_by_name, SCOPES), variables_by_name()]
    return list({id(known): known for table in tables for known in table.values()}.values())


@pytest.mark.parametrize(
    ("name", "scopes"),
    [
        *((name, ("engine", "server")) for name in ENGINE_FLAGS),
        *((name, ("offline", "bench")) for name in BENCH_FLAGS),
        *((name, ("quantize",)) for name in QUANTIZE_FLAGS),
    ],
)
def test_flags_of_the_guides_are_known(name: str, scopes: tuple[str, ...]) -> None:
    assert find_flag(name, scopes) is not None


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_the_guides_are_known(name: str) -> None:
    known = find_variable(name)
    assert known.why or known.becomes, name


@pytest.mark.parametrize("known", rows(), ids=lambda known: f"{known.scope} {known.name}")
def test_every_row_says_what_it_does_and_what_becomes_of_it(known: Known) -> None:
    assert known.does.endswith((".", ")")), known.does
    assert known.fate in ("inert", "ours", "library")
    assert known.hardware in ("", "amd", "nvidia")
    assert known.scope in SCOPES
    if known.fate != "ours" and not known.becomes:
        assert known.why, "a reason"
        assert not known.why.endswith("."), "reasons are parts of sentences"
    if known.becomes:
        assert find_flag(known.becomes.partition(".")[0], ("engine", "server")) is not None


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig], ids=lambda config: config.__name__)
def test_knobs_bring_their_own_rows_with_bounds_and_choices(config: type) -> None:
    for field in dataclasses.fields(config):
        known = find_flag("--" + field.name, ("engine", "server")).known
        kind, meta = known.kind, field.metadata
        assert known.fate == "ours", field.name
        assert kind.choices == tuple(map(str, meta["choices"] or ()))
        assert (kind.minimum, kind.maximum) == (meta["minimum"], meta["maximum"])


@pytest.mark.parametrize(
    "options", [LatencyOptions, ThroughputOptions, DatasetOptions, ServeBenchOptions], ids=lambda o: o.__name__
)
def test_options_of_our_benchmarks_are_known(options: type) -> None:
    for field in dataclasses.fields(options):
        for name in ("--" + field.name, *field.metadata["aliases"]):
            found = find_flag(name, ("bench", "engine"))
            assert found is not None, name
            assert found.known.fate == "ours", name


def test_variables_that_are_knobs_name_their_flag() -> None:
    for variable, field in ENVIRONMENT_KNOBS.items():
        known = find_variable(variable)
        assert (known.fate, known.becomes) == ("ours", "--" + field.replace("_", "-"))


@pytest.mark.parametrize(
    ("name", "canonical", "negated"),
    [
        ("--no-enable-chunked-prefill", "--enable-chunked-prefill", True),
        ("--disable-prefix-caching", "--enable-prefix-caching", True),
        ("--enable-log-requests", "--disable-log-requests", True),
        ("--no_async_scheduling", "--async-scheduling", True),
        ("-dp", "--data-parallel-size", False),
        ("-dpn", "--data-parallel-rank", False),
        ("--speculative_config", "--speculative-config", False),
    ],
)
def test_spellings(name: str, canonical: str, negated: bool) -> None:
    found = find_flag(name, ("engine", "server"))
    assert (found.known.name, found.negated) == (canonical, negated)


@pytest.mark.parametrize("name", ["--no-swap-space", "--swap", "--no-such-flag", "-x", "--"])
def test_what_is_unknown(name: str) -> None:
    assert find_flag(name, ("engine", "server")) is None


def test_the_longest_beginning_of_a_variable_counts() -> None:
    names = {
        "VLLM_ROCM_USE_AITER_SOMETHING": "VLLM_ROCM_USE_AITER_*",
        "VLLM_SOMETHING": "VLLM_*",
        "NCCL_IB_HCA": "NCCL_*",
        "PYTORCH_TUNABLEOP_FILENAME": "PYTORCH_TUNABLEOP_*",
        "PYTORCH_ALLOC_CONF": "PYTORCH_*",
    }
    for name, row in names.items():
        known = find_variable(name)
        assert row in known.names
    assert find_variable("HOME") is None
    assert find_variable("MY_VLLM_THING") is None


def judged(name: str, value: str) -> Note | None:
    found = find_flag(name, ("engine", "server")) if name.startswith("-") else None
    known = found.known if found is not None else find_variable(name)
    return judge(known, name, value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--nnodes", "x", "--nnodes must be a whole number, got 'x'"),
        ("--nnodes", "0", "--nnodes must be at least 1, got '0'"),
        ("--data-parallel-backend", "ray", "--data-parallel-backend must be mp, got 'ray'"),
        ("--swap-space", "much", "--swap-space must be a number, got 'much'"),
        ("--mm-encoder-tp-mode", "both", "--mm-encoder-tp-mode must be one of weights, data; got 'both'"),
        ("--distributed-executor-backend", "k8s", "must be one of mp, ray; got 'k8s'"),
        ("--speculative-config", "[1]", "--speculative-config must be a JSON object, got '[1]'"),
        ("--enable-lora-bias", "true", "--enable-lora-bias is not supported: adapters are low-rank ones"),
        ("--rope-scaling", '{"a": 1}', "--rope-scaling must be {}, got '{\"a\": 1}': --hf-overrides has fields"),
        ("--hf-token", "hf_secret", "--hf-token *** is not supported: set HF_TOKEN"),
        ("VLLM_ROCM_USE_AITER", "yes", "variable VLLM_ROCM_USE_AITER must be 1, 0, true or false, got 'yes'"),
        ("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "INT5", "must be one of NONE, FP, INT8, INT6, INT4; got 'INT5'"),
        ("VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB", "-1", "must be at least 0, got '-1'"),
        ("VLLM_USE_MODELSCOPE", "True", "VLLM_USE_MODELSCOPE must be false or 0, got 'True': models come from"),
    ],
)
def test_wrong_values_and_what_we_lack_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judged(name, value)
    assert message in str(caught.value)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--pipeline-parallel-size", "1"),
        ("--data-parallel-rank", "0"),
        ("--runner", "generate"),
        ("--hf-overrides", "{}"),
        ("--enable-lora-bias", "false"),
        ("--cpu-offload-gb", "0"),
        ("HF_HOME", "/models"),
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("HIP_FORCE_DEV_KERNARG", "1"),
    ],
)
def test_what_asks_for_nothing_or_is_read_below_is_accepted_without_a_word(name: str, value: str) -> None:
    assert judged(name, value) is None


@pytest.mark.parametrize(
    ("name", "value", "headrace", "vllm"),
    [
        ("--max-num-seqs", "0", "must be at least 1, got '0'", "must be at least 1, got '0'"),
        ("--max-model-len", "auto", "must be a whole number, got 'auto'", None),
        ("--max-model-len", "-1", "must be at least 1, got '-1'", None),
        ("--max-model-len", "x", "must be a whole number, got 'x'", "must be a whole number or auto or -1, got 'x'"),
        ("--gpu-memory-utilization", "1.5", *["must lie between 0.01 and 1, got '1.5'"] * 2),
        ("--gpu-memory-utilization", "nan", *["must lie between 0.01 and 1, got 'nan'"] * 2),
        ("--block-size", "128", "must be one of 1, 16, 32, 64; got '128'", None),
        ("--kv-cache-dtype", "fp8_inc", "must be one of auto, float16, bfloat16, float32, fp8,", None),
        ("--dtype", "BFLOAT16", "must be one of auto, half,", "must be one of auto, half,"),
        ("--quantization", "awq", None, None),
        ("--quantization", "gptq_marlin", None, None),
        ("--quantization", "bitsandbytes", "must be one of fp8,", None),
    ],
)
def test_values_are_judged_by_the_engine_that_reads_them(
    name: str, value: str, headrace: str | None, vllm: str | None
) -> None:
    found = find_flag(name, ("engine", "server"))
    for engine, wanted in (("headrace", headrace), ("vllm", vllm)):
        problem = found.known.problem(value, engine)
        assert (problem is None) == (wanted is None), problem
        assert problem is None or problem.startswith(wanted or "")


def test_notes_name_the_setting_and_the_reason() -> None:
    assert judged("--swap-space", "16") == Note("--swap-space 16", "preempted requests are recomputed, not swapped")
    note = judged("RCCL_DEBUG", "INFO")
    assert note == Note("RCCL_DEBUG=INFO", "RCCL reads NCCL_DEBUG, and not this name")


def test_the_environment_is_judged_as_a_whole() -> None:
    environ = {
        "HOME": "/root",
        "HF_TOKEN": "hf_secret",
        "VLLM_API_KEY": "secret",
        "VLLM_ROCM_USE_AITER": "1",
        "VLLM_ROCM_USE_AITER_MHA": "0",
        "VLLM_USE_V1": "",
        "VLLM_ATTENTION_BACKEND": "ROCM_AITER_FA",
        "NCCL_MIN_NCHANNELS": "112",
    }
    text = notice(judge_variables(environ))
    assert "VLLM_ROCM_USE_AITER=1, VLLM_ROCM_USE_AITER_MHA=0: AITER's kernels are not part of headrace" in text
    assert "VLLM_ATTENTION_BACKEND=ROCM_AITER_FA: a kernel of vLLM's" in text
    assert "secret" not in text
    assert "NCHANNELS" not in text
    with pytest.raises(ConfigError, match="VLLM_ROCM_FP8_PADDING must be 1, 0, true or false, got '2'"):
        judge_variables({"VLLM_ROCM_FP8_PADDING": "2"})


def test_the_notice_is_compact() -> None:
    assert notice([]) == ""
    assert notice([Note("--a 1", "why")]) == "headrace: note: no effect here: --a 1: why"
    same = [Note("--a 1", "why"), Note("B=2", "because"), Note("--c", "why"), Note("--c", "why")]
    assert notice(same).splitlines()[1:] == ["  --a 1, --c: why", "  B=2: because"]


@pytest.mark.parametrize("name", ["ROCM_AITER_FA", "rocm_aiter_unified_attn", "ROCM_ATTN", "FLASH_ATTN"])
@pytest.mark.parametrize("other", ["TRITON_ATTN", "TORCH_SDPA", "NONSENSE"])
def test_ordinary_attention_of_others_is_ours(name: str, other: str) -> None:
    """The table of backends knows its own, and refuses latent attention that a model does not have."""
    assert foreign_value("--attention-backend", name) is not None
    assert foreign_value("--attention-backend", other) is None
