"""A machine made of files in a temporary folder and of commands that print what a test says: whole and well at first.

The texts have the shapes that nvidia-smi, rocm-smi and the kernel print; the values are made up.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.advice.doctor.checkup import examine
from headrace.advice.doctor.finding import Finding, Severity
from headrace.advice.doctor.machine import Disk, Machine, Unreadable
from headrace.advice.doctor.survey import Survey

GIB = 1024**3
PCI = "/sys/bus/pci/devices"
NODES = "/sys/class/kfd/kfd/topology/nodes"
VERSION_FILE = """\
from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda}
git_version = '0123456789abcdef0123456789abcdef01234567'
hip: Optional[str] = {hip}
"""
CUDA_TORCH = VERSION_FILE.format(version="2.11.0+cu130", cuda="'13.0'", hip=None)
ROCM_TORCH = VERSION_FILE.format(version="2.11.0+rocm7.2", cuda=None, hip="'7.2.53211'")
CPU_TORCH = VERSION_FILE.format(version="2.11.0+cpu", cuda=None, hip=None)
PROBE = {
    "seconds": 3.1,
    "devices": 2,
    "error": "",
    "architectures": ["sm_80", "sm_90", "compute_90"],
    "needed": ["sm_90", "sm_90"],
}
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max stack size            8388608              unlimited            bytes
Max processes             4126853              4126853              processes
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""
XML_GPU = """\
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA H200</product_name>
    <product_architecture>Hopper</product_architecture>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode>
      <current_mig>Disabled</current_mig>
      <pending_mig>Disabled</pending_mig>
    </mig_mode>
    <mig_devices>
      None
    </mig_devices>
    <uuid>GPU-{index}0000000-aaaa-bbbb-cccc-0123456789ab</uuid>
    <gpu_recovery_action>None</gpu_recovery_action>
    <pci>
      <pci_gpu_link_info>
        <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
        <link_widths>
          <max_link_width>16x</max_link_width>
          <current_link_width>16x</current_link_width>
        </link_widths>
      </pci_gpu_link_info>
    </pci>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
      <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
      <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
      <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage>
      <total>143771 MiB</total>
      <reserved>600 MiB</reserved>
      <used>4 MiB</used>
      <free>143167 MiB</free>
    </fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_errors><volatile><dram_uncorrectable>0</dram_uncorrectable></volatile></ecc_errors>
    <remapped_rows>
      <remapped_row_pending>No</remapped_row_pending>
      <remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <gpu_power_readings>
      <current_power_limit>700.00 W</current_power_limit>
      <default_power_limit>700.00 W</default_power_limit>
    </gpu_power_readings>
    <fabric>
      <state>Completed</state>
      <status>Success</status>
    </fabric>
    <processes>
    </processes>
  </gpu>
"""
XML_PROCESS = """\
<process_info>
  <gpu_instance_id>N/A</gpu_instance_id>
  <pid>{pid}</pid>
  <type>C</type>
  <process_name>{name}</process_name>
  <used_memory>{mib} MiB</used_memory>
</process_info>
"""


def nvidia_xml(gpus: int = 2, driver: str = "580.65.06", cuda: str = "13.0") -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>\n'
        f"  <driver_version>{driver}</driver_version>\n  <cuda_version>{cuda}</cuda_version>\n"
        + "".join(XML_GPU.format(index=index, bus=f"{0x61 + index:x}") for index in range(gpus))
        + "</nvidia_smi_log>\n"
    )


def topo_matrix(kinds: Sequence[Sequence[str]]) -> str:
    """As `nvidia-smi topo -m` prints it, underlined head, network cards, affinities and legend included."""
    gpus = len(kinds)
    head = "\t".join(
        [*(f"GPU{index}" for index in range(gpus)), "NIC0", "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    )
    rows = ["\t".join([f"GPU{index}", *row, "SYS", "0-63,128-191", "0", "", "N/A"]) for index, row in enumerate(kinds)]
    return f"\t\x1b[4m{head}\x1b[0m\n" + "\n".join(rows) + "\n\nLegend:\n\n  X    = Self\n  NV#  = Connection\n"


def topo(gpus: int, kind: str = "NV18") -> str:
    return topo_matrix([[" X " if own == other else kind for other in range(gpus)] for own in range(gpus)])


def showtopo(gpus: int, kind: str = "XGMI") -> str:
    """As `rocm-smi --showtopo` prints it."""

    def matrix(title: str, cell: str) -> str:
        head = " " * 7 + "".join(f"GPU{index}".ljust(13) for index in range(gpus))
        rows = [
            f"GPU{own}".ljust(7) + "".join(("0" if own == other else cell).ljust(13) for other in range(gpus))
            for own in range(gpus)
        ]
        return f"{f' {title} ':=^90}\n" + "\n".join([head, *rows]) + "\n\n"

    return (
        f"\n\n{' ROCm System Management Interface ':=^90}\n"
        + matrix("Weight between two GPUs", "15")
        + matrix("Hops between two GPUs", "1")
        + matrix("Link Type between two GPUs", kind)
        + f"{' Numa Nodes ':=^90}\nGPU[0]\t\t: (Topology) Numa Node: 0\nGPU[0]\t\t: (Topology) Numa Affinity: 0\n"
        + f"{' End of ROCm SMI Log ':=^90}\n"
    )


Changes = dict[str, Any]
"""What `MadeUp.change` takes"""
Case = tuple[Any, ...]
"""(id of a finding, machine, changes, severity, what is seen, then fix and cost where they matter); a severity of None:
there is no such finding"""


def says(pattern: str, text: str) -> bool:
    """Whether `text` is `pattern`, in which `…` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), text, re.DOTALL) is not None


class MadeUp:
    """Change its parts, then ask for `findings()` or for one `finding(id)`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment: dict[str, str] = {"HOME": "/root"}
        self.commands: dict[str, str | Unreadable] = {}
        self.packages: dict[str, str] = {"torch/version.py": CPU_TORCH}
        self.disks: dict[str, Disk] = {}
        self.closed: set[str] = set()
        self.model_bytes: int | None = None
        self.commands[sys.executable] = json.dumps({**PROBE, "devices": 0, "architectures": [], "needed": []})
        self.change(
            {
                "/proc/self/limits": LIMITS,
                "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-127\n",
                "/proc/meminfo": "MemTotal:  1584987440 kB\nMemAvailable:  1521120140 kB\n",
                "/proc/cpuinfo": "flags\t\t: fpu vme sse4_2\n",
                "/proc/mounts": "/dev/nvme0n1p2 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n",
                "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p2 ro\n",
                "/proc/sys/kernel/numa_balancing": "0\n",
                "/sys/devices/system/node/node0/cpulist": "0-63\n",
                "/sys/devices/system/node/node1/cpulist": "64-127\n",
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
                "/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
                "/sys/class/net/eth0/mtu": "1500\n",
                "/sys/class/net/lo/mtu": "65536\n",
            }
        )

    def write(self, name: str, text: str | bytes) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def remove(self, name: str) -> None:
        (self.root / name.lstrip("/")).unlink()

    def on_bus(self, bus_id: str, vendor: str, iommu: str = "identity") -> str:
        folder = f"/sys/devices/pci0000:60/{bus_id}"
        self.write(f"{folder}/vendor", {"nvidia": "0x10de", "amd": "0x1002"}[vendor] + "\n")
        self.write(f"{folder}/class", "0x120000\n" if vendor == "amd" else "0x030200\n")
        self.write(f"{folder}/iommu_group/type", f"{iommu}\n")
        self.write("/sys/kernel/iommu_groups/0/type", f"{iommu}\n")
        self._link(f"{PCI}/{bus_id}", folder)
        return folder

    def _link(self, name: str, target: str) -> None:
        link = self.root / name.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(self.root / target.lstrip("/"))

    def nvidia(self, gpus: int = 2) -> MadeUp:
        self.packages["torch/version.py"] = CUDA_TORCH
        self.commands["nvidia-smi -q -x"] = nvidia_xml(gpus)
        self.commands["nvidia-smi topo -m"] = topo(gpus)
        self.probe(devices=gpus, needed=["sm_90"] * gpus)
        for index in range(gpus):
            self.on_bus(f"0000:{0x61 + index:x}:00.0", "nvidia")
        return self

    def amd(self, gpus: int = 2, partitions: int = 1, mode: str = "SPX", banks: str = "NPS1") -> MadeUp:
        """MI300X; each partition is a node of the driver's topology, as CPX makes them."""
        self.packages["torch/version.py"] = ROCM_TORCH
        self.environment["HIP_FORCE_DEV_KERNARG"] = "1"
        self.commands["rocm-smi --showtopo"] = showtopo(gpus * partitions)
        devices = gpus * partitions
        self.probe(devices=devices, architectures=["gfx942", "gfx950"], needed=["gfx942:sramecc+:xnack-"] * devices)
        self.write("/sys/module/amdgpu/version", "6.12.12\n")
        self.write("/dev/kfd", "")
        self.write(f"{NODES}/0/gpu_id", "0\n")
        self.write(f"{NODES}/0/properties", "cpu_cores_count 64\nsimd_count 0\n")
        for index in range(devices):
            bus = 0x05 + index // partitions
            self.write(f"/dev/dri/renderD{128 + index}", "")
            self.write(f"{NODES}/{index + 1}/gpu_id", f"{50000 + index}\n")
            properties = {
                "simd_count": 1216 // partitions,
                "gfx_target_version": 90402,
                "vendor_id": 4098,
                "device_id": 0x74A1,
                "location_id": (index % partitions) << 28 | bus << 8,
                "domain": 0,
                "drm_render_minor": 128 + index,
                "unique_id": 1000 + index,
            }
            text = "".join(f"{name} {value}\n" for name, value in properties.items())
            self.write(f"{NODES}/{index + 1}/properties", text)
        for index in range(gpus):
            bus_id = f"0000:{0x05 + index:02x}:00.0"
            folder = self.on_bus(bus_id, "amd")
            for name, text in {
                "mem_info_vram_total": f"{192 * GIB}",
                "mem_info_vram_used": f"{300 * 1024**2}",
                "current_compute_partition": mode,
                "current_memory_partition": banks,
                "current_link_width": "16",
                "max_link_width": "16",
                "hwmon/hwmon3/power1_cap": "750000000",
                "hwmon/hwmon3/power1_cap_default": "750000000",
                "hwmon/hwmon3/temp2_label": "junction",
                "hwmon/hwmon3/temp2_input": "41000",
                "hwmon/hwmon3/temp2_crit": "100000",
            }.items():
                self.write(f"{folder}/{name}", f"{text}\n")
        return self

    def made(self, machine: str) -> MadeUp:
        """`nvidia 8`, or `amd 1 8 CPX NPS4`: GPUs, partitions of each, modes; "" has no GPU."""
        vendor, *rest = machine.split() or [""]
        return getattr(self, vendor)(*(int(word) if word.isdigit() else word for word in rest)) if vendor else self

    def change(self, changes: Changes) -> MadeUp:
        """Change a file (`/proc/swaps`; None removes it, and its folder if that is empty), a piece of what nvidia-smi
        says of the first GPUs (`<used>4 MiB`; (text, GPUs)), a disk (`disk /dev/shm`), a package's file (`torch/...`),
        a variable (`NCCL_DEBUG`), or what a command (`python`: torch's probe) prints."""
        for name, value in changes.items():
            if name.startswith("/") and value is None:
                self.remove(name)
                folder = (self.root / name.lstrip("/")).parent
                if not any(folder.iterdir()):
                    folder.rmdir()
            elif name.startswith("/"):
                self.write(name, value)
            elif ">" in name:
                self.gpu_xml(name, *(value if isinstance(value, tuple) else (value,)))
            elif name.startswith("disk "):
                self.disks[name[5:]] = Disk(2000 * GIB, value)
            elif name.startswith("torch/"):
                self.packages[name] = value
            elif name.isupper():
                self.environment[name] = value
            else:
                self.commands[sys.executable if name == "python" else name] = value
        return self

    def holds(self, case: Case) -> None:
        """Make the machine of a case, and compare what is found."""
        id, machine, changes, severity, *texts = case
        found = [finding for finding in self.made(machine).change(changes).findings() if finding.id == id]
        assert bool(found) is (severity is not None), found
        if found:
            assert found[0].severity is severity
            for pattern, text in zip(texts, (found[0].seen, found[0].fix, found[0].cost), strict=False):
                assert says(pattern, text), text

    def probe(self, **values: object) -> None:
        """What the process that imports torch reports."""
        self.commands[sys.executable] = "a warning\n" + json.dumps({**PROBE, **values})

    def gpu_xml(self, old: str, new: str, count: int = 1) -> None:
        """Replace a piece of what nvidia-smi says of the first `count` GPUs."""
        text = self.commands["nvidia-smi -q -x"]
        assert isinstance(text, str)
        assert old in text, old
        self.commands["nvidia-smi -q -x"] = text.replace(old, new, count)

    def machine(self) -> Machine:
        return Machine(
            environment=self.environment,
            root=self.root,
            run=self._run,
            disk=self._disk,
            package_file=self._package_file,
            may_write=lambda path: self._name(path) not in self.closed and path.exists(),
        )

    def _name(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root)) if path != self.root else "/"

    def _run(self, command: Sequence[str], seconds: float) -> str:
        name = sys.executable if command[0] == sys.executable else " ".join(command)
        output = self.commands.get(name, Unreadable(f"no {command[0]} in PATH", missing=True))
        if isinstance(output, Unreadable):
            raise output
        return output

    def _disk(self, path: Path) -> Disk:
        return self.disks.get(self._name(path), Disk(2000 * GIB, 1500 * GIB))

    def _package_file(self, package: str, name: str) -> str:
        if name not in self.packages:
            raise Unreadable(f"{package} is not installed", missing=True)
        return self.packages[name]

    def survey(self) -> Survey:
        return Survey(self.machine(), self.model_bytes)

    def findings(self) -> list[Finding]:
        return examine(self.survey())

    def finding(self, id: str) -> Finding:
        """The one finding of that name, or the first: the worst."""
        return next(finding for finding in self.findings() if finding.id == id)

    def ids(self, severity: Severity) -> list[str]:
        return [finding.id for finding in self.findings() if finding.severity is severity]
