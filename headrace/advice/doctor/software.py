"""Checks the driver, torch's build against it, torch itself in a process of its own, and which devices are visible."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.advice.doctor.finding import Finding, ok, unknown
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.selection import CUDA, HIP, ROCR
from headrace.advice.doctor.survey import Survey

OLDEST_TORCH = (2, 11)
OLDEST_DRIVERS = {12: 525, 13: 580}
"""CUDA release -> NVIDIA's oldest driver that runs it, whatever its minor version."""
IMPORT_SECONDS = 90.0
SLOW_IMPORT = 20.0
PROBE = """
import json, time
started = time.perf_counter()
import torch
report = {"seconds": time.perf_counter() - started, "devices": 0, "error": "", "architectures": [], "needed": []}
try:
    if torch.version.cuda or torch.version.hip:
        report["devices"] = torch.cuda.device_count()
        torch.cuda.init()
        report["architectures"] = torch.cuda.get_arch_list()
        for index in range(report["devices"]):
            facts = torch.cuda.get_device_properties(index)
            report["needed"].append(getattr(facts, "gcnArchName", "") or f"sm_{facts.major}{facts.minor}")
except Exception as error:
    report["error"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
print(json.dumps(report))
"""
"""Run by the interpreter that would run the engine; prints one line of JSON."""


def check_driver(survey: Survey) -> Iterator[Finding]:
    if survey.gpus:
        names = ", ".join(dict.fromkeys(gpu.name for gpu in survey.gpus))
        yield ok(f"{survey.vendor.upper()} driver {survey.driver} drives {len(survey.gpus)} x {names}")
        return
    if not survey.without_driver and survey.gpu_tool:
        yield survey.finding("driver-lists-none", problem=survey.gpu_problem or "nvidia-smi lists no GPU")
        return
    if not survey.without_driver:
        yield ok("no GPU on the PCI bus: headrace runs on the CPU")
        return
    vendor, driver = survey.without_driver[0]
    several = "s" if len(survey.without_driver) > 1 else ""
    count = f"{len(survey.without_driver)} {vendor.upper()} GPU{several} on the PCI bus"
    runs = driver == "nvidia" if vendor == "nvidia" else driver == "amdgpu" or (survey.container and not driver)
    problem = survey.gpu_problem or "nvidia-smi lists none"
    driven = f"driven by {driver}" if driver else "without a driver"
    text = f"driver-{'silent' if runs else 'missing'}-{vendor}"
    yield survey.finding(text, gpus=count, problem=problem, driver=driven)


def check_device_files(survey: Survey) -> Iterator[Finding]:
    """Verify that AMD's GPUs may be opened: without its groups a process sees them in sysfs alone."""
    if survey.vendor != "amd":
        return
    machine = survey.machine
    closed = [name for name in ("/dev/kfd",) if not machine.may_write(machine.path(name))]
    nodes = [f"/dev/dri/{name}" for name in machine.names("/dev/dri") if name.startswith("renderD")]
    closed += [name for name in nodes if not machine.may_write(machine.path(name))]
    if not closed and nodes:
        yield ok("/dev/kfd and the render nodes may be opened")
        return
    seen = f"{', '.join(closed[:3])} may not be opened" if closed else "there is no render node in /dev/dri"
    yield survey.finding("device-files-closed", seen=seen)


def check_torch_build(survey: Survey) -> Iterator[Finding]:
    torch = survey.torch
    if torch is None:
        yield survey.finding("torch-absent", problem=survey.torch_problem)
        return
    seen = f"torch {torch.version} ({torch.kind})"
    release = re.match(r"(\d+)\.(\d+)", torch.version)
    if release and (int(release[1]), int(release[2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield survey.finding("torch-old", torch=seen, needed=needed)
    elif survey.vendor and not (torch.cuda if survey.vendor == "nvidia" else torch.hip):
        index = _cuda_index(survey.cuda)
        yield survey.finding("torch-for-others", torch=seen, vendor=survey.vendor.upper(), index=index)
    elif survey.vendor == "nvidia" and survey.cuda and int(torch.cuda.split(".")[0]) > survey.cuda[0]:
        oldest = OLDEST_DRIVERS.get(int(torch.cuda.split(".")[0]))
        cuda, below = "{}.{}".format(*survey.cuda), f" below driver {oldest}" if oldest else ""
        index = _cuda_index(survey.cuda)
        yield survey.finding(
            "torch-newer-than-driver", torch=seen, driver=survey.driver, cuda=cuda, below=below, index=index
        )
    else:
        beside = {"nvidia": f" and driver {survey.driver} fit", "amd": " fits the GPUs"}.get(survey.vendor, "")
        yield ok(seen + beside)


def _cuda_index(cuda: tuple[int, int] | None) -> str:
    """The name of torch's package index for what the driver speaks."""
    return "cu126" if cuda is not None and cuda[0] < 13 else "cu130"


@dataclass(frozen=True)
class TorchReport:
    """Holds what PROBE prints."""

    seconds: float
    devices: int
    error: str
    architectures: list[str]
    """Those that this torch has kernels for."""
    needed: list[str]
    """Those of the devices."""

    def unserved(self) -> list[str]:
        """Return the architectures of devices that this torch has no kernels for."""
        return sorted({name for name in self.needed if self.architectures and not _covers(self.architectures, name)})


def check_torch_runs(survey: Survey) -> Iterator[Finding]:
    if survey.torch is None:
        return
    try:
        output = survey.machine.command(sys.executable, "-P", "-c", PROBE, seconds=IMPORT_SECONDS)
        report = TorchReport(**json.loads(output.strip().splitlines()[-1]))
    except Unreadable as error:
        yield survey.finding("torch-raises", error=error, version=survey.torch.version.split("+")[0])
        return
    except (ValueError, IndexError, TypeError):
        yield unknown("the process that imports torch printed no report")
        return
    count, wanted = report.devices, len(survey.visible)
    fits_vendor = bool(survey.torch.hip if survey.vendor == "amd" else survey.torch.cuda)
    if wanted and fits_vendor and (report.error or not count):
        text = "torch-blind-without-fabric" if "Error 802" in report.error else "torch-blind"
        yield survey.finding(text, error=report.error or "no reason given", python=sys.executable)
    elif missing := report.unserved():
        held = ", ".join(report.architectures)
        yield survey.finding(
            "torch-without-kernels", version=survey.torch.version, missing=", ".join(missing), held=held
        )
    elif wanted and fits_vendor and count != wanted:
        devices = f"{count} device{'' if count == 1 else 's'}"
        yield survey.finding("torch-counts-fewer", devices=devices, wanted=wanted)
    elif report.seconds > SLOW_IMPORT:
        yield survey.finding("torch-slow", seconds=report.seconds, prefix=sys.prefix)
    else:
        devices = f", and finds {count} GPU{'' if count == 1 else 's'}" if count else ""
        yield ok(f"torch loads in {report.seconds:.1f} s{devices}")


def _covers(architectures: list[str], needed: str) -> bool:
    """Kernels for sm_90 run on 9.x with x >= 0; compute_ ones are compiled by the driver for whatever is newer."""
    if needed.startswith("gfx"):
        return needed.split(":")[0] in {name.split(":")[0] for name in architectures}
    number = int(needed.removeprefix("sm_"))
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", name)
        if match is None:
            continue
        kind, built, exact = match[1], int(match[2]), bool(match[3])
        if built == number or (not exact and built <= number and (kind == "compute" or built // 10 == number // 10)):
            return True
    return False


def check_visible_devices(survey: Survey) -> Iterator[Finding]:
    environment, selection = survey.machine.environment, survey.selection
    if not survey.gpus:
        return
    counts = {"left": len(survey.visible), "all": len(survey.gpus)}
    found = [survey.finding("devices-hidden", by=by, name=by.partition("=")[0], **counts) for by in selection.wrong]
    if survey.vendor == "amd":
        cuda, hip = environment.get(CUDA), environment.get(HIP)
        if cuda is not None and hip is not None and cuda != hip:
            found.append(survey.finding("devices-beside", cuda=cuda, hip=hip))
    else:
        foreign = {name: environment[name] for name in (HIP, ROCR) if name in environment}
        found += [survey.finding("devices-foreign", name=name, value=value) for name, value in foreign.items()]
        models = {gpu.name for gpu in survey.gpus}
        if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            found.append(survey.finding("device-order", count=len(models)))
    by = f" ({', '.join(selection.by)})" if selection.by else ""
    yield from found or [ok(f"{len(survey.visible)} of {len(survey.gpus)} GPUs visible{by}")]
