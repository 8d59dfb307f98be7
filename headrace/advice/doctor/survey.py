"""Looks at the machine once for all checks: its GPUs and their links, torch's build, container or not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from headrace.advice.doctor import amd, nvidia
from headrace.advice.doctor.finding import TEXTS, Finding, Severity
from headrace.advice.doctor.gpu import Gpu
from headrace.advice.doctor.machine import Machine, Unreadable
from headrace.advice.doctor.selection import select

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


class Survey:
    """Holds what there is to see of a machine, looked up once when it is made."""

    def __init__(self, machine: Machine, model_bytes: int | None = None) -> None:
        """`model_bytes` is the size of the weights that are to be served, where the user gives it."""
        self.machine, self.model_bytes = machine, model_bytes
        marks = ("/.dockerenv", "/run/.containerenv")
        self.container = "KUBERNETES_SERVICE_HOST" in machine.environment or any(
            machine.path(mark).exists() for mark in marks
        )
        self.virtual = " hypervisor" in machine.read_or("/proc/cpuinfo")
        self.vendor = ""
        """The vendor of the GPUs: `nvidia`, `amd`, or "" where none could be listed."""
        self.gpus: tuple[Gpu, ...] = ()
        self.driver = ""
        self.cuda: tuple[int, int] | None = None
        """The newest CUDA that NVIDIA's driver supports."""
        self.gpu_problem = ""
        """Why nvidia-smi lists none."""
        self.gpu_tool = True
        """nvidia-smi is installed."""
        try:
            report = nvidia.parse_report(machine.command("nvidia-smi", "-q", "-x"))
            self.vendor, self.gpus, self.driver, self.cuda = "nvidia", report.gpus, report.driver, report.cuda
        except Unreadable as error:
            self.gpu_problem, self.gpu_tool = str(error), not error.missing
        if not self.gpus:
            self.gpus = amd.read_gpus(machine, processes_of_host=self.container)
            self.vendor = "amd" if self.gpus else ""
            self.driver = machine.read_or("/sys/module/amdgpu/version", "of the kernel") if self.gpus else ""
        self.selection = select(machine.environment, self.vendor, self.gpus)
        self.links: dict[tuple[int, int], str] = {}
        """The kind of link by (GPU, other GPU), of those that checks look at."""
        self.link_problem = ""
        """Why there are no links."""
        self.torch: TorchBuild | None = None
        self.torch_problem = ""
        """Why torch is None."""
        try:
            self.links = self._read_links()
        except Unreadable as error:
            self.link_problem = str(error)
        try:
            self.torch = self._read_torch()
        except Unreadable as error:
            self.torch_problem = str(error)

    @property
    def visible(self) -> tuple[Gpu, ...]:
        """The GPUs that the environment's variables leave."""
        return self.selection.gpus

    @property
    def checked_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that checks look at: the visible ones, or all where a mistake in a variable hides them."""
        return self.selection.gpus or (self.gpus if self.selection.wrong else ())

    @property
    def several(self) -> bool:
        """Checks look at more than one GPU."""
        return len(self.checked_gpus) > 1

    def _read_links(self) -> dict[tuple[int, int], str]:
        if not self.several:
            return {}
        if self.vendor == "nvidia":
            links = nvidia.parse_links(self.machine.command("nvidia-smi", "topo", "-m"))
        else:
            links = amd.parse_links(self.machine.command("rocm-smi", "--showtopo"))
        shown = {gpu.index for gpu in self.checked_gpus}
        return {pair: kind for pair, kind in sorted(links.items()) if shown.issuperset(pair)}

    @property
    def fast_links(self) -> bool:
        """Every pair of these GPUs is known to have NVLink or Infinity Fabric between them."""
        return bool(self.links) and all(kind.startswith("NV") or kind == "XGMI" for kind in self.links.values())

    def _read_torch(self) -> TorchBuild:
        text = self.machine.package_file("torch", "torch/version.py")
        pairs = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE))
        return TorchBuild(*(pairs.get(name, "") for name in ("__version__", "cuda", "hip")))

    @cached_property
    def without_driver(self) -> tuple[tuple[str, str], ...]:
        """GPUs on the bus without their vendor's driver, as (vendor, name of the kernel driver or "")."""
        gpus = []
        for name in () if self.gpus else self.machine.names(PCI):
            vendor = VENDORS.get(self.machine.read_or(f"{PCI}/{name}/vendor"))
            if vendor and self.machine.read_or(f"{PCI}/{name}/class").startswith(GPU_CLASSES):
                driver = self.machine.path(f"{PCI}/{name}/driver")
                gpus.append((vendor, driver.resolve().name if driver.exists() else ""))
        return tuple(gpus)

    def on_host(self, command: str) -> str:
        """Return the command for a setting of kernel or driver, which no container can change."""
        return f"{command}  # on the host" if self.container else command

    def finding(self, text: str, /, severity: Severity | None = None, id: str = "", **words: object) -> Finding:
        """Return the finding of that name in findings.json, with its `words` filled in for this machine."""
        row = TEXTS[text]
        fix = row.fix_amd if row.fix_amd and self.vendor == "amd" else row.fix
        fix = (row.fix_container if row.fix_container and self.container else fix).format_map(words)
        if row.on_host:
            fix = self.on_host(fix)
        return Finding(severity or row.severity, row.seen.format_map(words), row.cost.format_map(words), fix, id)
