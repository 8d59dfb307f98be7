"""Checks the state of the visible GPUs: memory and who holds it, power, heat, faults, modes and partitions."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.advice.doctor.finding import Finding, Severity, hurts, note, ok
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
    if any(gpu.memory_used > HELD_SHARE * gpu.memory_total for gpu in held):
        cost = "The KV cache shrinks by as much: fewer requests run at once, and a large model does not load."
        yield hurts(_few(parts), cost, fix)
    else:
        yield note(_few(parts), "It fits beside a server, which leaves a tenth of the GPU free.", fix)


def check_persistence(survey: Survey) -> Iterator[Finding]:
    off = [gpu for gpu in survey.checked_gpus if gpu.persistence is False]
    if off:
        yield note(
            f"persistence mode is off on {numbers(off)}",
            "The driver unloads with its last client: each start pays seconds, and power limits are forgotten.",
            survey.on_host("sudo nvidia-smi -pm 1"),
        )
    elif any(gpu.persistence for gpu in survey.checked_gpus):
        yield ok("persistence mode is on")


def check_power(survey: Survey) -> Iterator[Finding]:
    known = [gpu for gpu in _boards(survey) if gpu.power_limit and gpu.power_default]
    capped = [gpu for gpu in known if (gpu.power_limit or 0) < CAPPED_SHARE * (gpu.power_default or 0)]
    for gpu in capped[:1]:
        limits = {(gpu.power_limit, gpu.power_default) for gpu in capped}
        low, usual = min(limits)
        indices = [str(gpu.index) for gpu in capped]
        if survey.vendor == "nvidia":
            which = "" if len(capped) == len(survey.gpus) else f" -i {','.join(indices)}"
            fix = f"sudo nvidia-smi{which} -pl {gpu.power_default:.0f}"
        else:
            fix = f"sudo rocm-smi -d {' '.join(indices)} --resetpoweroverdrive"
        yield hurts(
            f"power limit of {numbers(capped)} is {low:.0f} W, by default {usual:.0f} W",
            "Clocks fall under load, most in prefill and large batches.",
            survey.on_host(fix),
        )
    if known and not capped:
        yield ok(f"power limit {known[0].power_limit:.0f} W, the default")


def check_heat(survey: Survey) -> Iterator[Finding]:
    slowed = [gpu for gpu in _boards(survey) if gpu.slowed_by]
    if slowed:
        tool = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE" if survey.vendor == "nvidia" else "rocm-smi --showtemp"
        yield hurts(
            _few([f"GPU {gpu.index} holds its clocks down: {', '.join(gpu.slowed_by)}" for gpu in slowed]),
            "Every step is slower, and of several ranks all wait for the slowest.",
            f"{tool}  # then mend cooling or power supply",
        )
    elif survey.checked_gpus:
        yield ok("no GPU holds its clocks down")


def check_faults(survey: Survey) -> Iterator[Finding]:
    faulty = [gpu for gpu in survey.checked_gpus if gpu.faults]
    if faulty:
        fabric = all("fabric" in fault for gpu in faulty for fault in gpu.faults)
        indices = ",".join(str(gpu.index) for gpu in faulty)
        fix = "sudo systemctl restart nvidia-fabricmanager" if fabric else f"sudo nvidia-smi -r -i {indices}"
        yield hurts(
            _few([f"GPU {gpu.index}: {', '.join(gpu.faults)}" for gpu in faulty]),
            "GPUs are not reachable until the fabric is up." if fabric else "Kernels may fail, or a start may.",
            survey.on_host(fix),
        )
    elif survey.vendor == "nvidia" and survey.checked_gpus:
        yield ok("the driver asks for no repair")


def check_compute_mode(survey: Survey) -> Iterator[Finding]:
    for mode, severity, cost in (
        ("Prohibited", Severity.HURTS, "No process may compute on it."),
        ("Exclusive_Process", Severity.NOTE, "One process a GPU: a second server beside the first cannot start."),
    ):
        gpus = [gpu for gpu in survey.checked_gpus if gpu.compute_mode == mode]
        if gpus:
            fix = f"sudo nvidia-smi -i {','.join(str(gpu.index) for gpu in gpus)} -c DEFAULT"
            yield Finding(severity, f"{numbers(gpus)}: {mode}", cost, survey.on_host(fix))


def check_partitions(survey: Survey) -> Iterator[Finding]:
    """Look for MIG, and for AMD's compute (SPX, DPX, QPX, CPX) and memory (NPS1, NPS4) partitions."""
    split = [gpu for gpu in survey.checked_gpus if gpu.mig or gpu.compute_partition not in ("", "SPX")]
    banks = [gpu for gpu in survey.checked_gpus if gpu.memory_partition not in ("", "NPS1")]
    if empty := [gpu for gpu in split if gpu.mig and not gpu.slices]:
        yield hurts(
            f"MIG is on without an instance on {numbers(empty)}",
            "CUDA finds no device there.",
            survey.on_host(f"sudo nvidia-smi -i {','.join(str(gpu.index) for gpu in empty)} -mig 0"),
        )
    elif split:
        yield _split(survey, split)
    if banks and not split:
        yield note(
            f"{numbers(banks)}: memory in {banks[0].memory_partition} under one compute partition",
            "A kernel that reads all of the memory crosses its domains.",
            survey.on_host("sudo rocm-smi --setmemorypartition NPS1"),
        )
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
        fix = f"sudo nvidia-smi -i {','.join(str(gpu.index) for gpu in split)} -mig 0"
    else:
        parts = sum(gpu.bus_id == first.bus_id for gpu in survey.gpus)
        largest = first.memory_total // max(parts, 1)
        seen = f"{first.compute_partition} partitions: {len(split)} devices of {gib(largest)}"
        fix = "sudo rocm-smi --setcomputepartition SPX"
    cost = "Each device is a piece of a GPU, for one small model each (--tensor-parallel-size 1)."
    if survey.model_bytes is not None and survey.model_bytes > largest:
        cost = (
            f"{gib(survey.model_bytes)} of weights do not fit a piece, and joining pieces is slower than a whole GPU."
        )
        return hurts(seen, cost, survey.on_host(fix))
    return note(seen, cost, survey.on_host(fix))
