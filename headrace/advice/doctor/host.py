"""Checks the host's kernel and this process's limits: memory, cores, files, and settings that make steps uneven."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, Severity, ok, unknown
from headrace.advice.doctor.gpu import GIB, gib
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.survey import Survey

INFINIBAND = "/sys/class/infiniband"
LEAST_SHM = GIB
"""NCCL keeps buffers between processes there; docker gives 64 MiB unless told."""
LEAST_FILES = 4096
"""1,024 running requests hold a connection each, and a waiting queue holds more."""
LEAST_PROCESSES = 4096
"""Threads count: torch, tokenizers and NCCL start hundreds a rank."""
RANK_MEMORY = 4 * GIB
"""Host memory of one process that has loaded torch with its GPU libraries, pinned buffers included."""
EXTRA_CORES = 2
"""The HTTP server and the engine core need one each, beside one for each rank."""
THROTTLED_SHARE = 0.05
CPU = "/sys/devices/system/cpu"
CGROUP = "/sys/fs/cgroup"


def check_numa_balancing(survey: Survey) -> Iterator[Finding]:
    """Verify that the kernel does not move the engine's memory between NUMA nodes."""
    machine = survey.machine
    nodes = [name for name in machine.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    try:
        value = machine.read("/proc/sys/kernel/numa_balancing")
    except Unreadable as error:
        if not error.missing:
            raise
        yield ok("the kernel has none")
        return
    if value == "0" or len(nodes) < 2:
        yield ok("off" if value == "0" else "on, with one NUMA node to balance")
        return
    yield survey.finding("numa-balancing", _of_a_server(survey), value=value, nodes=len(nodes))


def _of_a_server(survey: Survey) -> Severity:
    """What slows requests hurts where there are GPUs; a CPU alone serves few."""
    return Severity.HURTS if survey.checked_gpus else Severity.NOTE


def check_shared_memory(survey: Survey) -> Iterator[Finding]:
    """Check the room that NCCL has to exchange data between processes."""
    disk = survey.machine.space("/dev/shm")
    size = f"/dev/shm has {gib(disk.total)}, {gib(disk.free)} free"
    if disk.free >= LEAST_SHM:
        yield ok(size)
    else:
        yield survey.finding("shm-small" if survey.several else "shm-small-for-several", seen=size)


def check_limits(survey: Survey) -> Iterator[Finding]:
    """Check what `ulimit` shows: open files, processes, and memory that may be locked."""
    limits = _limits(survey.machine.read("/proc/self/limits"))
    (files, most_files), (processes, _), (locked, _) = (
        limits.get(f"Max {name}", (None, None)) for name in ("open files", "processes", "locked memory")
    )
    if files is not None and files < LEAST_FILES:
        text = "files-few" if most_files is None or most_files >= 65536 else "files-few-at-most"
        yield survey.finding(text, _of_a_server(survey), id="open-files", count=files)
    else:
        yield ok(_amount(files), id="open-files")
    if processes is not None and processes < LEAST_PROCESSES:
        yield survey.finding("processes-few", id="processes", count=processes)
    else:
        yield ok(_amount(processes), id="processes")
    if locked is not None and survey.machine.names(INFINIBAND):
        yield survey.finding("locked-little", id="locked-memory", size=gib(locked))
    else:
        seen = "unlimited" if locked is None else f"{gib(locked)}: only InfiniBand would need more"
        yield ok(seen, id="locked-memory")


def _limits(text: str) -> dict[str, tuple[int | None, ...]]:
    """Name -> (soft, hard); None is unlimited."""
    rows = re.findall(r"^(Max [a-z ]+?)\s{2,}(\d+|unlimited)\s+(\d+|unlimited)", text, re.MULTILINE)
    return {name: tuple(None if limit == "unlimited" else int(limit) for limit in limits) for name, *limits in rows}


def _amount(value: int | None) -> str:
    return "unlimited" if value is None else f"{value:,}"


def check_governor(survey: Survey) -> Iterator[Finding]:
    """Verify that the CPU's clocks may rise."""
    machine = survey.machine
    cores = [name for name in machine.names(CPU) if re.fullmatch(r"cpu\d+", name)]
    governors = {machine.read_or(f"{CPU}/{core}/cpufreq/scaling_governor") for core in cores} - {""}
    if not governors:
        where = ": in a virtual machine the host decides" if survey.virtual else ""
        yield unknown(f"no cpufreq in {CPU}{where}")
        return
    driver = machine.read_or(f"{CPU}/cpu0/cpufreq/scaling_driver")
    seen = f"{', '.join(sorted(governors))} ({driver or 'driver unknown'})"
    if governors == {"performance"}:
        yield ok(seen)
    else:
        slowest = "powersave" in governors and not driver.startswith(("intel_pstate", "amd-pstate"))
        yield survey.finding("governor-slowest" if slowest else "governor-slow", seen=seen)


def check_host_memory(survey: Survey) -> Iterator[Finding]:
    """Verify that the host's available memory, within the cgroup's limit, is enough for all processes of a server."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", survey.machine.read("/proc/meminfo"), re.MULTILINE)
    if match is None:
        raise Unreadable("/proc/meminfo has no MemAvailable")
    available, whose = int(match[1]) * 1024, "available"
    limit = _cgroup_memory(survey.machine)
    if limit is not None and limit < available:
        available, whose = limit, "allowed by the cgroup"
    needed, what = RANK_MEMORY * (len(survey.checked_gpus) + 1), f"{len(survey.checked_gpus)} ranks and the server"
    if not survey.checked_gpus:
        needed = RANK_MEMORY // 2 + (survey.model_bytes or 0)
        what = "The weights, on the CPU" if survey.model_bytes else "A small model, on the CPU"
    seen = f"{gib(available)} of host memory {whose}"
    if available < needed:
        fix = "docker run --memory=0 ...  # no limit" if whose != "available" else "ps aux --sort=-rss | head"
        yield survey.finding("memory-short", seen=seen, what=what, needed=gib(needed), fix=fix)
    else:
        yield ok(seen)


def check_cores(survey: Survey) -> Iterator[Finding]:
    """Check the number of cores that this process may use: its affinity, within the cgroup's quota."""
    machine = survey.machine
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", machine.read("/proc/self/status"), re.MULTILINE)
    cores: float = _count(match[1]) if match else 0
    quota, throttled = _cgroup_cpu(machine)
    seen = f"{cores:.0f} cores"
    if quota is not None and quota < cores:
        seen, cores = f"a cgroup quota of {quota:g} of {cores:.0f} cores", quota
    needed = len(survey.checked_gpus) + EXTRA_CORES
    fix = "docker run --cpus=0 ...  # no quota" if quota is not None else "taskset -pc 0-$(($(nproc --all)-1)) $$"
    if cores and survey.checked_gpus and cores < needed:
        yield survey.finding("cores-few", seen=seen, ranks=len(survey.checked_gpus), needed=needed, fix=fix)
    elif throttled > THROTTLED_SHARE:
        yield survey.finding("cores-throttled", seen=seen, share=throttled, fix=fix)
    else:
        yield ok(seen)


def _count(ranges: str) -> int:
    """`0-3,8` -> 5."""
    ends = (part.partition("-")[::2] for part in ranges.split(","))
    return sum(int(last or first) - int(first) + 1 for first, last in ends)


def _cgroup_files(machine: Machine, name: str) -> Iterator[str]:
    """A cgroup v2 file of this process's group and of each above it, as far as they can be read."""
    match = re.search(r"^0::(/.*)$", machine.read_or("/proc/self/cgroup"), re.MULTILINE)
    parts = [part for part in (match[1] if match else "/").split("/") if part]
    for depth in range(len(parts), -1, -1):
        if text := machine.read_or("/".join([CGROUP, *parts[:depth], name])):
            yield text


def _cgroup_cpu(machine: Machine) -> tuple[float | None, float]:
    """(cores by quota, share of periods in which it was used up)."""
    limits = [text.partition(" ")[::2] for text in _cgroup_files(machine, "cpu.max")]
    limits.append(
        (machine.read_or(f"{CGROUP}/cpu/cpu.cfs_quota_us"), machine.read_or(f"{CGROUP}/cpu/cpu.cfs_period_us"))
    )
    numbers = [(int(limit), int(period)) for limit, period in limits if limit.isdigit() and period.isdigit()]
    quotas = [limit / period for limit, period in numbers if period]
    if not quotas:
        return None, 0.0
    text = next(_cgroup_files(machine, "cpu.stat"), "") or machine.read_or(f"{CGROUP}/cpu/cpu.stat")
    stat = dict(re.findall(r"^(nr_\w+) (\d+)", text, re.MULTILINE))
    return min(quotas), int(stat.get("nr_throttled", 0)) / max(int(stat.get("nr_periods", 0)), 1)


def _cgroup_memory(machine: Machine) -> int | None:
    """Bytes that the cgroup still allows; what it has cached can be given back, so `current` is not counted."""
    old = machine.read_or(f"{CGROUP}/memory/memory.limit_in_bytes")
    return min((int(text) for text in (*_cgroup_files(machine, "memory.max"), old) if text.isdigit()), default=None)
