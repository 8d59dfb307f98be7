"""The flags of `headrace quantize`, Quark's by name, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.quantize import OF_QUARK, SCHEME_NAMES
from headrace.convert.schemes import SCHEMES

GUIDE = ["--model_dir", "demo", "--quant_scheme", "w_fp8_a_fp8", "--num_calib_data", "128"]
GUIDE += ["--model_export", "quark_safetensors", "--no_weight_matrix_merge", "--multi_gpu"]


def test_the_names_are_those_of_the_schemes() -> None:
    assert tuple(SCHEMES) == SCHEME_NAMES
    assert {*OF_QUARK.values()} <= {*SCHEMES}


def test_quarks_flags_do_what_they_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made"
    assert main(["quantize", *GUIDE, "--output_dir", str(output)]) == 0
    printed = capsys.readouterr()
    for said in (
        "--quant-scheme w_fp8_a_fp8 is fp8 here: activations get a scale for each token as they come.",
        "--num-calib-data 128 has no effect",
        "--model-export quark_safetensors: what is written is compressed-tensors.",
        "--multi-gpu has no effect",
    ):
        assert said in printed.err
    lines = printed.out.splitlines()
    assert lines[0].split() == ["layer", "linears", "error", "largest", "of"]
    assert [line.split()[:2] for line in lines[1:6]] == [[str(layer), "7"] for layer in range(5)]
    assert lines[7] == "kept: model.embed_tokens (no scheme rounds it)"
    assert lines[-1] == f"7.9 MB -> 4.5 MB (56.6%) in {output}"
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"
    assert config["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv_cache_dtype", "fp8"], "scales of a KV cache need calibration, which this command does not do"),
        (["--weight_matrix_merge"], "--weight-matrix-merge is not accepted"),
        (["--model_export", "onnx"], "--model-export must be compressed-tensors, got 'onnx'"),
        (["--quant_scheme", "w_int2"], "--quant-scheme must be one of fp8, fp8_channel"),
        (["--group-size", "64"], "--group-size 64 is for w4a16"),
        (["--output_dir", ""], "--output-dir is missing"),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", *GUIDE, "--output_dir", str(tmp_path / "made"), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
