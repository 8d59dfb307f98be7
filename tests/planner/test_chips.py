"""Chips: facts with sources, names as people and drivers write them, and what tools say of a machine."""

from __future__ import annotations

import itertools
import json

import pytest

from headrace.errors import ConfigError
from headrace.planner.chips import CHIPS, GIB, find_chip, read_gpus, this_machine

GPUS = ["mi300x", "mi325x", "mi350x", "mi355x", "h100", "h200", "b200", "a100", "l40s"]


def answers(**outputs: str):  # type: ignore[no-untyped-def]
    """A machine whose tools write that; others are not installed."""
    return lambda command: outputs.get(command[0].replace("-", "_"), "")


def test_every_gpu_that_is_planned_for_is_there() -> None:
    assert list(CHIPS) == [*GPUS, "cpu"]


@pytest.mark.parametrize("name", CHIPS)
def test_facts_are_plausible_and_have_a_source(name: str) -> None:
    chip = CHIPS[name]
    assert chip.name == name
    assert chip.source.startswith("https://")
    assert chip.vendor in ("amd", "nvidia", "cpu")
    assert {"bf16", "fp16", "int8"} <= chip.flops.keys() <= {"bf16", "fp16", "fp8", "int8", "fp4"}
    rates = [chip.flops[units] for units in ("bf16", "fp8", "fp4") if units in chip.flops]
    assert all(b == pytest.approx(2 * a, rel=0.03) for a, b in itertools.pairwise(rates))
    if chip.vendor != "cpu":
        assert 40 * GIB < chip.memory_bytes < 300 * GIB
        assert 0.8e12 < chip.memory_bandwidth < 9e12
        assert 150 < chip.flops["bf16"] / chip.memory_bandwidth < 450  # operations a byte
        assert chip.network_bandwidth <= chip.link_bandwidth < chip.memory_bandwidth
        assert chip.gpus_per_node == 8
    hash(chip)


def test_rates_per_clock_are_those_of_the_compute_units() -> None:
    """Matrix rates published by AMD = units x operations a clock x the top clock."""
    assert CHIPS["mi300x"].flops["bf16"] == pytest.approx(304 * 2048 * 2.1e9, rel=1e-3)
    assert CHIPS["mi350x"].flops["bf16"] == pytest.approx(256 * 4096 * 2.2e9, rel=1e-3)
    assert CHIPS["mi355x"].flops["bf16"] == pytest.approx(256 * 4096 * 2.4e9, rel=1e-3)
    assert CHIPS["mi355x"].flops["fp4"] == pytest.approx(256 * 16384 * 2.4e9, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MI300X", "mi300x"),
        ("amd-mi300x", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("cpu", "cpu"),
    ],
)
def test_names_as_people_and_drivers_write_them(text: str, name: str) -> None:
    assert find_chip(text) is CHIPS[name]


@pytest.mark.parametrize("text", ["NVIDIA GH200 480GB", "H20", "RTX 4090", ""])
def test_an_unknown_name_is_told_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"mi300x, .*h200, .*cpu.* auto"):
        find_chip(text)


def test_memory_that_tools_count_otherwise_is_the_same_chip_a_part_of_it_is_not() -> None:
    assert find_chip("NVIDIA H200", 143_771 << 20) is CHIPS["h200"]
    part = find_chip("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40 * GIB)
    assert (part.name, part.memory_bytes) == ("h100", 40 * GIB)
    assert "40 GiB" in part.title
    assert find_chip("NVIDIA H200", 0) is CHIPS["h200"]


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB",
     "NVIDIA A100 80GB PCIe"],
)  # fmt: skip
def test_another_part_of_the_same_family_is_not_taken_for_the_one_that_is_known(name: str) -> None:
    nearest = name[7:11].lower()
    with pytest.raises(ConfigError, match=rf"other rates than the NVIDIA {nearest.upper()}.*; --gpu {nearest} plans"):
        find_chip(name, 80 * GIB)


def test_tools_that_do_not_tell_memory() -> None:
    assert read_gpus(answers(nvidia_smi="NVIDIA GB10, [N/A]\n")) == [("NVIDIA GB10", 0)]
    with pytest.raises(ConfigError, match="GB10"):  # and not a plan for the CPU
        this_machine(answers(nvidia_smi="NVIDIA GB10, [N/A]\n"))
    listed = json.dumps({"card0": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "N/A"}})
    assert this_machine(answers(rocm_smi=listed)) == (CHIPS["mi300x"], 1)


def test_nvidia_smi() -> None:
    run = answers(nvidia_smi="NVIDIA H200, 143771\nNVIDIA H200, 143771\n")
    assert read_gpus(run) == [("NVIDIA H200", 143_771 << 20)] * 2
    assert this_machine(run) == (CHIPS["h200"], 2)


@pytest.mark.parametrize("key", ["Card Series", "Card series"])
def test_rocm_smi(key: str) -> None:
    card = {key: "AMD Instinct MI300X OAM", "Card Model": "0x74a1", "VRAM Total Memory (B)": "206141652992"}
    listed = "WARNING: something\n" + json.dumps({f"card{i}": card for i in range(8)} | {"system": {"Driver": "6.10"}})
    assert this_machine(answers(rocm_smi=listed)) == (CHIPS["mi300x"], 8)


@pytest.mark.parametrize("listed", ["", "no JSON", "{broken", '{"card0": {}}'])
def test_a_machine_without_gpus_is_its_cpu(listed: str) -> None:
    chip, count = this_machine(answers(rocm_smi=listed))
    assert (chip.name, count) == ("cpu", 1)
    assert 0 < chip.memory_bytes != CHIPS["cpu"].memory_bytes


def test_gpus_of_several_kinds_are_not_guessed_about() -> None:
    with pytest.raises(ConfigError, match=r"several kinds.*H200.*L40S"):
        this_machine(answers(nvidia_smi="NVIDIA H200, 143771\nNVIDIA L40S, 46068\n"))


def test_a_gpu_that_is_not_listed_is_named() -> None:
    with pytest.raises(ConfigError, match="RTX 4090"):
        this_machine(answers(nvidia_smi="NVIDIA GeForce RTX 4090, 24564\n"))


def test_tools_that_are_missing_or_fail_are_no_gpus() -> None:
    from headrace.planner.chips import run_tool

    assert run_tool(["no-such-tool-here"]) == ""
    assert run_tool(["false"]) == ""
