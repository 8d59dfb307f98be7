"""Checks the host's kernel and this process's limits: memory, cores, files, and settings that make steps uneven."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, hurts, note, ok, unknown
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
    seen = f"kernel.numa_balancing is {value} on {len(nodes)} NUMA nodes"
    cost = "The kernel unmaps and moves pages under the engine: launches stall, and inter-token latency has spikes."
    make = hurts if survey.checked_gpus else note
    yield make(seen, cost, survey.on_host("sudo sysctl -w kernel.numa_balancing=0"))


def check_shared_memory(survey: Survey) -> Iterator[Finding]:
    """Check the room that NCCL has to exchange data between processes."""
    disk = survey.machine.space("/dev/shm")
    size = f"/dev/shm has {gib(disk.total)}, {gib(disk.free)} free"
    fix = "sudo mount -o remount,size=16G /dev/shm"
    fix = "docker run --ipc=host ...  # or --shm-size=16g" if survey.container else fix
    if disk.free >= LEAST_SHM:
        yield ok(size)
    elif survey.several:
        cost = "NCCL's processes meet there: a server with several GPUs fails at start, or hangs."
        yield hurts(size, cost, fix)
    else:
        yield note(size, "One rank does without; several would fail.", fix)


def check_limits(survey: Survey) -> Iterator[Finding]:
    """Check what `ulimit` shows: open files, processes, and memory that may be locked."""
    limits = _limits(survey.machine.read("/proc/self/limits"))

    def fix(name: str, shell: str) -> str:
        return f"docker run --ulimit {name} ..." if survey.container else shell

    (files, most_files), (processes, _), (locked, _) = (
        limits.get(f"Max {name}", (None, None)) for name in ("open files", "processes", "locked memory")
    )
    if files is not None and files < LEAST_FILES:
        cost = "Each open stream is a file: at about as many clients new connections are refused."
        mend = "ulimit -n 65536"
        if most_files is not None and most_files < 65536:
            forever = "echo '* - nofile 65536' | sudo tee -a /etc/security/limits.conf  # then log in again"
            mend = fix("nofile=65536", forever)
        make = hurts if survey.checked_gpus else note
        yield make(f"{files:,} open files at most", cost, mend, id="open-files")
    else:
        yield ok(_amount(files), id="open-files")
    if processes is not None and processes < LEAST_PROCESSES:
        seen = f"{processes:,} processes and threads at most"
        cost = "Libraries start hundreds of threads a rank: a start dies with `can't start new thread`."
        yield hurts(seen, cost, fix("nproc=65536", "ulimit -u 65536"), id="processes")
    else:
        yield ok(_amount(processes), id="processes")
    if locked is not None and survey.machine.names(INFINIBAND):
        cost = "InfiniBand locks the buffers that it sends from: NCCL between nodes fails or falls back to TCP."
        seen = f"{gib(locked)} of memory may be locked"
        yield hurts(seen, cost, fix("memlock=-1", "ulimit -l unlimited"), id="locked-memory")
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
    fix = survey.on_host("sudo cpupower frequency-set -g performance")
    if governors == {"performance"}:
        yield ok(seen)
    elif "powersave" in governors and not driver.startswith(("intel_pstate", "amd-pstate")):
        cost = "It holds cores at their lowest clock: scheduling and kernel launches take longer than the GPU's work."
        yield hurts(seen, cost, fix)
    else:
        yield note(seen, "Clocks rise only after load has come: small batches pay in each step.", fix)


def check_huge_pages(survey: Survey) -> Iterator[Finding]:
    """Verify that large host buffers may lie in large pages."""
    match = re.search(r"\[(\w+)\]", survey.machine.read("/sys/kernel/mm/transparent_hugepage/enabled"))
    mode = match[1] if match else "unknown"
    if mode == "never":
        cost = "Large host buffers live in 4 KiB pages: weights load slower, and a CPU run computes slower."
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield note("transparent huge pages are off", cost, survey.on_host(fix))
    else:
        yield ok(f"transparent huge pages: {mode}")


def check_swap(survey: Survey) -> Iterator[Finding]:
    """Verify that nothing of the host's memory was swapped out."""
    sizes = _meminfo(survey.machine, "SwapTotal", "SwapFree", "MemAvailable")
    total, used, available = sizes["SwapTotal"], sizes["SwapTotal"] - sizes["SwapFree"], sizes["MemAvailable"]
    if used > GIB:
        make = hurts if available < 0.05 * sizes.get("MemTotal", 0) else note
        cost = "What was swapped out comes back in the middle of a request, for as long as a disk takes."
        seen = f"{gib(used)} swapped out, {gib(available)} available"
        yield make(seen, cost, survey.on_host("sudo swapoff -a"))
    else:
        yield ok(f"{gib(used)} of {gib(total)} used" if total else "none")


def _meminfo(machine: Machine, *needed: str) -> dict[str, int]:
    """Bytes by name. Raises Unreadable where one that is needed is missing."""
    pairs = re.findall(r"^(\w+):\s+(\d+) kB", machine.read("/proc/meminfo"), re.MULTILINE)
    sizes = {name: int(size) * 1024 for name, size in pairs}
    for name in needed:
        if name not in sizes:
            raise Unreadable(f"/proc/meminfo has no {name}")
    return sizes


def check_host_memory(survey: Survey) -> Iterator[Finding]:
    """Verify that the host's available memory, within the cgroup's limit, is enough for all processes of a server."""
    available, whose = _meminfo(survey.machine, "MemAvailable")["MemAvailable"], "available"
    limit = _cgroup_memory(survey.machine)
    if limit is not None and limit < available:
        available, whose = limit, "allowed by the cgroup"
    needed, what = RANK_MEMORY * (len(survey.checked_gpus) + 1), f"{len(survey.checked_gpus)} ranks and the server"
    if not survey.checked_gpus:
        needed = RANK_MEMORY // 2 + (survey.model_bytes or 0)
        what = "The weights, on the CPU" if survey.model_bytes else "A small model, on the CPU"
    seen = f"{gib(available)} of host memory {whose}"
    if available < needed:
        cost = f"{what} want {gib(needed)}: the kernel kills a process in the middle of a start."
        fix = "docker run --memory=0 ...  # no limit" if whose != "available" else "ps aux --sort=-rss | head"
        yield hurts(seen, cost, fix)
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
        ranks = len(survey.checked_gpus)
        cost = f"{ranks} ranks, the engine core and the server want {needed}: GPUs wait for the host."
        yield hurts(seen, cost, fix)
    elif throttled > THROTTLED_SHARE:
        cost = "Each time, all threads stand still for the rest of a period, up to 100 ms."
        yield note(f"{seen}; used up in {throttled:.0%} of its periods", cost, fix)
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
