"""Looks at the machine once for all checks: its GPUs and their links, torch's build, container or not.

What cannot be read is kept as a reason for the check that needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.advice.doctor import amd, nvidia
from headrace.advice.doctor.gpu import Gpu
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.selection import Selection, select

PCI = "/sys/bus/pci/devices"
VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D and display controllers, processing accelerators."""


@dataclass(frozen=True)
class TorchBuild:
    """Names the torch that is installed."""

    version: str
    cuda: str = ""
    hip: str = ""

    @property
    def kind(self) -> str:
        """The platform that it was built for."""
        if self.hip:
            return f"ROCm {self.hip}"
        return f"CUDA {self.cuda}" if self.cuda else "CPU"


@dataclass(frozen=True)
class Survey:
    """Holds what was seen of a machine."""

    machine: Machine
    vendor: str = ""
    """The vendor of the GPUs: `nvidia`, `amd`, or "" where none could be listed."""
    gpus: tuple[Gpu, ...] = ()
    selection: Selection = Selection(())
    driver: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that NVIDIA's driver speaks."""
    gpu_problem: str = ""
    """Why nvidia-smi lists none."""
    gpu_tool: bool = False
    """nvidia-smi is installed."""
    undriven: tuple[tuple[str, str], ...] = ()
    """(vendor, kernel driver or "") of GPUs on the bus that their vendor's driver does not drive."""
    links: tuple[tuple[tuple[int, int], str], ...] = ()
    """((GPU, other GPU), kind of link) between the GPUs that are looked at."""
    link_problem: str = ""
    torch: TorchBuild | None = None
    torch_problem: str = ""
    container: bool = False
    virtual: bool = False
    model_bytes: int | None = None
    """The weights of the model that is to be served, where the user says so."""

    @property
    def visible(self) -> tuple[Gpu, ...]:
        return self.selection.gpus

    @property
    def concerned(self) -> tuple[Gpu, ...]:
        """The GPUs that checks look at: the visible ones, or all where a mistake in a variable hides them."""
        return _concerned(self.selection, self.gpus)

    @property
    def several(self) -> bool:
        return len(self.concerned) > 1

    @property
    def fast_links(self) -> bool:
        """Every pair of these GPUs has NVLink or Infinity Fabric between them."""
        return bool(self.links) and all(kind.startswith("NV") or kind == "XGMI" for _, kind in self.links)

    def on_host(self, command: str) -> str:
        """Return the command for a setting of kernel or driver, which no container can change."""
        return f"{command}  # on the host" if self.container else command


def take_survey(machine: Machine, model_bytes: int | None = None) -> Survey:
    """Return what there is to see of a machine; `model_bytes` is the size of the weights to be served, if known."""
    vendor, driver, cuda, problem, tool = "", "", None, "", True
    gpus: tuple[Gpu, ...] = ()
    try:
        report = nvidia.parse_report(machine.command("nvidia-smi", "-q", "-x"))
        vendor, gpus, driver, cuda = "nvidia", report.gpus, report.driver, report.cuda
    except Unreadable as error:
        problem, tool = str(error), not error.missing
    if not gpus:
        gpus = amd.read_gpus(machine, processes_of_host=_in_container(machine))
        vendor = "amd" if gpus else ""
        driver = machine.read_or("/sys/module/amdgpu/version", "of the kernel") if gpus else ""
    selection = select(machine.environment, vendor, gpus)
    links, link_problem = _links(machine, vendor, _concerned(selection, gpus))
    torch, torch_problem = _torch(machine)
    return Survey(
        machine=machine,
        vendor=vendor,
        gpus=gpus,
        selection=selection,
        driver=driver,
        cuda=cuda,
        gpu_problem="" if gpus else problem,
        gpu_tool=tool,
        undriven=() if gpus else _undriven(machine),
        links=links,
        link_problem=link_problem,
        torch=torch,
        torch_problem=torch_problem,
        container=_in_container(machine),
        virtual=" hypervisor" in machine.read_or("/proc/cpuinfo"),
        model_bytes=model_bytes,
    )


def _concerned(selection: Selection, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return selection.gpus or (gpus if selection.problems else ())


def _links(machine: Machine, vendor: str, gpus: tuple[Gpu, ...]) -> tuple[tuple[tuple[tuple[int, int], str], ...], str]:
    if len(gpus) < 2:
        return (), ""
    try:
        if vendor == "nvidia":
            links = nvidia.parse_links(machine.command("nvidia-smi", "topo", "-m"))
        else:
            links = amd.parse_links(machine.command("rocm-smi", "--showtopo"))
    except Unreadable as error:
        return (), str(error)
    shown = {gpu.index for gpu in gpus}
    return tuple((pair, kind) for pair, kind in sorted(links.items()) if set(pair) <= shown), ""


def _torch(machine: Machine) -> tuple[TorchBuild | None, str]:
    try:
        text = machine.package_file("torch", "torch/version.py")
    except Unreadable as error:
        return None, str(error)

    def value(name: str) -> str:
        match = re.search(rf"^{name}\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        return match[1] if match else ""

    return TorchBuild(value("__version__"), value("cuda"), value("hip")), ""


def _undriven(machine: Machine) -> tuple[tuple[str, str], ...]:
    found = []
    for name in machine.names(PCI):
        vendor = VENDORS.get(machine.read_or(f"{PCI}/{name}/vendor"))
        if vendor and machine.read_or(f"{PCI}/{name}/class").startswith(GPU_CLASSES):
            driver = machine.path(f"{PCI}/{name}/driver")
            found.append((vendor, driver.resolve().name if driver.exists() else ""))
    return tuple(found)


def _in_container(machine: Machine) -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    return "KUBERNETES_SERVICE_HOST" in machine.environment or any(machine.path(mark).exists() for mark in marks)
