"""Checks the driver, torch's build against it, torch itself in a process of its own, and which devices are visible."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.advice.doctor.finding import Finding, hurts, note, ok, unknown
from headrace.advice.doctor.gpu import numbers
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.selection import CUDA, HIP, ROCR
from headrace.advice.doctor.survey import Survey

OLDEST_TORCH = (2, 11)
OLDEST_DRIVERS = {12: 525, 13: 580}
"""CUDA release -> NVIDIA's oldest driver that runs it, whatever its minor version."""
INDEX = "https://download.pytorch.org/whl"
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
        problem = survey.gpu_problem or "nvidia-smi lists no GPU"
        fix = survey.on_host("sudo dmesg | grep -iE 'nvrm|xid' | tail")
        yield hurts(f"NVIDIA's driver is installed, but {problem}", "No GPU can be used.", fix)
        return
    if not survey.without_driver:
        yield ok("no GPU on the PCI bus: headrace runs on the CPU")
        return
    vendor, driver = survey.without_driver[0]
    cost = "No GPU can be used; headrace falls back to the CPU."
    several = "s" if len(survey.without_driver) > 1 else ""
    count = f"{len(survey.without_driver)} {vendor.upper()} GPU{several} on the PCI bus"
    if vendor == "nvidia" and driver == "nvidia":
        reason = survey.gpu_problem or "nvidia-smi lists none"
        fix = "docker run --gpus all ..." if survey.container else "sudo nvidia-smi"
        yield hurts(f"{count}, but {reason}", cost, fix)
    elif vendor == "nvidia":
        seen = f"{count}, driven by {driver}" if driver else f"{count}, without a driver"
        yield hurts(seen, cost, survey.on_host("sudo apt install nvidia-driver-580-server-open && sudo reboot"))
    elif driver == "amdgpu" or (survey.container and not driver):
        fix = "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add render ..."
        yield hurts(f"{count}, but ROCm's driver shows none", cost, fix)
    else:
        yield hurts(f"{count}, without the amdgpu driver", cost, survey.on_host("sudo modprobe amdgpu"))


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
    fix = "docker run --device=/dev/kfd --device=/dev/dri --group-add video --group-add render ..."
    if not survey.container:
        fix = "sudo usermod -aG render,video $USER  # then log in again"
    seen = f"{', '.join(closed[:3])} may not be opened" if closed else "there is no render node in /dev/dri"
    yield hurts(seen, "HIP finds no device.", fix)


def check_torch_build(survey: Survey) -> Iterator[Finding]:
    torch = survey.torch
    if torch is None:
        yield hurts(survey.torch_problem, "headrace cannot start.", "pip install 'torch>=2.11'")
        return
    seen = f"torch {torch.version} ({torch.kind})"
    release = re.match(r"(\d+)\.(\d+)", torch.version)
    if release and (int(release[1]), int(release[2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield hurts(seen, f"headrace needs torch {needed} or newer.", f"pip install 'torch>={needed}'")
    elif survey.vendor == "nvidia" and not torch.cuda:
        fix = f"pip install --force-reinstall torch --index-url {INDEX}/{_cuda_index(survey.cuda)}"
        yield hurts(f"{seen} beside an NVIDIA GPU", "torch cannot use the GPU.", fix)
    elif survey.vendor == "amd" and not torch.hip:
        fix = f"pip install --force-reinstall torch --index-url {INDEX}/rocm7.2"
        yield hurts(f"{seen} beside an AMD GPU", "torch cannot use the GPU.", fix)
    elif survey.vendor == "nvidia" and survey.cuda and int(torch.cuda.split(".")[0]) > survey.cuda[0]:
        oldest = OLDEST_DRIVERS.get(int(torch.cuda.split(".")[0]))
        driver = f"driver {survey.driver} knows CUDA up to {survey.cuda[0]}.{survey.cuda[1]}"
        yield hurts(
            f"{seen}, but {driver}",
            "torch cannot use the GPU" + (f" below driver {oldest}." if oldest else "."),
            f"pip install --force-reinstall torch --index-url {INDEX}/{_cuda_index(survey.cuda)}",
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
        fix = f"pip install --force-reinstall torch=={survey.torch.version.split('+')[0]}"
        yield hurts(f"import torch: {error}", "headrace cannot start.", fix)
        return
    except (ValueError, IndexError, TypeError):
        yield unknown("the process that imports torch printed no report")
        return
    count, wanted = report.devices, len(survey.visible)
    fits_vendor = bool(survey.torch.hip if survey.vendor == "amd" else survey.torch.cuda)
    if wanted and fits_vendor and (report.error or not count):
        seen = f"torch finds no GPU: {report.error or 'no reason given'}"
        fix = f"{sys.executable} -c 'import torch; torch.cuda.init()'  # shows more"
        if "Error 802" in report.error:
            fix = survey.on_host("sudo systemctl restart nvidia-fabricmanager")
        yield hurts(seen, "headrace falls back to the CPU.", fix)
    elif missing := report.unserved():
        held = ", ".join(report.architectures)
        seen = f"torch {survey.torch.version} has no kernels for {', '.join(missing)}, only for {held}"
        fix = f"pip install --upgrade torch --index-url {INDEX}/" + ("rocm7.2" if survey.vendor == "amd" else "cu130")
        yield hurts(seen, "Every torch operation on that GPU fails.", fix)
    elif wanted and fits_vendor and count != wanted:
        seen = f"torch counts {count} device{'' if count == 1 else 's'} where {wanted} should be visible"
        yield note(seen, "Some GPUs stay unused.", "env | grep VISIBLE_DEVICES")
    elif report.seconds > SLOW_IMPORT:
        seen = f"import torch takes {report.seconds:.0f} s"
        cost = f"Every process of a start pays it; {sys.prefix} may lie on a network disk."
        yield note(seen, cost, f"df -hT {sys.prefix}")
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
    mistaken = False
    if not survey.gpus:
        return
    for problem in selection.problems:
        mistaken = True
        cost = "No GPU is left to run on." if not survey.visible else "Some GPUs stay unused."
        yield hurts(problem.seen, cost, problem.fix)
    if survey.vendor == "amd":
        cuda, hip = environment.get(CUDA), environment.get(HIP)
        if cuda is not None and hip is not None and cuda != hip:
            mistaken = True
            cost = "HIP takes the one, some libraries the other: ranks land on GPUs that are not theirs."
            yield hurts(f"{CUDA}={cuda} beside {HIP}={hip}", cost, f"unset {CUDA}")
        if ROCR in environment and (cuda is not None or hip is not None) and not selection.problems:
            mistaken = True
            by = " and ".join(selection.by)
            cost = "The second counts among what the first left, not among all GPUs."
            yield note(f"{by} leave {numbers(survey.visible)}", cost, f"unset {ROCR}")
    else:
        for name in (HIP, ROCR):
            if name in environment:
                mistaken = True
                cost = f"It does nothing on NVIDIA GPUs; {CUDA} chooses here."
                yield note(f"{name}={environment[name]}", cost, f"unset {name}")
        models = {gpu.name for gpu in survey.gpus}
        if len(models) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            mistaken = True
            seen = f"GPUs of {len(models)} models, and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
            cost = "CUDA puts the fastest first: its indices are not those of nvidia-smi."
            yield note(seen, cost, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    if not mistaken:
        by = f" ({', '.join(selection.by)})" if selection.by else ""
        yield ok(f"{len(survey.visible)} of {len(survey.gpus)} GPUs visible{by}")
