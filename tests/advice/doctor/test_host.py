"""Kernel settings, limits and cgroups."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from tests.advice.doctor.made_up import GIB, LIMITS, Case, MadeUp

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
CGROUP = "/sys/fs/cgroup"
NUMA = "/proc/sys/kernel/numa_balancing"
GOVERNOR, DRIVER = (f"/sys/devices/system/cpu/cpu0/cpufreq/scaling_{name}" for name in ("governor", "driver"))
IN_CONTAINER = {"/.dockerenv": ""}
ONE_NODE = {"/sys/devices/system/node/node1/cpulist": None}
SOFT = {"/proc/self/limits": LIMITS.replace("1048576              1048576", "1024                 1048576")}
HARD = {"/proc/self/limits": LIMITS.replace("1048576 ", "1024    ")}
LOCKED = {
    "/proc/self/limits": LIMITS.replace("Max locked memory         unlimited", "Max locked memory         8388608  ")
}
CASES: list[Case] = [
    ("numa-balancing", "nvidia", {NUMA: "1\n"}, HURTS, "kernel.numa_balancing is 1 on 2 NUMA nodes",
     "sudo sysctl -w kernel.numa_balancing=0"),
    ("numa-balancing", "nvidia", {NUMA: "1\n"} | IN_CONTAINER, HURTS, "…",
     "sudo sysctl -w kernel.numa_balancing=0  # on the host"),
    ("numa-balancing", "", {NUMA: "1\n"}, NOTE),
    ("numa-balancing", "", {NUMA: "1\n"} | ONE_NODE, OK, "on, with one NUMA node to balance"),
    ("numa-balancing", "", {NUMA: None}, OK, "the kernel has none"),
    ("numa-balancing", "", {NUMA: None, f"{NUMA}/a folder": ""}, UNKNOWN),
    *(("shared-memory", f"nvidia {gpus}", {"disk /dev/shm": 64 << 20}, severity, "/dev/shm has … GiB, 0.1 GiB free",
       "sudo mount -o remount,size=16G /dev/shm") for gpus, severity in ((1, NOTE), (2, HURTS))),
    ("shared-memory", "nvidia", {"disk /dev/shm": 64 << 20} | IN_CONTAINER, HURTS, "…",
     "docker run --ipc=host ...  # or --shm-size=16g"),
    ("open-files", "nvidia", SOFT, HURTS, "1,024 open files at most", "ulimit -n 65536"),
    ("open-files", "nvidia", HARD, HURTS, "…", "…limits.conf…"),
    ("open-files", "nvidia", HARD | IN_CONTAINER, HURTS, "…", "docker run --ulimit nofile=65536 ..."),
    ("open-files", "", HARD, NOTE),
    ("processes", "", {"/proc/self/limits": LIMITS.replace("4126853 ", "1000    ")}, HURTS,
     "1,000 processes and threads at most", "ulimit -u 65536"),
    ("locked-memory", "", LOCKED, OK),
    ("locked-memory", "", LOCKED | {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}, HURTS, "…",
     "ulimit -l unlimited"),
    ("ulimits", "", {"/proc/self/limits": None}, UNKNOWN),
    *(("cpu-governor", "", {GOVERNOR: governor, DRIVER: driver}, severity, f"{governor} ({driver})",
       "" if severity is OK else "sudo cpupower frequency-set -g performance") for governor, driver, severity in (
           ("performance", "acpi-cpufreq", OK), ("powersave", "acpi-cpufreq", HURTS),
           ("powersave", "intel_pstate", NOTE), ("powersave", "amd-pstate-epp", NOTE),
           ("schedutil", "acpi-cpufreq", NOTE))),
    ("cpu-governor", "", {GOVERNOR: None, "/proc/cpuinfo": "flags : fpu hypervisor\n"}, UNKNOWN,
     "…in a virtual machine the host decides"),
    ("host-memory", "", {"/proc/meminfo": "MemTotal: 1 kB\n"}, UNKNOWN),
    ("host-memory", "nvidia 2", {"/proc/self/cgroup": "0::/\n", f"{CGROUP}/memory.max": f"{8 * GIB}\n"}, HURTS,
     "8.0 GiB of host memory allowed by the cgroup", "…", "2 ranks and the server want 12 GiB…"),
    ("host-memory", "nvidia 2", {"/proc/self/cgroup": "0::/\n", f"{CGROUP}/memory.max": "max\n"}, OK),
    # the first edition of cgroups
    ("host-memory", "nvidia 1", {f"{CGROUP}/memory/memory.limit_in_bytes": "9223372036854771712"}, OK),
    ("host-memory", "nvidia 1", {f"{CGROUP}/memory/memory.limit_in_bytes": f"{4 * GIB}"}, HURTS),
    ("cpu-cores", "nvidia 8", {"/proc/self/cgroup": "0::/kubepods/pod1\n"}, OK, "128 cores"),
    ("cpu-cores", "nvidia 8",
     {"/proc/self/cgroup": "0::/kubepods/pod1\n", f"{CGROUP}/cpu.max": "max 100000\n",
      f"{CGROUP}/kubepods/cpu.max": "400000 100000\n", f"{CGROUP}/kubepods/pod1/cpu.max": "max 100000\n"},
     HURTS, "a cgroup quota of 4 of 128 cores", "…", "8 ranks, the engine core and the server want 10…"),
    ("cpu-cores", "nvidia 2", {"/proc/self/status": "Cpus_allowed_list:\t0-1,8\n"}, HURTS, "3 cores", "taskset…"),
    *(("cpu-cores", "nvidia 2",
       {"/proc/self/status": "Cpus_allowed_list:\t0-63\n", f"{CGROUP}/cpu/cpu.cfs_quota_us": quota,
        f"{CGROUP}/cpu/cpu.cfs_period_us": "100000"}, severity, seen)
      for quota, severity, seen in (("150000", HURTS, "a cgroup quota of 1.5 of 64 cores"), ("-1", OK, "…"))),
    ("cpu-cores", "nvidia 1",
     {f"{CGROUP}/cpu.max": "1600000 100000\n",
      f"{CGROUP}/cpu.stat": "usage_usec 1000\nnr_periods 1000\nnr_throttled 250\nthrottled_usec 9\n"},
     NOTE, "a cgroup quota of 16 of 128 cores; used up in 25% of its periods"),
    ("cpu-cores", "nvidia 1", {"/proc/self/status": None}, UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)


def test_host_memory_without_a_gpu_must_hold_the_model(here: MadeUp) -> None:
    here.model_bytes = 141 * 10**9
    assert here.finding("host-memory").severity is OK
    here.model_bytes = 1600 * 10**9
    here.holds(("host-memory", "", {}, HURTS, "…", "…", "The weights, on the CPU…"))
