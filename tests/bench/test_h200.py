"""The command itself: which parts share a process, toy runs on the CPU, and the comparison of logits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from h200 import CASES, DEFAULT_PARTS, ENGINE_PARTS, NEED_A_GPU, PARTS, grouped
from h200_parts import family_numerics, format_numerics
from h200_parts.bounds import Ceilings
from h200_parts.forced import Sequence, decode, reference_path, stepped_core
from h200_parts.models import MODELS
from h200_parts.numerics import compare
from h200_parts.offline import Bench
from h200_parts.profile import attention_kernels, attention_rows
from h200_parts.rows import SPECS
from h200_parts.run import Run
from h200_parts.settings import Settings

import headrace
from headrace.executor.uniproc import UniprocExecutor
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig
from headrace.models import filling
from headrace.models.registry import SERVED
from headrace.quantization import gpu_linear
from headrace.quantization.packed import PackedProduct
from headrace.quantization.scheme import Compute, FusedOps, LinearSpec, Weights
from headrace.runner import worker
from headrace.runner.cuda_graph import StepGraphs

SCRIPT = Path(__file__).parents[2] / "bench" / "h200.py"


def test_parts_of_one_engine_share_a_process() -> None:
    assert grouped(["idle", "serve", "moe", "bf16"]) == [["bf16", "idle"], ["moe"], ["serve"]]
    assert grouped(["serve", "start"])[0] == ["start"]
    assert {spec.part for spec in SPECS.values()} <= set(DEFAULT_PARTS)
    assert set(ENGINE_PARTS.values()) == set(MODELS)
    assert len(set(PARTS)) == len(PARTS)


def test_each_part_of_cases_is_a_function() -> None:
    for place in CASES.values():
        module, function = place.split(".")
        assert callable(getattr(import_module(f"h200_parts.{module}"), function))
    assert set(NEED_A_GPU) < set(CASES)
    assert not set(CASES) & set(DEFAULT_PARTS)


def test_the_log_lines_that_cases_look_for_are_in_the_engine() -> None:
    """On a GPU alone these cases run, so a message that was reworded would be noticed late."""
    source = "\n".join(path.read_text() for path in Path(headrace.__file__).parent.rglob("*.py"))
    script = (SCRIPT.parent / "h200_parts" / "memory.py").read_text()
    wanted = [words for line in re.findall(r"\.said\(([^)]+)\)", script) for words in re.findall(r'"([^"]+)"', line)]
    assert len(wanted) >= 4
    wanted += ["elf-check", "graphs are off"]
    assert not [words for words in wanted if words not in source]


def test_server_and_engine_get_the_same_settings(tmp_path: Path) -> None:
    settings = Settings(work=tmp_path, engine={"max_num_seqs": 7, "compilation_config": {"cudagraph_mode": "NONE"}})
    flags = settings.serve_flags(MODELS["fp8"])
    assert flags[0] == str(tmp_path / "fp8")
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["num_hidden_layers"] == 32
    assert flags[flags.index("--max-num-seqs") + 1] == "7"
    assert flags[flags.index("--quantization") + 1] == "fp8"
    assert json.loads(flags[flags.index("--compilation-config") + 1]) == {"cudagraph_mode": "NONE"}
    assert {"--no-enable-prefix-caching", "--skip-tokenizer-init"} <= set(flags)


def test_a_toy_run_writes_rows_that_merge(tmp_path: Path) -> None:
    out = tmp_path / "runs" / "toy.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--part", "throughput-bf16,bf16", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert record["parts"] == ["bf16", "throughput-bf16"]
    assert {row["name"] for row in record["rows"]} == {
        spec.name for spec in SPECS.values() if spec.part in record["parts"]
    }
    assert all(row["value"] and row["bound"] > 0 and row["valid"] for row in record["rows"])
    merged = subprocess.run(
        [sys.executable, str(SCRIPT), "--merge", str(out.parent)], capture_output=True, text=True, check=True
    ).stdout
    assert "| Llama-3.1-8B bf16, 1000 prompts 128/512 | output tok/s | 20,915 |" in merged


def test_attention_is_timed(tmp_path: Path) -> None:
    model = replace(MODELS["mistral-7b-1k"], decodes=((2, 4096),), prompts=((1, 4096),))
    run = Run(Settings(work=tmp_path, smoke=True), None, "")
    bench = Bench(run, model, Ceilings(1e12, 1e12, 1e14, 1e14))
    try:
        attention_rows(bench)
    finally:
        bench.close()
    assert [one.name.split("/")[-1] for one in run.results] == ["decode-2x4096", "prompt-1x4096"]
    assert all(one.value > 0 and one.bound for one in run.results)


def test_kernels_of_attention_are_found_by_name() -> None:
    pytest.importorskip("triton", reason="kernels need Triton")
    assert {"_decode_kernel", "_latent_kernel", "_index_scores_kernel", "_prefill_kernel"} < attention_kernels()


def test_an_unknown_part_is_named() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--part", "bf17"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unknown part bf17; parts are start, start-gpt-oss-20b, bf16" in done.stderr
    assert "graphs, memory" in done.stderr


def test_what_cases_replace_is_there() -> None:
    """Faults are injected in place of these, on a GPU alone."""
    pytest.importorskip("triton", reason="kernels need Triton")
    from headrace.attention.triton_attn import TritonAttention

    places = {
        worker: ("select_kernels",),
        gpu_linear: ("skinny_linear", "plan_all"),
        UniprocExecutor: ("initialize_cache",),
        StepGraphs: ("run",),
        TritonAttention: ("decode",),
        filling: ("DUMMY_RANGE",),
    }
    for place, names in places.items():
        assert all(hasattr(place, name) for name in names), place


def test_a_core_is_stepped_by_hand_through_its_references(tmp_path: Path) -> None:
    settings, demo, prompts = Settings(work=tmp_path, smoke=True), resolve_model_folder("demo"), [[5, 6, 7], [8] * 20]
    with reference_path(), stepped_core(settings, demo, dtype="float32", num_gpu_blocks_override=64) as core:
        free = decode(core, prompts, 3)
        forced = decode(core, prompts, 3, [[1, 2, 3], [4, 5, 6]])
    assert [one.tokens for one in forced] == [[1, 2, 3], [4, 5, 6]]
    for one, other in zip(free, forced, strict=True):
        assert one.tokens == one.logits.argmax(-1).tolist()
        torch.testing.assert_close(one.logits[0], other.logits[0])


@pytest.mark.parametrize("fault", [1.0, 1.02])
def test_a_formats_logits_are_held_to_those_of_its_widened_weights(
    fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finalize = PackedProduct.finalize

    def faulty(self: PackedProduct, spec: LinearSpec, weights: Weights, fused: FusedOps) -> Compute:
        weights["0.scales"] *= fault
        return finalize(self, spec, weights, fused)

    monkeypatch.setattr(PackedProduct, "finalize", faulty)
    monkeypatch.setattr(format_numerics, "PROMPTS", (3,))
    run = Run(Settings(work=tmp_path, smoke=True), None, "")
    format_numerics.case(run, "gptq-desc-act", format_numerics.configs(toy=True)["gptq-desc-act"])
    assert run.cases[0]["ok"] == (fault == 1.0), run.cases[0]["said"]


@pytest.mark.slow
def test_families_are_compared_where_all_tokens_go_to_all_experts() -> None:
    for name in (name for name in SERVED if hasattr(transformers, name)):
        config = family_numerics.widened(name, {})
        family_numerics.weights_jump(ModelConfig.from_dict({**config.to_dict(), "architectures": [name]}))
        with torch.device("meta"):
            getattr(transformers, name)(config)


def test_logits_are_compared_where_the_reference_is_sure() -> None:
    reference = torch.tensor([[5.0, 1.0, 0.0], [2.0, 1.9, 0.0], [0.0, 3.0, 0.0]])
    found = reference.clone()
    found[1] = torch.tensor([1.9, 2.0, 0.0])  # unsure: another best token is no fault
    tokens = [0, 0, 1]
    result = compare([Sequence(tokens, found)], [Sequence(tokens, reference)])
    assert result.largest == pytest.approx(0.1)
    assert result.error == pytest.approx(0.02**0.5 / float(reference.norm()), rel=1e-4)
    assert (result.positions, result.unlike, result.middle_error) == (3, 0, 0.0)
    assert result.covered == pytest.approx(2 / 3)
    assert result.perplexity_change > 0

    found[0, 1] = 5.1
    assert compare([Sequence(tokens, found)], [Sequence(tokens, reference)]).unlike == 0  # too unlike to cover anything
    found = reference + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0]])
    assert compare([Sequence(tokens, found)], [Sequence(tokens, reference)]).covered == pytest.approx(2 / 3)
