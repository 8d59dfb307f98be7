"""Each rule of the table, on the machine where it speaks and on one where it is silent."""

from __future__ import annotations

import pytest

from headrace.advice.doctor.finding import Severity
from headrace.advice.doctor.variables import RULES
from tests.advice.doctor.made_up import Case, MadeUp

HURTS, NOTE, OK = Severity.HURTS, Severity.NOTE, Severity.OK
CASES = [
    # variable, value, machine, GPUs, severity (None: silent)
    ("NCCL_P2P_DISABLE", "1", "nvidia", 2, HURTS),
    ("NCCL_P2P_DISABLE", "1", "amd", 1, NOTE),
    ("NCCL_P2P_DISABLE", "0", "nvidia", 2, None),
    ("NCCL_P2P_LEVEL", "LOC", "nvidia", 2, HURTS),
    ("NCCL_P2P_LEVEL", "NVL", "nvidia", 2, None),
    ("NCCL_SHM_DISABLE", "1", "nvidia", 2, NOTE),
    ("NCCL_SHM_DISABLE", "1", "nvidia", 1, None),
    ("NCCL_IB_DISABLE", "1", "nvidia", 2, None),
    ("NCCL_NVLS_ENABLE", "0", "nvidia", 4, NOTE),
    ("NCCL_MIN_NCHANNELS", "112", "nvidia", 8, HURTS),
    ("NCCL_MIN_NCHANNELS", "112", "nvidia", 1, NOTE),
    ("NCCL_MIN_NCHANNELS", "112", "amd", 8, None),
    ("NCCL_MIN_NCHANNELS", "16", "nvidia", 8, None),
    ("NCCL_DEBUG", "info", "nvidia", 2, NOTE),
    ("NCCL_DEBUG", "WARN", "nvidia", 2, None),
    ("NCCL_ALGO", "Ring", "amd", 2, NOTE),
    ("NCCL_PROTO", "LL", "nvidia", 2, NOTE),
    ("NCCL_PROTO", "LL", "nvidia", 1, None),
    ("NCCL_SOCKET_IFNAME", "ens5", "nvidia", 2, HURTS),
    ("NCCL_SOCKET_IFNAME", "=eth", "nvidia", 2, HURTS),
    ("NCCL_SOCKET_IFNAME", "ens5,eth", "nvidia", 2, None),
    ("NCCL_SOCKET_IFNAME", "^docker", "nvidia", 2, None),
    ("GLOO_SOCKET_IFNAME", "ens5", "nvidia", 1, HURTS),
    ("GLOO_SOCKET_IFNAME", "eth0", "nvidia", 1, None),
    ("CUDA_LAUNCH_BLOCKING", "1", "nvidia", 1, HURTS),
    ("CUDA_LAUNCH_BLOCKING", "0", "nvidia", 1, None),
    ("HIP_LAUNCH_BLOCKING", "1", "amd", 1, HURTS),
    ("HIP_LAUNCH_BLOCKING", "1", "nvidia", 1, None),
    ("AMD_SERIALIZE_KERNEL", "3", "amd", 1, HURTS),
    ("AMD_SERIALIZE_COPY", "3", "amd", 1, HURTS),
    ("AMD_LOG_LEVEL", "3", "amd", 1, NOTE),
    ("HSA_ENABLE_SDMA", "0", "amd", 1, NOTE),
    ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", "amd", 1, HURTS),
    ("HIP_FORCE_DEV_KERNARG", "0", "amd", 1, NOTE),
    ("HIP_FORCE_DEV_KERNARG", "1", "amd", 1, None),
    ("HIP_FORCE_DEV_KERNARG", "1", "nvidia", 1, NOTE),
    ("TORCH_BLAS_PREFER_HIPBLASLT", "1", "nvidia", 1, NOTE),
    ("TORCH_BLAS_PREFER_HIPBLASLT", "1", "amd", 1, None),
    ("TRITON_INTERPRET", "1", "nvidia", 1, HURTS),
    ("TRITON_INTERPRET", "1", "", 0, NOTE),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "amd", 1, HURTS),
    ("PYTORCH_TUNABLEOP_ENABLED", "1", "amd", 1, NOTE),
    ("CUDA_MODULE_LOADING", "EAGER", "nvidia", 1, NOTE),
    ("CUDA_MODULE_LOADING", "LAZY", "nvidia", 1, None),
    *((name, "INFO", "amd", 2, NOTE) for name in ("RCCL_DEBUG", "RCCL_DEBUG_SUBSYS", "RCCL_NET_GDR_LEVEL")),
]


@pytest.mark.parametrize(("name", "value", "vendor", "gpus", "severity"), CASES)
def test_a_rule(here: MadeUp, name: str, value: str, vendor: str, gpus: int, severity: Severity | None) -> None:
    here.made(f"{vendor} {gpus}" if vendor else "").environment[name] = value
    found = [finding for finding in here.findings() if finding.id == name]
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    for finding in found:
        assert finding.seen == f"{name}={value}"
        assert finding.fix.startswith(("unset ", "export "))


def test_every_rule_has_a_case() -> None:
    spoken = {(name, severity) for name, _, _, _, severity in CASES if severity}
    spoken.add(("NCCL_IB_DISABLE", NOTE))  # below
    assert {(rule.name, rule.severity) for rule in RULES} == spoken


OTHERS: list[Case] = [
    ("NCCL_IB_DISABLE", "nvidia", {"NCCL_IB_DISABLE": "1", "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"},
     NOTE),
    ("variables", "nvidia", {}, OK, "none set that hurts"),
    ("variables", "nvidia", {"NCCL_IB_HCA": "mlx5", "PATH": "/bin"}, OK, "NCCL_IB_HCA do no harm"),
]  # fmt: skip


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_findings(here: MadeUp, case: Case) -> None:
    here.holds(case)


def test_kernel_arguments_in_host_memory(here: MadeUp) -> None:
    del here.amd().environment["HIP_FORCE_DEV_KERNARG"]
    here.holds(("HIP_FORCE_DEV_KERNARG", "", {}, NOTE, "HIP_FORCE_DEV_KERNARG is not set"))
