"""Memory and its holders, persistence, power, heat, faults, modes, partitions."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from tests.advice.doctor.made_up import GIB, PCI, XML_PROCESS, MadeUp

HURTS, NOTE, OK = Severity.HURTS, Severity.NOTE, Severity.OK
BOARD = f"{PCI}/0000:05:00.0"


def test_a_gpu_that_another_server_holds(here: MadeUp) -> None:
    process = XML_PROCESS.format(pid=116860, name="/opt/llama.cpp/llama-server", mib=65710)
    here.nvidia().gpu_xml("<used>4 MiB", "<used>65720 MiB")
    here.gpu_xml("<processes>", f"<processes>{process}")
    finding = here.finding("gpu-memory")
    assert (finding.severity, finding.seen) == (HURTS, "GPU 0: 64 GiB of 140 GiB held by llama-server (pid 116860)")
    assert finding.fix == "kill 116860  # if they are not wanted"


def test_a_gpu_that_somebody_holds_who_is_not_shown(here: MadeUp) -> None:
    here.nvidia().gpu_xml("<used>4 MiB", "<used>65720 MiB")
    assert "no process that the driver names" in here.finding("gpu-memory").seen
    here.write("/.dockerenv", "")
    finding = here.finding("gpu-memory")
    assert "a process outside this container" in finding.seen
    assert finding.fix == "sudo fuser -v /dev/nvidia*  # on the host"


def test_a_little_memory_held_is_a_note(here: MadeUp) -> None:
    here.nvidia().gpu_xml("<used>4 MiB", "<used>2000 MiB")
    assert here.finding("gpu-memory").severity is NOTE


def test_memory_of_amd_gpus(here: MadeUp) -> None:
    here.amd(2, partitions=2, mode="DPX")
    assert here.finding("gpu-memory").severity is OK
    here.write(f"{BOARD}/mem_info_vram_used", str(100 * GIB))
    here.write("/sys/class/kfd/kfd/proc/77/vram_50000", str(99 * GIB))
    here.write("/proc/77/comm", "vllm")
    finding = here.finding("gpu-memory")
    # Both partitions report the board: it is named once.
    assert (finding.severity, finding.seen) == (HURTS, "GPU 0: 100 GiB of 192 GiB held by vllm (pid 77)")


def test_pids_in_a_container_are_the_hosts(here: MadeUp) -> None:
    here.amd(1).write(f"{BOARD}/mem_info_vram_used", str(100 * GIB))
    here.write("/sys/class/kfd/kfd/proc/77/vram_50000", str(99 * GIB))
    here.write("/proc/77/comm", "innocent")
    here.write("/.dockerenv", "")
    finding = here.finding("gpu-memory")
    assert finding.seen == "GPU 0: 100 GiB of 192 GiB held by pid 77"
    assert finding.fix == "kill 77  # if they are not wanted, on the host"


def test_eight_gpus_held_are_not_all_named(here: MadeUp) -> None:
    here.nvidia(8).gpu_xml("<used>4 MiB", "<used>90000 MiB", 8)
    assert here.finding("gpu-memory").seen.endswith("; and 4 more")


def test_persistence_mode(here: MadeUp) -> None:
    here.nvidia()
    assert here.finding("gpu-persistence").severity is OK
    here.gpu_xml("mode>Enabled</per", "mode>Disabled</per")
    finding = here.finding("gpu-persistence")
    assert (finding.severity, finding.seen, finding.fix) == (
        NOTE,
        "persistence mode is off on GPU 0",
        "sudo nvidia-smi -pm 1",
    )


def test_power_limits(here: MadeUp) -> None:
    here.nvidia(4).gpu_xml("<current_power_limit>700.00 W", "<current_power_limit>500.00 W", 4)
    finding = here.finding("gpu-power")
    assert (finding.severity, finding.seen) == (HURTS, "power limit of GPUs 0-3 is 500 W, by default 700 W")
    assert finding.fix == "sudo nvidia-smi -pl 700"


def test_power_limits_of_amd(here: MadeUp) -> None:
    here.amd()
    assert here.finding("gpu-power").severity is OK
    here.write(f"{BOARD}/hwmon/hwmon3/power1_cap", "550000000")
    finding = here.finding("gpu-power")
    assert (finding.seen, finding.fix) == (
        "power limit of GPU 0 is 550 W, by default 750 W",
        "sudo rocm-smi -d 0 --resetpoweroverdrive",
    )


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("hw_slowdown", "hardware slowdown"),
        ("hw_thermal_slowdown", "too hot"),
        ("sw_thermal_slowdown", "too hot"),
        ("hw_power_brake_slowdown", "power brake of the server"),
    ],
)
def test_clocks_held_down(here: MadeUp, reason: str, words: str) -> None:
    here.nvidia()
    assert here.finding("gpu-clocks").severity is OK  # idle, which is well
    here.gpu_xml(f"{reason}>Not Active", f"{reason}>Active")
    finding = here.finding("gpu-clocks")
    assert (finding.severity, finding.seen) == (HURTS, f"GPU 0 holds its clocks down: {words}")


def test_heat_of_amd(here: MadeUp) -> None:
    here.amd().write(f"{BOARD}/hwmon/hwmon3/temp2_input", "97000")
    finding = here.finding("gpu-clocks")
    assert (finding.severity, finding.seen) == (HURTS, "GPU 0 holds its clocks down: junction at 97 of 100 C")


@pytest.mark.parametrize(
    ("old", "new", "seen", "fix"),
    [
        ("row_pending>No", "row_pending>Yes", "a memory row waits to be remapped", "sudo nvidia-smi -r -i 0"),
        ("row_failure>No", "row_failure>Yes", "a memory row could not be remapped", "sudo nvidia-smi -r -i 0"),
        ("uncorrectable>0", "uncorrectable>3", "3 memory errors since the last reset", "sudo nvidia-smi -r -i 0"),
        ("action>None", "action>Reset", "the driver asks for: reset", "sudo nvidia-smi -r -i 0"),
        ("state>Completed", "state>In Progress", "NVLink fabric: in progress", "sudo systemctl restart nvidia-fabricm"),
    ],
)
def test_faults(here: MadeUp, old: str, new: str, seen: str, fix: str) -> None:
    here.nvidia()
    assert here.finding("gpu-faults").severity is OK
    here.gpu_xml(old, new)
    finding = here.finding("gpu-faults")
    assert (finding.severity, finding.seen) == (HURTS, f"GPU 0: {seen}")
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize(("mode", "severity"), [("Exclusive_Process", NOTE), ("Prohibited", HURTS)])
def test_compute_mode(here: MadeUp, mode: str, severity: Severity) -> None:
    here.nvidia()
    assert "compute-mode" not in [finding.id for finding in here.findings()]
    here.gpu_xml("compute_mode>Default", f"compute_mode>{mode}")
    finding = here.finding("compute-mode")
    assert (finding.severity, finding.seen, finding.fix) == (
        severity,
        f"GPU 0: {mode}",
        "sudo nvidia-smi -i 0 -c DEFAULT",
    )


MIG_DEVICE = "<mig_device><index>0</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>"


def test_mig(here: MadeUp) -> None:
    here.nvidia().gpu_xml("<current_mig>Disabled", "<current_mig>Enabled")
    finding = here.finding("partitions")
    assert (finding.severity, finding.seen) == (HURTS, "MIG is on without an instance on GPU 0")
    assert finding.fix == "sudo nvidia-smi -i 0 -mig 0"
    here.gpu_xml("None\n    </mig_devices>", f"{MIG_DEVICE}</mig_devices>")
    finding = here.finding("partitions")
    assert (finding.severity, finding.seen) == (NOTE, "MIG on GPU 0: instances of 20 GiB")
    here.model_bytes = 16 * GIB
    assert here.finding("partitions").severity is NOTE
    here.model_bytes = 141 * 10**9
    assert here.finding("partitions").severity is HURTS


def test_cpx(here: MadeUp) -> None:
    here.amd(1, partitions=8, mode="CPX", banks="NPS4")
    finding = here.finding("partitions")
    assert (finding.severity, finding.seen) == (NOTE, "CPX partitions: 8 devices of 24 GiB")
    assert finding.fix == "sudo rocm-smi --setcomputepartition SPX"
    here.model_bytes = 141 * 10**9
    finding = here.finding("partitions")
    assert finding.severity is HURTS
    assert finding.cost.startswith("131 GiB of weights do not fit a piece")


def test_memory_domains_under_one_partition(here: MadeUp) -> None:
    here.amd(1, banks="NPS4")
    finding = here.finding("partitions")
    assert (finding.severity, finding.fix) == (NOTE, "sudo rocm-smi --setmemorypartition NPS1")
    here.write(f"{BOARD}/current_memory_partition", "NPS1")
    assert here.finding("partitions").seen == "GPUs are whole (SPX)"
