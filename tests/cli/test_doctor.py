"""`headrace doctor` as a shell sees it: table, JSON, exit code, mistakes, and how little its help loads."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headrace.advice.doctor.machine import Machine
from headrace.cli import doctor
from headrace.cli.main import main
from headrace.errors import ConfigError
from tests.advice.doctor.made_up import MadeUp


@pytest.fixture
def here(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path)


@pytest.fixture
def machine(here: MadeUp, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """The command examines the made-up machine instead of this one."""

    def made_up(environment: dict[str, str]) -> Machine:
        assert environment
        return here.machine()

    monkeypatch.setattr(doctor, "Machine", made_up)
    return here


def shown(here: MadeUp, width: int = 100) -> str:
    file = io.StringIO()
    survey = here.survey()
    doctor.show(Console(file=file, width=width, highlight=False), survey, here.findings())
    return file.getvalue()


def test_nothing_hurts(machine: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("headrace doctor: no GPU, torch 2.11.0+cpu\n")
    assert text.endswith("nothing hurts (15 ok).\n")


def test_something_hurts(machine: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    machine.nvidia(2).environment["NCCL_P2P_DISABLE"] = "1"
    assert main(["doctor"]) == 1
    assert "1 thing hurts" in capsys.readouterr().out


def test_the_table(here: MadeUp) -> None:
    here.amd(8).write("/proc/sys/kernel/numa_balancing", "1")
    here.environment["NCCL_DEBUG"] = "INFO"
    here.remove("/proc/self/limits")
    text = shown(here)
    assert text.startswith("headrace doctor: 8 x AMD Instinct MI300X, torch 2.11.0+rocm7.2\n")
    assert (
        "hurts    kernel.numa_balancing is 1 on 2 NUMA nodes  [numa-balancing]\n"
        "         The kernel unmaps and moves pages under the engine: launches stall, and inter-token latency\n"
        "         has spikes.\n"
        "         $ sudo sysctl -w kernel.numa_balancing=0\n"
    ) in text
    assert text.index("hurts ") < text.index("note ") < text.index("unknown ") < text.index("ok  ")
    assert "unknown  ulimits: no /proc/self/limits\n" in text
    assert "1 thing hurts (1 note, 1 unknown, " in text


@pytest.mark.parametrize("width", [60, 100])
def test_only_commands_may_be_wider_than_the_terminal(here: MadeUp, width: int) -> None:
    here.nvidia(8).environment |= {"NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "VLLM_ROCM_USE_AITER": "1"}
    for line in shown(here, width).splitlines():
        assert len(line) <= width or line.lstrip().startswith("$ "), line
        assert line == line.rstrip()


def test_gpus_that_are_hidden_are_counted(here: MadeUp) -> None:
    here.nvidia(8).environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    here.write("/.dockerenv", "")
    assert shown(here).startswith("headrace doctor: 8 x NVIDIA H200 (2 visible), torch 2.11.0+cu130, in a container\n")


def test_json(machine: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    machine.nvidia(2).environment["NCCL_P2P_DISABLE"] = "1"
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["hurts"], report["machine"]["vendor"], report["machine"]["visible"]) == (1, "nvidia", [0, 1])
    assert report["findings"][0] == {
        "id": "NCCL_P2P_DISABLE",
        "severity": "hurts",
        "seen": "NCCL_P2P_DISABLE=1",
        "cost": "GPUs talk through host memory: all-reduces take several times as long.",
        "fix": "unset NCCL_P2P_DISABLE",
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("131GiB", 131 * 1024**3), ("1.5 t", 1.5e12), ("16000000000", 16 * 10**9), (None, None)],
)
def test_model_size(text: str | None, size: int | None) -> None:
    assert doctor.DoctorOptions(model_size=text).model_bytes() == size


def test_a_model_size_that_is_none(machine: MadeUp) -> None:
    with pytest.raises(ConfigError, match="--model-size must look like 16GB, 131GiB or 16000000000, got 'large'"):
        doctor.main(["--model-size", "large"])


def test_a_model_size_reaches_the_checks(machine: MadeUp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-size", "9TB"]) == 1
    assert "8382 GiB of weights have to be there already" in capsys.readouterr().out
