"""Lists all checks and runs them; a check that fails, or that lacks a file it needs, becomes a finding itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from headrace.advice.doctor import gpus, host, links, software, storage
from headrace.advice.doctor.finding import Finding, Severity, unknown
from headrace.advice.doctor.machine import Unreadable
from headrace.advice.doctor.survey import Survey
from headrace.advice.doctor.variables import check_variables

CHECKS: dict[str, Callable[[Survey], Iterator[Finding]]] = {
    "driver": software.check_driver,
    "device-files": software.check_device_files,
    "torch-build": software.check_torch_build,
    "torch-runs": software.check_torch_runs,
    "visible-devices": software.check_visible_devices,
    "gpu-memory": gpus.check_memory,
    "gpu-persistence": gpus.check_persistence,
    "gpu-power": gpus.check_power,
    "gpu-clocks": gpus.check_heat,
    "gpu-faults": gpus.check_faults,
    "compute-mode": gpus.check_compute_mode,
    "partitions": gpus.check_partitions,
    "gpu-links": links.check_links,
    "pcie-width": links.check_width,
    "iommu": links.check_iommu,
    "infiniband": links.check_infiniband,
    "numa-balancing": host.check_numa_balancing,
    "shared-memory": host.check_shared_memory,
    "ulimits": host.check_limits,
    "cpu-cores": host.check_cores,
    "cpu-governor": host.check_governor,
    "host-memory": host.check_host_memory,
    "variables": check_variables,
    "caches": storage.check_caches,
}
ORDER = list(Severity)


def examine(survey: Survey) -> list[Finding]:
    """Return every finding, the worst first and otherwise in the order of CHECKS."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            for finding in check(survey):
                findings.append(replace(finding, id=finding.id or name))
        except Unreadable as error:
            findings.append(unknown(str(error), id=name))
        except Exception as error:
            # The machine is what it is: one odd file must not hide what the other checks found.
            findings.append(unknown(f"the check failed: {type(error).__name__}: {error}", id=name))
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))
