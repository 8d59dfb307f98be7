"""Memory and its holders, persistence, power, heat, faults, modes, partitions."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from tests.advice.doctor.made_up import GIB, PCI, XML_PROCESS, Case, Changes, MadeUp

HURTS, NOTE, OK = Severity.HURTS, Severity.NOTE, Severity.OK
BOARD = f"{PCI}/0000:05:00.0"
IN_CONTAINER = {"/.dockerenv": ""}
SERVER = XML_PROCESS.format(pid=116860, name="/opt/llama.cpp/llama-server", mib=65710)
HELD = {"<used>4 MiB": "<used>65720 MiB"}
HELD_ON_AMD: Changes = {
    f"{BOARD}/mem_info_vram_used": str(100 * GIB),
    "/sys/class/kfd/kfd/proc/77/vram_50000": str(99 * GIB),
    "/proc/77/comm": "vllm",
}
MIG_DEVICE = "<mig_device><index>0</index><fb_memory_usage><total>19968 MiB</total></fb_memory_usage></mig_device>"
MIG = {"<current_mig>Disabled": "<current_mig>Enabled"}
RESET = "sudo nvidia-smi -r -i 0"
CASES: list[Case] = [
    ("gpu-memory", "nvidia", HELD | {"<processes>": f"<processes>{SERVER}"}, HURTS,
     "GPU 0: 64 GiB of 140 GiB held by llama-server (pid 116860)", "kill 116860  # if they are not wanted"),
    ("gpu-memory", "nvidia", HELD, HURTS, "…no process that the driver names"),
    ("gpu-memory", "nvidia", HELD | IN_CONTAINER, HURTS, "…a process outside this container",
     "sudo fuser -v /dev/nvidia*  # on the host"),
    ("gpu-memory", "nvidia", {"<used>4 MiB": "<used>2000 MiB"}, NOTE),
    ("gpu-memory", "nvidia 8", {"<used>4 MiB": ("<used>90000 MiB", 8)}, HURTS, "…; and 4 more"),
    ("gpu-memory", "amd 2 2 DPX", {}, OK),
    # Both partitions report the board: it is named once.
    ("gpu-memory", "amd 2 2 DPX", HELD_ON_AMD, HURTS, "GPU 0: 100 GiB of 192 GiB held by vllm (pid 77)"),
    # The driver's pids are the host's.
    ("gpu-memory", "amd 1", HELD_ON_AMD | IN_CONTAINER, HURTS, "GPU 0: 100 GiB of 192 GiB held by pid 77",
     "kill 77  # if they are not wanted, on the host"),
    ("gpu-persistence", "nvidia", {}, OK),
    ("gpu-persistence", "nvidia", {"mode>Enabled</per": "mode>Disabled</per"}, NOTE, "persistence mode is off on GPU 0",
     "sudo nvidia-smi -pm 1"),
    ("gpu-power", "nvidia 4", {"<current_power_limit>700.00 W": ("<current_power_limit>500.00 W", 4)}, HURTS,
     "power limit of GPUs 0-3 is 500 W, by default 700 W", "sudo nvidia-smi -pl 700"),
    ("gpu-power", "amd", {}, OK),
    ("gpu-power", "amd", {f"{BOARD}/hwmon/hwmon3/power1_cap": "550000000"}, HURTS,
     "power limit of GPU 0 is 550 W, by default 750 W", "sudo rocm-smi -d 0 --resetpoweroverdrive"),
    ("gpu-clocks", "nvidia", {}, OK),  # idle, which is well
    *(("gpu-clocks", "nvidia", {f"{reason}>Not Active": f"{reason}>Active"}, HURTS,
       f"GPU 0 holds its clocks down: {words}") for reason, words in (
           ("hw_slowdown", "hardware slowdown"), ("hw_thermal_slowdown", "too hot"), ("sw_thermal_slowdown", "too hot"),
           ("hw_power_brake_slowdown", "power brake of the server"))),
    ("gpu-clocks", "amd", {f"{BOARD}/hwmon/hwmon3/temp2_input": "97000"}, HURTS,
     "GPU 0 holds its clocks down: junction at 97 of 100 C"),
    ("gpu-faults", "nvidia", {}, OK),
    *(("gpu-faults", "nvidia", {old: new}, HURTS, f"GPU 0: {seen}", fix) for old, new, seen, fix in (
        ("row_pending>No", "row_pending>Yes", "a memory row waits to be remapped", RESET),
        ("row_failure>No", "row_failure>Yes", "a memory row could not be remapped", RESET),
        ("uncorrectable>0", "uncorrectable>3", "3 memory errors since the last reset", RESET),
        ("action>None", "action>Reset", "the driver asks for: reset", RESET),
        ("state>Completed", "state>In Progress", "NVLink fabric: in progress",
         "sudo systemctl restart nvidia-fabricmanager"))),
    ("compute-mode", "nvidia", {}, None),
    *(("compute-mode", "nvidia", {"compute_mode>Default": f"compute_mode>{mode}"}, severity, f"GPU 0: {mode}",
       "sudo nvidia-smi -i 0 -c DEFAULT") for mode, severity in (("Exclusive_Process", NOTE), ("Prohibited", HURTS))),
    ("partitions", "nvidia", MIG, HURTS, "MIG is on without an instance on GPU 0", "sudo nvidia-smi -i 0 -mig 0"),
    ("partitions", "amd 1 8 CPX NPS4", {}, NOTE, "CPX partitions: 8 devices of 24 GiB",
     "sudo rocm-smi --setcomputepartition SPX"),
    ("partitions", "amd 1 1 SPX NPS4", {}, NOTE, "…", "sudo rocm-smi --setmemorypartition NPS1"),
    ("partitions", "amd 1", {}, OK, "GPUs are whole (SPX)"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)


def test_a_model_that_fits_no_part_of_a_gpu(here: MadeUp) -> None:
    here.nvidia().change(MIG | {"None\n    </mig_devices>": f"{MIG_DEVICE}</mig_devices>"})
    finding = here.finding("partitions")
    assert (finding.severity, finding.seen) == (NOTE, "MIG on GPU 0: instances of 20 GiB")
    here.model_bytes = 16 * GIB
    assert here.finding("partitions").severity is NOTE
    here.model_bytes = 141 * 10**9
    assert here.finding("partitions").severity is HURTS


def test_a_model_that_fits_no_partition(here: MadeUp) -> None:
    here.model_bytes = 141 * 10**9
    here.holds(("partitions", "amd 1 8 CPX NPS4", {}, HURTS, "…", "…", "131 GiB of weights do not fit a piece…"))
