"""The command as a whole: on scripted trials what it prints and writes, and on the demo model real engines."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.advice.tune.options import TuneOptions
from headrace.advice.tune.page import pareto, ticks
from headrace.advice.tune.record import Result, Trial
from headrace.advice.tune.session import Session
from headrace.advice.tune.trial import TrialRunner
from headrace.cli.tune import make_session
from headrace.config import EngineConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.model_config import ModelConfig
from headrace.planner.profile import find_profile, measured_here
from tests.advice.tune.fake_trials import PLAN, Clock, FakeRun
from tests.speed import PATIENCE

LOAD = TuneOptions(input_len=16, output_len=8, num_prompts=8, request_rate=20.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def session(*argv: str) -> Session:
    return make_session(["--input-len", "64", "--output-len", "32", *argv])


def run(model: str, script: dict[str, Any], *argv: str) -> FakeRun:
    fake = FakeRun(Clock(), script)
    assert session(model, "--objective", "throughput", *argv).run(fake) == 0
    return fake


BETTER = Trial({"max_num_seqs": 64}).id
BROKEN = Trial({"cudagraph_mode": "NONE"}).id
SCRIPT = {BETTER: 1100.0, BROKEN: "CUDA out of memory <script>"}


def test_a_run_leaves_a_table_a_page_and_a_profile(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model_folder, SCRIPT, "--output", str(tmp_path / "out"))
    printed = capsys.readouterr()
    assert "+10.0%" in printed.out
    assert "Best: max_num_seqs 64, +10.0% over the plan in output tok/s." in printed.out
    assert "cudagraph_mode NONE: CUDA out of memory <script>" in printed.out
    assert "1,100 tok/s" in printed.err
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "max_num_seqs 64: 1,100 tok/s" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "http" not in page.replace("http-equiv", "")
    profile = find_profile(ModelConfig.from_folder(Path(model_folder)))
    assert {name: (entry.value, entry.over) for name, entry in profile.settings.items()} == {"max_num_seqs": (64, 1024)}
    assert profile.settings["max_num_seqs"].gain == pytest.approx(1.1)


def test_json_alone_is_on_standard_output(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(model_folder, SCRIPT, "--json")
    record = json.loads(capsys.readouterr().out)
    assert record["best"] == {"max_num_seqs": 64}
    assert record["gain"] == pytest.approx(1.1)
    assert record["trials"][0]["trial"]["changes"] == {}
    assert {entry["status"] for entry in record["trials"]} == {"ok", "failed"}
    assert Path(record["folder"], "trials.jsonl").is_file()


def test_the_same_command_goes_on_and_another_load_starts_anew(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(model_folder, SCRIPT, "--budget", "60s")
    assert len(first.ran) > 1
    assert run(model_folder, SCRIPT).ran == []
    assert "trials of an earlier run are kept" in capsys.readouterr().err
    assert len(run(model_folder, SCRIPT, "--fresh").ran) == len(first.ran)
    assert run(model_folder, SCRIPT, "--num-prompts", "100").ran[0] == {}


def test_no_better_setting_empties_an_older_profile(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(model_folder, SCRIPT)
    run(model_folder, {}, "--fresh")
    assert "Nothing beats the plan by more than noise (2%)" in capsys.readouterr().out
    profile = find_profile(ModelConfig.from_folder(Path(model_folder)))
    assert profile.settings == {}


def test_what_was_pinned_is_part_of_what_was_tuned(model_folder: str) -> None:
    run(model_folder, {Trial({"cudagraph_mode": "NONE"}).id: 1500.0}, "--max-num-seqs", "64")
    model = ModelConfig.from_folder(Path(model_folder))
    assert measured_here(EngineConfig(objective="throughput"), model, "cuda") == {}
    assert [*measured_here(EngineConfig(objective="throughput", max_num_seqs=64), model, "cuda")] == ["cudagraph_mode"]


@pytest.mark.parametrize("objective", ["interactive", "throughput"])
def test_a_rounded_cache_is_in_the_profile_for_throughput_alone(
    objective: str, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = {Trial({"kv_cache_dtype": "fp8"}).id: 2000.0}
    run(model_folder, script, "--objective", objective, "--knobs", "kv_cache_dtype")
    said = " ".join(capsys.readouterr().out.split())
    assert "fp8 (lossy)" in said
    profile = find_profile(ModelConfig.from_folder(Path(model_folder)))
    assert {*profile.settings} == ({"kv_cache_dtype"} if objective == "throughput" else set())
    assert ("so no profile holds it: --kv-cache-dtype fp8 asks" in said) == (objective == "interactive")


def test_a_cache_that_rounds_nothing_may_win_unnamed(
    model_folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLAN, "kv_cache_dtype", "fp8_e4m3")
    run(model_folder, {Trial({"kv_cache_dtype": "bfloat16"}).id: 2000.0}, "--json")
    assert json.loads(capsys.readouterr().out)["best"] == {"kv_cache_dtype": "bfloat16"}


def test_what_cannot_be_measured_is_refused(model_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--knobs must be of max_num_batched_tokens.*got 'blocks'"):
        session(model_folder, "--knobs", "blocks")
    with pytest.raises(ConfigError, match="input and output together need 160 tokens"):
        session(model_folder, "--input-len", "128")
    with pytest.raises(ConfigError, match="budget must be a time"):
        session(model_folder, "--budget", "soon")
    with pytest.raises(ConfigError, match=r"cannot be used: File name too long; --output names another folder"):
        session(model_folder, "--output", "x" * 300)
    with pytest.raises(ConfigError, match=r"--output .* cannot be made"):
        run(model_folder, {}, "--output", f"{model_folder}/config.json/out")
    session(model_folder, "--knobs", "max_num_seqs", "--max-num-seqs", "4")
    assert "max_num_seqs is given by a flag, so it is not varied" in capsys.readouterr().err
    with pytest.raises(HeadraceError, match="the plan itself does not run"):
        run(model_folder, {Trial({}).id: "no"})


@pytest.mark.parametrize("spoilt", ["out/report.html", "cache/profiles"])
def test_a_file_that_cannot_be_written_is_named_and_the_same_command_tries_again(
    spoilt: str, model_folder: str, tmp_path: Path
) -> None:
    place = tmp_path / spoilt
    place.parent.mkdir()
    (place.mkdir if spoilt.startswith("out") else place.touch)()
    flags = ["--output", str(tmp_path / "out")]
    with pytest.raises(HeadraceError, match=f"^{place}.* cannot be written: "):
        run(model_folder, SCRIPT, *flags)
    (place.rmdir if spoilt.startswith("out") else place.unlink)()
    assert run(model_folder, SCRIPT, *flags).ran == []
    assert (tmp_path / "out" / "report.html").is_file()
    assert find_profile(ModelConfig.from_folder(Path(model_folder))) is not None


def test_a_model_folder_with_a_long_name_has_room_for_its_results(model_folder: str) -> None:
    long = Path(model_folder).with_name("m" * 250)
    Path(model_folder).rename(long)
    run(str(long), SCRIPT)


def test_a_disk_without_room_for_a_trial_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(**options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", fill_up)
    result = TrialRunner(EngineConfig(model="demo"), LOAD, 512, 1, lambda stage: None)(Trial({}), 1.0)
    assert (result.status, result.ok) == ("failed", False)
    assert "No space left on device" in result.why


def test_the_front() -> None:
    points = [(10.0, 100.0), (20.0, 200.0), (20.0, 150.0), (30.0, 200.0), (5.0, 10.0)]
    assert pareto(points) == [True, True, False, False, True]
    assert ticks(0.0, 1.05) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(77.0, 530.0) == [100, 200, 300, 400, 500]
    assert 3 <= len(ticks(19_100.0, 23_840.0)) <= 8


def test_real_engines_are_measured_and_real_failures_are_results() -> None:
    stages: list[str] = []
    runner = TrialRunner(EngineConfig(model="demo"), LOAD, 512, 1, stages.append)
    result: Result = runner(Trial({"max_num_seqs": 4}), PATIENCE)
    assert result.ok, result.why
    assert result.settings["max_num_seqs"] == 4
    assert result.settings["device"] == "cpu"
    assert result.at_once.tok_s > 0
    assert 0 < result.latencies.itl_p50 <= result.latencies.itl_p99
    assert stages == ["starting", "warm-up", "at once", "20 requests/s"]
    failed = runner(Trial({"attention_backend": "TRITON_ATTN"}), PATIENCE)
    assert failed.status == "failed"
    assert "TRITON_ATTN cannot serve this model here: runs on GPUs" in failed.why
    slow = runner(Trial({}), 0.3)
    assert slow.status == "timeout"
