"""Checks the environment's variables: those left on, meant for another vendor's GPUs, or read by nobody.

A finding bears the variable's name. A variable that is set and does no harm is not mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.advice.doctor.finding import Finding, Severity, finding, note, ok
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.survey import Survey

HURTS, NOTE = Severity.HURTS, Severity.NOTE
MOST_NVIDIA_CHANNELS = 32
AITER_MASTER = "VLLM_ROCM_USE_AITER"
RCCL_READS_NCCL = (
    "DEBUG", "DEBUG_SUBSYS", "NET_GDR_LEVEL", "P2P_LEVEL", "P2P_DISABLE", "SOCKET_IFNAME", "IB_DISABLE", "IB_HCA",
    "ALGO", "PROTO", "BUFFSIZE", "TREE_THRESHOLD",
)  # fmt: skip
"""Names that RCCL reads with the prefix NCCL_ alone."""

WHERE: dict[str, Callable[[Survey], bool]] = {
    "amd": lambda survey: survey.vendor == "amd",
    "not-amd": lambda survey: survey.vendor != "amd",
    "nvidia": lambda survey: survey.vendor == "nvidia",
    "gpu": lambda survey: bool(survey.checked_gpus),
    "no-gpu": lambda survey: not survey.checked_gpus,
    "one": lambda survey: not survey.several,
    "several": lambda survey: survey.several,
    "infiniband": lambda survey: bool(survey.machine.names(INFINIBAND)),
}
"""Machines that a rule is for: `several` GPUs, `one` at most, ..."""


Harmful = Callable[[str, Survey], bool]


def _any(value: str, survey: Survey) -> bool:
    return True


def _on(value: str, survey: Survey) -> bool:
    return value.lower() in ("1", "true", "yes", "on")


def _off(value: str, survey: Survey) -> bool:
    return value.lower() in ("0", "false", "no", "off")


def _above(limit: int) -> Harmful:
    return lambda value, survey: value.isdigit() and int(value) > limit


def _among(*words: str) -> Harmful:
    return lambda value, survey: value.upper() in words


def _no_such_interface(value: str, survey: Survey) -> bool:
    """`eth0,ib` are beginnings of names; `=eth0` is a whole one; `^docker` excludes."""
    names = survey.machine.names("/sys/class/net")
    if not names or value.startswith("^"):
        return False
    wanted = tuple(part.partition(":")[0] for part in value.lstrip("=").split(","))
    return not any(name in wanted if value.startswith("=") else name.startswith(wanted) for name in names)


@dataclass(frozen=True)
class Rule:
    """Says what a variable costs, on which machines and with which values."""

    name: str
    severity: Severity
    cost: str
    where: str
    """Words of WHERE, all of which must hold."""
    harmful: Harmful = _on
    fix: str = ""
    """Empty: unset it."""

    def concerns(self, survey: Survey) -> bool:
        """Return whether the rule is for this machine."""
        return all(WHERE[word](survey) for word in self.where.split())


SLOW_PEERS = "GPUs talk through host memory: all-reduces take several times as long."
SYNCHRONOUS = "Every launch waits for the GPU: the host no longer runs ahead, and graphs cannot be captured."
CHANNELS = (
    "A value from AMD's guides: on NVIDIA each channel takes a multiprocessor and buffers from the model's kernels."
)
PINNED = "It pins one algorithm, where NCCL chooses by message size: decode and prefill want different ones."
IDLE_INFINIBAND = "Between nodes NCCL uses TCP beside an idle InfiniBand. One node alone is not concerned."
NO_INTERFACE = "No interface is called so: NCCL fails at start."
LOGS = "Each rank logs its set-up, with TRACE every collective."
KERNARG = "Kernels fetch their arguments from host memory: 2 to 3 us a launch."
EAGER_LOADING = "Every kernel of every library is loaded at start: slower, and hundreds of MiB of GPU memory."
RULES = (
    Rule("NCCL_P2P_DISABLE", HURTS, SLOW_PEERS, "several"),
    Rule("NCCL_P2P_DISABLE", NOTE, "Without effect on one GPU; several would talk through host memory.", "one"),
    Rule("NCCL_P2P_LEVEL", HURTS, SLOW_PEERS, "several", _among("LOC", "0")),
    Rule("NCCL_SHM_DISABLE", NOTE, "GPUs without a direct link talk over the network stack.", "several"),
    Rule("NCCL_IB_DISABLE", NOTE, IDLE_INFINIBAND, "infiniband"),
    Rule(
        "NCCL_NVLS_ENABLE", NOTE, "The NVSwitch no longer computes all-reduces: large ones slow down.", "several", _off
    ),
    Rule("NCCL_MIN_NCHANNELS", HURTS, CHANNELS, "several nvidia", _above(MOST_NVIDIA_CHANNELS)),
    Rule(
        "NCCL_MIN_NCHANNELS", NOTE, f"{CHANNELS} Without effect on one GPU.", "one nvidia", _above(MOST_NVIDIA_CHANNELS)
    ),
    Rule("NCCL_DEBUG", NOTE, LOGS, "", _among("INFO", "TRACE"), "export NCCL_DEBUG=WARN"),
    Rule("NCCL_ALGO", NOTE, PINNED, "several", _any),
    Rule("NCCL_PROTO", NOTE, PINNED, "several", _any),
    Rule("NCCL_SOCKET_IFNAME", HURTS, NO_INTERFACE, "several", _no_such_interface),
    Rule("CUDA_LAUNCH_BLOCKING", HURTS, SYNCHRONOUS, "gpu"),
    Rule("HIP_LAUNCH_BLOCKING", HURTS, SYNCHRONOUS, "gpu amd"),
    Rule("AMD_SERIALIZE_KERNEL", HURTS, SYNCHRONOUS, "gpu amd", _above(0)),
    Rule("AMD_SERIALIZE_COPY", HURTS, "Every copy waits for the GPU: steps cannot overlap.", "gpu amd", _above(0)),
    Rule("AMD_LOG_LEVEL", NOTE, "HIP logs its calls; from level 3 on that shows in each step.", "amd", _above(0)),
    Rule("HSA_ENABLE_SDMA", NOTE, "Copies run on compute units, beside the model's kernels.", "amd", _off),
    Rule("HSA_OVERRIDE_GFX_VERSION", HURTS, "Kernels made for another chip: wrong results or a crash.", "amd", _any),
    Rule("HIP_FORCE_DEV_KERNARG", NOTE, KERNARG, "amd", _off, "export HIP_FORCE_DEV_KERNARG=1"),
    Rule("HIP_FORCE_DEV_KERNARG", NOTE, "Read by ROCm alone.", "not-amd", _any),
    Rule("TORCH_BLAS_PREFER_HIPBLASLT", NOTE, "Read by ROCm builds of torch alone.", "not-amd", _any),
    Rule("TRITON_INTERPRET", HURTS, "Kernels run in Python on the CPU, thousands of times slower.", "gpu"),
    Rule("TRITON_INTERPRET", NOTE, "Triton kernels run in Python; headrace's CPU path does not use them.", "no-gpu"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", HURTS, "Each tensor asks the driver for memory, which waits.", "gpu"),
    Rule("PYTORCH_TUNABLEOP_ENABLED", NOTE, "Each new matrix shape is tuned when it is met: requests wait.", "gpu"),
    Rule("CUDA_MODULE_LOADING", NOTE, EAGER_LOADING, "nvidia", _among("EAGER")),
)


def check_variables(survey: Survey) -> Iterator[Finding]:
    """Yield a finding for each variable that does harm; one that all is well where none does."""
    environment = survey.machine.environment
    findings = [
        finding(rule.severity, f"{rule.name}={value}", rule.cost, rule.fix or f"unset {rule.name}", id=rule.name)
        for rule in RULES
        if (value := environment.get(rule.name)) is not None
        and rule.concerns(survey)
        and rule.harmful(value.strip(), survey)
    ]
    findings += [*_rccl_names(survey), *_aiter(survey)]
    if survey.vendor == "amd" and survey.checked_gpus and "HIP_FORCE_DEV_KERNARG" not in environment:
        name = "HIP_FORCE_DEV_KERNARG"
        findings.append(note(f"{name} is not set", KERNARG, f"export {name}=1", id=name))
    if not findings:
        seen = sorted(name for name in environment if re.match(r"(R|N)CCL_|HSA_|AITER_", name))
        findings.append(ok(f"{', '.join(seen)} do no harm" if seen else "none set that hurts"))
    yield from findings


def _rccl_names(survey: Survey) -> Iterator[Finding]:
    wrong = [f"RCCL_{name}" for name in RCCL_READS_NCCL if f"RCCL_{name}" in survey.machine.environment]
    if wrong:
        fix = f"unset {' '.join(wrong)}"
        if survey.vendor == "amd":
            exports = (f"export N{name[1:]}={survey.machine.environment[name]}" for name in wrong)
            fix = "; ".join([fix, *exports])
        cost = "RCCL, as NCCL, reads these with the prefix NCCL_ alone: they do nothing."
        yield note(", ".join(wrong), cost, fix, id=wrong[0])


def _aiter(survey: Survey) -> Iterator[Finding]:
    environment = survey.machine.environment
    names = sorted(name for name in environment if name.startswith((AITER_MASTER, "AITER_")))
    if not names:
        return
    rocm = survey.vendor == "amd" and survey.torch is not None and bool(survey.torch.hip)
    if not rocm:
        cost = "AITER is AMD's kernel library; without ROCm these do nothing."
        yield note(", ".join(names), cost, f"unset {' '.join(names)}", id="aiter")
    elif AITER_MASTER not in environment and any(name.startswith(AITER_MASTER) for name in names):
        cost = f"vLLM asks {AITER_MASTER} first, which is off unless set; headrace reads none of them."
        yield note(f"{', '.join(names)} without {AITER_MASTER}", cost, f"export {AITER_MASTER}=1", id="aiter")
