"""Better lines do what the line does: nothing is lost, nothing wrong kept, and what a shell fills in it still does."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from headrace.advice.explain.explain import Explanation, explain
from headrace.planner.chips import find_chip
from tests.sampled import sampled

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def explained(text: str, gpu: str | None = None) -> Explanation:
    (only,) = explain(text, find_chip(gpu) if gpu else None)
    return only


def better(text: str, gpu: str | None = None) -> str:
    return explained(text, gpu).better["vllm"]


def test_what_the_shell_fills_in_is_unknown_and_stays() -> None:
    whole = explained("vllm serve $MODEL --port ${PORT:-8000} -tp $(nvidia-smi -L | wc -l) --dtype `cat dtype`", "h200")
    assert [found.verdict for found in whole.answers] == ["unknown"] * 3
    assert whole.better["vllm"] == (
        'vllm serve "$MODEL" --port "${PORT:-8000}" -tp "$(nvidia-smi -L | wc -l)" --dtype "`cat dtype`"'
    )
    assert whole.better["headrace"] == whole.better["vllm"].replace("vllm", "headrace")


def test_words_that_may_be_flags_stay_as_they_are() -> None:
    whole = explained('vllm serve m $FLAGS "$@"')
    assert [(found.title, found.verdict) for found in whole.findings] == [("words", "unknown"), ("model", "unknown")]
    assert whole.better["vllm"] == 'vllm serve m $FLAGS "$@"'


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve {LLAMA} --disable-custom-all-reduce $FLAGS",
        "vllm serve m --mm-encoder-tp-mode data --config more.yaml",
        f"vllm serve {LLAMA} --calculate-kv-scales --kv-cache-dtype $KIND",
        f"vllm serve {LLAMA} --all2all-backend naive --config more.yaml",
        f"vllm serve {LLAMA} --data-parallel-backend ray -dp $N",
    ],
)
def test_what_depends_on_what_is_open_is_not_called_without_effect(text: str) -> None:
    assert "no effect" not in [found.verdict for found in explained(text, "h200").answers]


def test_memory_that_depends_on_what_is_open_is_not_counted() -> None:
    for flags, part in (("-tp $N", "depends on -tp, which the shell"), ("$FLAGS", "stand elsewhere")):
        (memory,) = [
            found
            for found in explained(f"vllm serve meta-llama/Llama-3.1-405B {flags}", "h100").findings
            if found.title == "memory"
        ]
        assert memory.verdict == "unknown"
        assert part in memory.text


def test_a_file_of_flags_is_no_model() -> None:
    whole = explained("vllm serve --config config.yaml", "h200")
    assert whole.case.line.model is None
    assert [(str(found.setting), found.verdict) for found in whole.answers] == [("--config config.yaml", "unknown")]
    assert whole.better == {"vllm": "vllm serve --config config.yaml"}
    assert better(f"vllm serve {LLAMA} --config c.yaml --port 1") == f"vllm serve {LLAMA} --config c.yaml --port 1"


LARGE = "vllm serve meta-llama/Llama-3.1-70B"
BETTER = [
    # A split that cannot be is replaced by one that can.
    (f"vllm serve {LLAMA} -tp 3", None, f"vllm serve {LLAMA} --tensor-parallel-size 2"),
    (f"vllm serve {LLAMA} -tp 3", "h200", f"vllm serve {LLAMA} --tensor-parallel-size 2"),
    (f"CUDA_VISIBLE_DEVICES=1 vllm serve {LLAMA} -tp 3", "h200", f"CUDA_VISIBLE_DEVICES=1 vllm serve {LLAMA}"),
    (f"CUDA_VISIBLE_DEVICES=0,1,2 vllm serve {LLAMA} -tp 4", "h200",
     f"CUDA_VISIBLE_DEVICES=0,1,2 vllm serve {LLAMA} --tensor-parallel-size 2"),
    (f"{LARGE} -tp 3", "h100", f"{LARGE} --tensor-parallel-size 2 --max-model-len 13312"),
    # Dotted keys are one object; several words of a flag stay bare; flags that add up do, of others the last counts.
    (("vllm serve m --speculative-config.method=eagle3 --speculative-config.model=X "
     "--speculative-config.num_speculative_tokens=2 -cc.cudagraph_mode FULL -cc.mode 3"), None,
     ("vllm serve m --speculative-config '{\"method\": \"eagle3\", \"model\": \"X\", \"num_speculative_tokens\": 2}' "
     "-cc '{\"cudagraph_mode\": \"FULL\", \"mode\": 3}'")),
    ("vllm serve m --served-model-name $NAMES 'a b' --port 1", None,
     "vllm serve m --served-model-name $NAMES 'a b' --port 1"),
    ("vllm serve m --middleware a.b --middleware c.d", None, "vllm serve m --middleware a.b --middleware c.d"),
    ("vllm serve m --port 1 --port 2", None, "vllm serve m --port 2"),
    # Variables that nothing is known of stay; secrets are hidden but where the shell fills them in.
    ("MODEL=m; LD_LIBRARY_PATH=/a:/b MY_TOKEN=hidden vllm serve $MODEL --port 1", None,
     "LD_LIBRARY_PATH=/a:/b MY_TOKEN=*** vllm serve m --port 1"),
    ('HF_TOKEN=$TOKEN VLLM_API_KEY=${KEY:-hidden} vllm serve m --api-key "$KEY" $(cat key)', None,
     'HF_TOKEN="$TOKEN" VLLM_API_KEY=*** vllm serve m --api-key ***'),
    # Variables taken from outside a container still are.
    ("docker run -e HF_TOKEN -eNCCL_DEBUG vllm/vllm-openai --model m", None,
     'HF_TOKEN="$HF_TOKEN" NCCL_DEBUG="$NCCL_DEBUG" vllm serve m'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "gpu", "expected"), BETTER)
def test_the_better_line(text: str, gpu: str | None, expected: str) -> None:
    assert better(text, gpu) == expected


def test_headrace_gets_a_line_of_its_own() -> None:
    text = "headrace serve m --served-model-name a b --served-model-name c"
    assert explained(text).better["headrace"] == text
    whole = explained("MODEL=m; LD_LIBRARY_PATH=/a:/b MY_TOKEN=hidden vllm serve $MODEL --port 1")
    assert whole.better["headrace"].startswith("LD_LIBRARY_PATH=/a:/b MY_TOKEN=*** headrace serve m")


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        (f"CUDA_VISIBLE_DEVICES=0,1 vllm serve {LLAMA} -tp 2 -dp 4", "h200"),
        ("CUDA_VISIBLE_DEVICES=0 vllm serve meta-llama/Llama-3.1-405B -tp 8", "h100"),
        ("vllm serve deepseek-ai/DeepSeek-V3 -tp 8", "l40s"),
    ],
)
def test_where_nothing_mends_it_there_is_no_better_line(text: str, gpu: str) -> None:
    whole = explained(text, gpu)
    assert "wrong" in [found.verdict for found in (*whole.answers, *whole.findings)]
    assert "vllm" not in whole.better


@sampled(
    ("model", "tp", "gpu"), [LLAMA, "meta-llama/Llama-3.1-405B", "deepseek-ai/DeepSeek-R1", "Qwen/Qwen3-30B-A3B"],
    [1, 3, 5, 6, 8, 12], ["mi300x", "h200", "l40s"],
)  # fmt: skip
def test_no_better_line_has_anything_wrong(model: str, tp: int, gpu: str) -> None:
    for text in explained(f"vllm serve {model} -tp {tp} --max-num-seqs 0 --block-size 7", gpu).better.values():
        again = explained(text, gpu)
        assert "wrong" not in [*(a.verdict for a in again.answers), *(f.verdict for f in again.findings)], text


SAME = [
    "vllm serve $MODEL --port ${PORT:-8000} -tp $(echo 4 | wc -c) --served-model-name $MODEL a --seed \"$(echo 3)\"",
    "vllm serve ~/m --chat-template '{{ $x }} \"y\" `z`' --download-dir \"/a $MODEL\" --x 'c d' $FLAGS \"$FLAGS\"",
    "vllm serve m --compilation-config '{\"cudagraph_mode\": \"FULL_DECODE_ONLY\"}' --seed 1 > log 2>&1",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("text", SAME)
def test_a_shell_runs_the_better_line_with_the_same_words(text: str) -> None:
    """Where there is nothing to better."""

    def run(line: str) -> str:
        line = line.replace("> log 2>&1", "")
        script = f"MODEL='org/m'; FLAGS='--x 1'; HOME=/h; vllm() {{ printf '%s\\n' \"$@\"; }}; {line}"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout

    assert run(better(text)) == run(text)
