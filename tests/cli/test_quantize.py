"""The flags of `headrace quantize`, Quark's by name, and what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.quantize import OF_QUARK, SCHEME_NAMES
from headrace.convert import texts
from headrace.convert.schemes import SCHEMES
from headrace.hub import DEMO_FOLDER

GUIDE = ["--model_dir", "demo", "--quant_scheme", "w_fp8_a_fp8", "--num_calib_data", "128"]
GUIDE += ["--model_export", "quark_safetensors", "--no_weight_matrix_merge", "--multi_gpu"]


def test_the_names_are_those_of_the_schemes() -> None:
    assert tuple(SCHEMES) == SCHEME_NAMES
    assert {*OF_QUARK.values()} <= {*SCHEMES}


def test_quarks_flags_do_what_they_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made"
    assert main(["quantize", *GUIDE, "--output_dir", str(output), "--num-eval-data", "1", "--seq-len", "64"]) == 0
    printed = capsys.readouterr()
    for said in (
        "--quant-scheme w_fp8_a_fp8 is fp8 here: activations get a scale for each token as they come.",
        "--multi-gpu: one device holds one layer at a time",
    ):
        assert said in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split() == ["layer", "linears", "error", "largest", "of", "hidden", "states"]
    assert [line.split()[:2] for line in lines[1:6]] == [[str(layer), "7"] for layer in range(5)]
    assert max(line.count("█") for line in lines[1:6]) == 24
    assert re.fullmatch(r"perplexity of held-out text: [\d.]+ -> [\d.]+ \([+-][\d.]+%\)", lines[8])
    assert lines[9] == "kept: model.embed_tokens (no scheme rounds it)"
    assert lines[-1] == f"7.9 MB -> 4.5 MB (56.6%) in {output}"
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "quark"
    assert config["global_quant_config"]["weight"]["qscheme"] == "per_tensor"
    assert config["exclude"] == ["lm_head"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv_cache_dtype", "int8"], "--kv-cache-dtype must be one of auto, fp8, fp8_e4m3; got 'int8'"),
        (["--kv_cache_dtype", "fp8", "--num_calib_data", "0"], "fp8 needs calibration text: --num-calib-data must be"),
        (["--calib-data", "none.txt"], "--calib-data none.txt cannot be read"),
        (["--calib-data", texts.__file__.replace("texts", "__init__")], "has too little text for --seq-len 512"),
        (["--calib-data", str(DEMO_FOLDER / "config.json")], "line 1 of --calib-data"),
        (["--weight_matrix_merge"], "unknown flag --weight-matrix-merge"),
        (["--exclude_layers", "*.self_attn.*"], "--exclude-layers must be lm_head, got '*.self_attn.*'"),
        (
            ["--model_export", "onnx"],
            "--model-export must be one of compressed-tensors, quark_safetensors, hf_format; got",
        ),
        (["--quant_scheme", "w_int2"], "--quant-scheme must be one of fp8, fp8_channel"),
        (["--group-size", "64"], "--group-size 64 is for w4a16"),
        (["--format", "awq"], "--format awq does not hold fp8; accepted: compressed-tensors, quark"),
        (["--output_dir", ""], "--output-dir is missing"),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", *GUIDE, "--output_dir", str(tmp_path / "made"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
