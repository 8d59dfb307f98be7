"""What nvidia-smi, rocm-smi and sysfs say, turned into records; and what an odd text does: a reason, never a crash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.advice.doctor import amd, nvidia
from headrace.advice.doctor.gpu import Gpu, Holder, gib, numbers
from headrace.advice.doctor.machine import Machine, Unreadable, package_file, run_command
from tests.advice.doctor.made_up import GIB, XML_PROCESS, MadeUp, nvidia_xml, showtopo, topo, topo_matrix

MIB = 1024**2


def test_nvidia_report() -> None:
    report = nvidia.parse_report(nvidia_xml(2))
    assert (report.driver, report.cuda, len(report.gpus)) == ("580.65.06", (13, 0), 2)
    gpu = report.gpus[1]
    assert (gpu.index, gpu.name, gpu.bus_id) == (1, "NVIDIA H200", "0000:62:00.0")
    assert (gpu.memory_total, gpu.memory_used) == (143771 * MIB, 4 * MIB)
    assert (gpu.persistence, gpu.power_limit, gpu.power_default) == (True, 700.0, 700.0)
    assert (gpu.mig, gpu.slices, gpu.link_width, gpu.slowed_by, gpu.faults) == (False, (), (16, 16), (), ())


def test_nvidia_processes_that_compute_and_not_those_that_draw() -> None:
    inside = XML_PROCESS.format(pid=116860, name="/usr/bin/llama-server", mib=65710)
    drawing = XML_PROCESS.format(pid=900, name="/usr/lib/xorg/Xorg", mib=80).replace(">C<", ">G<")
    hidden = XML_PROCESS.format(pid=7, name="x", mib="N/A").replace("N/A MiB", "N/A")
    report = nvidia.parse_report(nvidia_xml(1).replace("<processes>", f"<processes>{inside}{drawing}{hidden}"))
    assert report.gpus[0].holders == (Holder(116860, "/usr/bin/llama-server", 65710 * MIB), Holder(7, "x", 0))


def test_nvidia_names_of_older_drivers() -> None:
    text = nvidia_xml(1).replace("event_reason", "throttle_reason").replace("gpu_power_readings", "power_readings")
    text = text.replace("current_power_limit", "enforced_power_limit")
    text = text.replace("hw_slowdown>Not Active", "hw_slowdown>Active")
    gpu = nvidia.parse_report(text).gpus[0]
    assert (gpu.slowed_by, gpu.power_limit) == (("hardware slowdown",), 700.0)


def test_nvidia_report_of_a_driver_that_tells_nothing() -> None:
    gpu = nvidia.parse_report("<nvidia_smi_log><gpu id='x'/></nvidia_smi_log>").gpus[0]
    assert gpu == Gpu(index=0, name="", bus_id="x")


def test_nvidia_failure_instead_of_a_report() -> None:
    with pytest.raises(Unreadable, match="nvidia-smi -q -x"):
        nvidia.parse_report("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_nvidia_links() -> None:
    links = nvidia.parse_links(topo(4))
    assert len(links) == 12
    assert set(links.values()) == {"NV18"}
    assert nvidia.parse_links(topo_matrix([["X", "SYS"], ["PHB", "X"]])) == {(0, 1): "SYS", (1, 0): "PHB"}
    # Other CPUs' rows have no affinity.
    bare = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\t0-7\t0\nGPU1\tNV18\t X \t\t1"
    assert nvidia.parse_links(bare) == {(0, 1): "NV18", (1, 0): "NV18"}
    with pytest.raises(Unreadable):
        nvidia.parse_links("Legend:")


def test_amd_gpus_from_sysfs(here: MadeUp) -> None:
    here.amd(2)
    here.write("/sys/class/kfd/kfd/proc/4321/vram_50001", f"{150 * GIB}\n")
    here.write("/sys/class/kfd/kfd/proc/4321/pasid", "32770\n")
    here.write("/proc/4321/comm", "python3\n")
    first, second = amd.read_gpus(here.machine())
    assert (first.index, first.name, first.bus_id) == (0, "AMD Instinct MI300X", "0000:05:00.0")
    assert (first.memory_total, first.compute_partition, first.memory_partition) == (192 * GIB, "SPX", "NPS1")
    assert (first.power_limit, first.link_width, first.slowed_by, first.holders) == (750.0, (16, 16), (), ())
    assert second.holders == (Holder(4321, "python3", 150 * GIB),)
    assert second.uuid == "GPU-00000000000003e9"


def test_amd_partitions_share_their_board(here: MadeUp) -> None:
    here.amd(1, partitions=8, mode="CPX", banks="NPS4")
    gpus = amd.read_gpus(here.machine())
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert {gpu.bus_id for gpu in gpus} == {"0000:05:00.0"}


def test_amd_name_of_a_chip_without_product_name(here: MadeUp) -> None:
    here.amd(2)
    here.write("/sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 4\ngfx_target_version 110501\n")
    here.write("/sys/bus/pci/devices/0000:06:00.0/product_name", "AMD Instinct MI300X OAM\n")
    first, second = amd.read_gpus(here.machine())
    assert (first.name, second.name) == ("AMD gfx1151", "AMD Instinct MI300X OAM")


def test_amd_links() -> None:
    links = amd.parse_links(showtopo(4))
    assert len(links) == 12
    assert set(links.values()) == {"XGMI"}
    assert amd.parse_links(showtopo(2, "PCIE")) == {(0, 1): "PCIE", (1, 0): "PCIE"}
    with pytest.raises(Unreadable):
        amd.parse_links("ERROR: no GPU")


def test_indices_and_sizes_as_people_write_them() -> None:
    gpus = [Gpu(index, "x") for index in range(8)]
    assert (numbers(gpus), numbers(gpus[3:4]), numbers(gpus[:2]), numbers(gpus[::3])) == (
        "GPUs 0-7",
        "GPU 3",
        "GPUs 0, 1",
        "GPUs 0, 3, 6",
    )
    assert (gib(1.5 * GIB), gib(140.3 * GIB)) == ("1.5 GiB", "140 GiB")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["no-such-tool-here"], "no no-such-tool-here in PATH"),
        ([sys.executable, "-c", "import sys; sys.exit('it broke')"], "ended with code 1: it broke"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "did not answer within 0 s"),
        (["/etc/passwd"], "passwd cannot be run: Permission denied"),
    ],
)
def test_a_command_that_fails_gives_a_reason(command: list[str], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        run_command(command, 20.0 if "sleep" not in command[-1] else 0.2)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    machine = Machine({}, root=tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "words").write_text("none\n")
    with pytest.raises(Unreadable, match="no /gone") as caught:
        machine.read("/gone")
    assert caught.value.missing
    with pytest.raises(Unreadable, match="/folder: is a directory") as caught:
        machine.read("/folder")
    assert not caught.value.missing
    assert (machine.read_or("/gone", "-"), machine.number("/words"), machine.names("/gone")) == ("-", None, [])


def test_package_metadata() -> None:
    assert "__version__" in package_file("torch", "torch/version.py")
    with pytest.raises(Unreadable, match="is not installed"):
        package_file("no-such-package-here", "version.py")
