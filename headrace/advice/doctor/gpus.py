"""Checks the state of the visible GPUs: memory and who holds it, power, heat, faults, modes and partitions."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, ok
from headrace.advice.doctor.gpu import GIB, Gpu, Holder, gib, numbers
from headrace.advice.doctor.survey import Survey

HELD_SHARE = 0.1
"""A server takes 90% of a GPU: what others hold beyond the remaining tenth makes its KV cache smaller."""
HELD_LITTLE = GIB
"""Contexts of idle drivers and displays stay below."""
CAPPED_SHARE = 0.95
SHOWN = 4
"""A line names this many GPUs, and counts the rest."""


def _few(parts: list[str]) -> str:
    rest = f"; and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return "; ".join(parts[:SHOWN]) + rest


def _named(holder: Holder) -> str:
    name = holder.name.rsplit("/")[-1]
    return f"{name} (pid {holder.pid})" if name else f"pid {holder.pid}"


def _indices(gpus: list[Gpu], separator: str = ",") -> str:
    return separator.join(str(gpu.index) for gpu in gpus)


def _boards(survey: Survey) -> list[Gpu]:
    """One of each board: the partitions of an AMD GPU report the memory, power and heat of all of it."""
    return list({gpu.bus_id or str(gpu.index): gpu for gpu in reversed(survey.checked_gpus)}.values())[::-1]


def check_memory(survey: Survey) -> Iterator[Finding]:
    held = [gpu for gpu in _boards(survey) if gpu.memory_used > HELD_LITTLE]
    if not survey.checked_gpus:
        return
    if not held:
        yield ok(f"{gib(min(gpu.memory_total - gpu.memory_used for gpu in survey.checked_gpus))} free on each")
        return
    parts = []
    for gpu in held:
        names = ", ".join(map(_named, gpu.holders[:SHOWN]))
        nobody = "a process outside this container" if survey.container else "no process that the driver names"
        parts.append(f"GPU {gpu.index}: {gib(gpu.memory_used)} of {gib(gpu.memory_total)} held by {names or nobody}")
    pids = sorted({str(holder.pid) for gpu in held for holder in gpu.holders}, key=int)
    if pids:
        # Pids are the host's: inside a container they may be anybody's.
        fix = f"kill {' '.join(pids)}  # if they are not wanted" + (", on the host" if survey.container else "")
    elif survey.vendor == "nvidia":
        fix = survey.on_host("sudo fuser -v /dev/nvidia*")
    else:
        fix = survey.on_host("rocm-smi --showpids")
    much = any(gpu.memory_used > HELD_SHARE * gpu.memory_total for gpu in held)
    yield survey.finding("memory-held" if much else "memory-held-little", seen=_few(parts), fix=fix)


def check_persistence(survey: Survey) -> Iterator[Finding]:
    off = [gpu for gpu in survey.checked_gpus if gpu.persistence is False]
    if off:
        yield survey.finding("persistence-off", gpus=numbers(off))
    elif any(gpu.persistence for gpu in survey.checked_gpus):
        yield ok("persistence mode is on")


def check_power(survey: Survey) -> Iterator[Finding]:
    known = [gpu for gpu in _boards(survey) if gpu.power_limit and gpu.power_default]
    capped = [gpu for gpu in known if (gpu.power_limit or 0) < CAPPED_SHARE * (gpu.power_default or 0)]
    if capped:
        low, usual = min((gpu.power_limit, gpu.power_default) for gpu in capped)
        which = "" if len(capped) == len(survey.gpus) else f" -i {_indices(capped)}"
        yield survey.finding(
            "power-capped", gpus=numbers(capped), low=low, usual=usual, first=capped[0].power_default, which=which,
            indices=_indices(capped, " "),
        )  # fmt: skip
    elif known:
        yield ok(f"power limit {known[0].power_limit:.0f} W, the default")


def check_heat(survey: Survey) -> Iterator[Finding]:
    slowed = [gpu for gpu in _boards(survey) if gpu.slowed_by]
    if slowed:
        held = [f"GPU {gpu.index} holds its clocks down: {', '.join(gpu.slowed_by)}" for gpu in slowed]
        yield survey.finding("clocks-held", seen=_few(held))
    elif survey.checked_gpus:
        yield ok("no GPU holds its clocks down")


def check_faults(survey: Survey) -> Iterator[Finding]:
    faulty = [gpu for gpu in survey.checked_gpus if gpu.faults]
    if faulty:
        fabric = all("fabric" in fault for gpu in faulty for fault in gpu.faults)
        seen = _few([f"GPU {gpu.index}: {', '.join(gpu.faults)}" for gpu in faulty])
        yield survey.finding("fabric-down" if fabric else "faults", seen=seen, indices=_indices(faulty))
    elif survey.vendor == "nvidia" and survey.checked_gpus:
        yield ok("the driver asks for no repair")


def check_compute_mode(survey: Survey) -> Iterator[Finding]:
    for mode, text in (("Prohibited", "compute-prohibited"), ("Exclusive_Process", "compute-exclusive")):
        gpus = [gpu for gpu in survey.checked_gpus if gpu.compute_mode == mode]
        if gpus:
            yield survey.finding(text, gpus=numbers(gpus), indices=_indices(gpus))


def check_partitions(survey: Survey) -> Iterator[Finding]:
    """Look for MIG, and for AMD's compute (SPX, DPX, QPX, CPX) and memory (NPS1, NPS4) partitions."""
    split = [gpu for gpu in survey.checked_gpus if gpu.mig or gpu.compute_partition not in ("", "SPX")]
    banks = [gpu for gpu in survey.checked_gpus if gpu.memory_partition not in ("", "NPS1")]
    if empty := [gpu for gpu in split if gpu.mig and not gpu.slices]:
        yield survey.finding("partition-empty", gpus=numbers(empty), indices=_indices(empty))
    elif split:
        yield _split(survey, split)
    if banks and not split:
        yield survey.finding("partition-banks", gpus=numbers(banks), banks=banks[0].memory_partition)
    modes = {gpu.compute_partition for gpu in survey.checked_gpus} - {""}
    if not split and not banks and (modes or survey.vendor == "nvidia") and survey.checked_gpus:
        yield ok("GPUs are whole" + (f" ({modes.pop()})" if modes else ""))


def _split(survey: Survey, split: list[Gpu]) -> Finding:
    """GPUs cut into smaller devices: by choice, so a note, unless the model cannot fit one."""
    first = split[0]
    if first.mig:
        sizes = sorted({size for gpu in split for size in gpu.slices})
        largest = sizes[-1]
        seen = f"MIG on {numbers(split)}: instances of {', '.join(map(gib, sizes))}"
    else:
        parts = sum(gpu.bus_id == first.bus_id for gpu in survey.gpus)
        largest = first.memory_total // max(parts, 1)
        seen = f"{first.compute_partition} partitions: {len(split)} devices of {gib(largest)}"
    weights = survey.model_bytes or 0
    text = "partition-too-small" if weights > largest else "partition-split"
    return survey.finding(text, seen=seen, indices=_indices(split), weights=gib(weights))
