"""Kernel settings, limits and cgroups."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from tests.advice.doctor.made_up import GIB, LIMITS, MEMINFO, Disk, MadeUp

HURTS, NOTE, OK, UNKNOWN = Severity.HURTS, Severity.NOTE, Severity.OK, Severity.UNKNOWN
CGROUP = "/sys/fs/cgroup"


def in_container(here: MadeUp) -> MadeUp:
    here.write("/.dockerenv", "")
    return here


def test_numa_balancing(here: MadeUp) -> None:
    here.nvidia().write("/proc/sys/kernel/numa_balancing", "1\n")
    finding = here.finding("numa-balancing")
    assert (finding.severity, finding.seen) == (HURTS, "kernel.numa_balancing is 1 on 2 NUMA nodes")
    assert finding.fix == "sudo sysctl -w kernel.numa_balancing=0"
    assert in_container(here).finding("numa-balancing").fix == f"{finding.fix}  # on the host"


def test_numa_balancing_elsewhere(here: MadeUp) -> None:
    here.write("/proc/sys/kernel/numa_balancing", "1\n")
    assert here.finding("numa-balancing").severity is NOTE  # no GPU
    here.remove("/sys/devices/system/node/node1/cpulist")
    (here.root / "sys/devices/system/node/node1").rmdir()
    assert here.finding("numa-balancing").seen == "on, with one NUMA node to balance"
    here.remove("/proc/sys/kernel/numa_balancing")
    assert here.finding("numa-balancing").seen == "the kernel has none"
    (here.root / "proc/sys/kernel/numa_balancing").mkdir()
    assert here.finding("numa-balancing").severity is UNKNOWN


@pytest.mark.parametrize(("gpus", "severity"), [(1, NOTE), (2, HURTS)])
def test_shared_memory(here: MadeUp, gpus: int, severity: Severity) -> None:
    here.nvidia(gpus).disks["/dev/shm"] = Disk(64 * 1024**2, 64 * 1024**2)
    finding = here.finding("shared-memory")
    assert (finding.severity, finding.seen) == (severity, "/dev/shm has 0.1 GiB, 0.1 GiB free")
    assert finding.fix == "sudo mount -o remount,size=16G /dev/shm"
    assert in_container(here).finding("shared-memory").fix == "docker run --ipc=host ...  # or --shm-size=16g"


def test_open_files(here: MadeUp) -> None:
    here.nvidia().write(
        "/proc/self/limits", LIMITS.replace("1048576              1048576", "1024                 1048576")
    )
    finding = here.finding("open-files")
    assert (finding.severity, finding.seen, finding.fix) == (HURTS, "1,024 open files at most", "ulimit -n 65536")
    here.write("/proc/self/limits", LIMITS.replace("1048576 ", "1024    "))
    assert "limits.conf" in here.finding("open-files").fix
    assert in_container(here).finding("open-files").fix == "docker run --ulimit nofile=65536 ..."


def test_open_files_of_a_laptop(here: MadeUp) -> None:
    here.write("/proc/self/limits", LIMITS.replace("1048576 ", "1024    "))
    assert here.finding("open-files").severity is NOTE


def test_processes(here: MadeUp) -> None:
    here.write("/proc/self/limits", LIMITS.replace("4126853 ", "1000    "))
    finding = here.finding("processes")
    assert (finding.severity, finding.seen, finding.fix) == (
        HURTS,
        "1,000 processes and threads at most",
        "ulimit -u 65536",
    )


def test_locked_memory_matters_to_infiniband(here: MadeUp) -> None:
    lines = [
        line if "locked" not in line else "Max locked memory         8388608              8388608              bytes"
        for line in LIMITS.splitlines()
    ]
    here.write("/proc/self/limits", "\n".join(lines))
    assert here.finding("locked-memory").severity is OK
    here.write("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    finding = here.finding("locked-memory")
    assert (finding.severity, finding.fix) == (HURTS, "ulimit -l unlimited")


def test_limits_that_cannot_be_read(here: MadeUp) -> None:
    here.remove("/proc/self/limits")
    assert here.finding("ulimits").severity is UNKNOWN


@pytest.mark.parametrize(
    ("governor", "driver", "severity"),
    [
        ("performance", "acpi-cpufreq", OK),
        ("powersave", "acpi-cpufreq", HURTS),
        ("powersave", "intel_pstate", NOTE),
        ("powersave", "amd-pstate-epp", NOTE),
        ("schedutil", "acpi-cpufreq", NOTE),
    ],
)
def test_cpu_governor(here: MadeUp, governor: str, driver: str, severity: Severity) -> None:
    here.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", governor)
    here.write("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", driver)
    finding = here.finding("cpu-governor")
    assert (finding.severity, finding.seen) == (severity, f"{governor} ({driver})")
    assert severity is OK or finding.fix == "sudo cpupower frequency-set -g performance"


def test_cpu_governor_of_a_virtual_machine(here: MadeUp) -> None:
    here.remove("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    here.write("/proc/cpuinfo", "flags : fpu hypervisor\n")
    finding = here.finding("cpu-governor")
    assert finding.severity is UNKNOWN
    assert "in a virtual machine the host decides" in finding.seen


def test_huge_pages(here: MadeUp) -> None:
    here.write("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    finding = here.finding("huge-pages")
    assert finding.severity is NOTE
    assert finding.fix == "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    here.remove("/sys/kernel/mm/transparent_hugepage/enabled")
    assert here.finding("huge-pages").severity is UNKNOWN


def test_swap(here: MadeUp) -> None:
    here.write("/proc/meminfo", MEMINFO.replace("SwapFree:  8388604", "SwapFree:  4194304"))
    finding = here.finding("swap")
    assert (finding.severity, finding.fix) == (NOTE, "sudo swapoff -a")
    here.write("/proc/meminfo", MEMINFO.replace("SwapFree:  8388604", "SwapFree:  4").replace("1521120140", "9521120"))
    assert here.finding("swap").severity is HURTS
    here.write("/proc/meminfo", "MemTotal: 1 kB\n")
    assert here.finding("swap").severity is UNKNOWN
    assert here.finding("host-memory").severity is UNKNOWN


def test_host_memory_in_a_container(here: MadeUp) -> None:
    here.nvidia(2).write("/proc/self/cgroup", "0::/\n")
    here.write(f"{CGROUP}/memory.max", f"{8 * GIB}\n")
    finding = here.finding("host-memory")
    assert (finding.severity, finding.seen) == (HURTS, "8.0 GiB of host memory allowed by the cgroup")
    assert finding.cost.startswith("2 ranks and the server want 12 GiB")
    here.write(f"{CGROUP}/memory.max", "max\n")
    assert here.finding("host-memory").severity is OK


def test_host_memory_of_the_first_edition_of_cgroups(here: MadeUp) -> None:
    here.nvidia(1).write(f"{CGROUP}/memory/memory.limit_in_bytes", "9223372036854771712")
    assert here.finding("host-memory").severity is OK
    here.write(f"{CGROUP}/memory/memory.limit_in_bytes", f"{4 * GIB}")
    assert here.finding("host-memory").severity is HURTS


def test_host_memory_without_a_gpu_must_hold_the_model(here: MadeUp) -> None:
    here.model_bytes = 141 * 10**9
    assert here.finding("host-memory").severity is OK
    here.model_bytes = 1600 * 10**9
    finding = here.finding("host-memory")
    assert finding.severity is HURTS
    assert finding.cost.startswith("The weights, on the CPU")


def test_cores_of_a_container(here: MadeUp) -> None:
    here.nvidia(8).write("/proc/self/cgroup", "0::/kubepods/pod1\n")
    assert here.finding("cpu-cores").seen == "128 cores"
    here.write(f"{CGROUP}/cpu.max", "max 100000\n")
    here.write(f"{CGROUP}/kubepods/cpu.max", "400000 100000\n")
    here.write(f"{CGROUP}/kubepods/pod1/cpu.max", "max 100000\n")
    finding = here.finding("cpu-cores")
    assert (finding.severity, finding.seen) == (HURTS, "a cgroup quota of 4 of 128 cores")
    assert finding.cost.startswith("8 ranks, the engine core and the server want 10")


def test_cores_by_affinity_and_by_the_first_edition_of_cgroups(here: MadeUp) -> None:
    here.nvidia(2).write("/proc/self/status", "Cpus_allowed_list:\t0-1,8\n")
    finding = here.finding("cpu-cores")
    assert (finding.severity, finding.seen) == (HURTS, "3 cores")
    assert finding.fix.startswith("taskset")
    here.write("/proc/self/status", "Cpus_allowed_list:\t0-63\n")
    here.write(f"{CGROUP}/cpu/cpu.cfs_quota_us", "150000")
    here.write(f"{CGROUP}/cpu/cpu.cfs_period_us", "100000")
    assert here.finding("cpu-cores").seen == "a cgroup quota of 1.5 of 64 cores"
    here.write(f"{CGROUP}/cpu/cpu.cfs_quota_us", "-1")
    assert here.finding("cpu-cores").severity is OK


def test_a_quota_that_is_used_up(here: MadeUp) -> None:
    here.nvidia(1).write(f"{CGROUP}/cpu.max", "1600000 100000\n")
    here.write(f"{CGROUP}/cpu.stat", "usage_usec 1000\nnr_periods 1000\nnr_throttled 250\nthrottled_usec 9\n")
    finding = here.finding("cpu-cores")
    assert finding.severity is NOTE
    assert finding.seen == "a cgroup quota of 16 of 128 cores; used up in 25% of its periods"
    here.remove("/proc/self/status")
    assert here.finding("cpu-cores").severity is UNKNOWN
