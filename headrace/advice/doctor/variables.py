"""Environment variables that were left on, were meant for another vendor, or are read by nobody: a table of rules.

A rule's finding bears the variable's name. What is set and does no harm is not mentioned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.advice.doctor.finding import Finding, Severity, note, ok
from headrace.advice.doctor.host import INFINIBAND
from headrace.advice.doctor.survey import Survey

ON = ("1", "true", "yes", "on")
HURTS, NOTE = Severity.HURTS, Severity.NOTE
MOST_NVIDIA_CHANNELS = 32
AITER_MASTER = "VLLM_ROCM_USE_AITER"
RCCL_READS_NCCL = (
    "DEBUG", "DEBUG_SUBSYS", "NET_GDR_LEVEL", "P2P_LEVEL", "P2P_DISABLE", "SOCKET_IFNAME", "IB_DISABLE", "IB_HCA",
    "ALGO", "PROTO", "BUFFSIZE", "TREE_THRESHOLD",
)  # fmt: skip
"""Names that RCCL reads with the prefix NCCL_ alone."""

When = Callable[[str, Survey], bool]


@dataclass(frozen=True)
class Rule:
    name: str
    when: When
    severity: Severity
    cost: str
    fix: str = ""
    """"": unset it."""


def _on(value: str, survey: Survey) -> bool:
    return value.strip().lower() in ON


def _always(value: str, survey: Survey) -> bool:
    return True


def _number(value: str) -> int:
    return int(value) if value.strip().isdigit() else 0


def _gpu(when: When) -> When:
    return lambda value, survey: bool(survey.concerned) and when(value, survey)


def _several(when: When) -> When:
    return lambda value, survey: survey.several and when(value, survey)


def _one(when: When) -> When:
    return lambda value, survey: not survey.several and when(value, survey)


def _amd(when: When) -> When:
    return lambda value, survey: survey.vendor == "amd" and when(value, survey)


def _not_amd(when: When) -> When:
    return lambda value, survey: survey.vendor != "amd" and when(value, survey)


def _channels(value: str, survey: Survey) -> bool:
    return survey.vendor == "nvidia" and _number(value) > MOST_NVIDIA_CHANNELS


def _local_only(value: str, survey: Survey) -> bool:
    return value.strip().upper() in ("LOC", "0")


def _above_zero(value: str, survey: Survey) -> bool:
    return _number(value) > 0


def _off(value: str, survey: Survey) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off")


def _no_such_interface(value: str, survey: Survey) -> bool:
    """`eth0,ib` are beginnings of names; `=eth0` is a whole one; `^docker` excludes."""
    names = survey.machine.names("/sys/class/net")
    if not names or value.startswith("^"):
        return False
    exact = value.startswith("=")
    wanted = [part.partition(":")[0] for part in value.lstrip("=").split(",")]
    return not any(name == part if exact else name.startswith(part) for name in names for part in wanted)


SLOW_PEERS = "GPUs talk through host memory: all-reduces take several times as long."
SYNCHRONOUS = "Every launch waits for the GPU: the host no longer runs ahead, and graphs cannot be captured."
CHANNELS = (
    "A value from AMD's guides: on NVIDIA each channel takes a multiprocessor and buffers from the model's kernels."
)
PINNED = "It pins one algorithm, where NCCL chooses by message size: decode and prefill want different ones."
RULES = (
    Rule("NCCL_P2P_DISABLE", _several(_on), HURTS, SLOW_PEERS),
    Rule("NCCL_P2P_DISABLE", _one(_on), NOTE, "Without effect on one GPU; several would talk through host memory."),
    Rule("NCCL_P2P_LEVEL", _several(_local_only), HURTS, SLOW_PEERS),
    Rule("NCCL_SHM_DISABLE", _several(_on), NOTE, "GPUs without a direct link talk over the network stack."),
    Rule(
        "NCCL_IB_DISABLE",
        lambda value, survey: _on(value, survey) and bool(survey.machine.names(INFINIBAND)),
        NOTE,
        "Between nodes NCCL uses TCP beside an idle InfiniBand. One node alone is not concerned.",
    ),
    Rule("NCCL_NVLS_ENABLE", _several(_off), NOTE, "The NVSwitch no longer adds up: large all-reduces slow down."),
    Rule("NCCL_MIN_NCHANNELS", _several(_channels), HURTS, CHANNELS),
    Rule("NCCL_MIN_NCHANNELS", _one(_channels), NOTE, f"{CHANNELS} Without effect on one GPU."),
    Rule(
        "NCCL_DEBUG",
        lambda value, survey: value.strip().upper() in ("INFO", "TRACE"),
        NOTE,
        "Each rank logs its set-up, with TRACE every collective.",
        "export NCCL_DEBUG=WARN",
    ),
    Rule("NCCL_ALGO", _several(_always), NOTE, PINNED),
    Rule("NCCL_PROTO", _several(_always), NOTE, PINNED),
    Rule("NCCL_SOCKET_IFNAME", _several(_no_such_interface), HURTS, "No interface is called so: NCCL fails at start."),
    Rule("CUDA_LAUNCH_BLOCKING", _gpu(_on), HURTS, SYNCHRONOUS),
    Rule("HIP_LAUNCH_BLOCKING", _gpu(_amd(_on)), HURTS, SYNCHRONOUS),
    Rule("AMD_SERIALIZE_KERNEL", _gpu(_amd(_above_zero)), HURTS, SYNCHRONOUS),
    Rule("AMD_SERIALIZE_COPY", _gpu(_amd(_above_zero)), HURTS, "Every copy waits for the GPU: steps cannot overlap."),
    Rule("AMD_LOG_LEVEL", _amd(_above_zero), NOTE, "HIP logs its calls; from level 3 on that shows in each step."),
    Rule("HSA_ENABLE_SDMA", _amd(_off), NOTE, "Copies run on compute units, beside the model's kernels."),
    Rule("HSA_OVERRIDE_GFX_VERSION", _amd(_always), HURTS, "Kernels made for another chip: wrong results or a crash."),
    Rule(
        "HIP_FORCE_DEV_KERNARG",
        _amd(_off),
        NOTE,
        "Kernels fetch their arguments from host memory: 2 to 3 us a launch.",
        "export HIP_FORCE_DEV_KERNARG=1",
    ),
    Rule("HIP_FORCE_DEV_KERNARG", _not_amd(_always), NOTE, "Read by ROCm alone."),
    Rule("TORCH_BLAS_PREFER_HIPBLASLT", _not_amd(_always), NOTE, "Read by ROCm builds of torch alone."),
    Rule("TRITON_INTERPRET", _gpu(_on), HURTS, "Kernels run in Python on the CPU, thousands of times slower."),
    Rule("TRITON_INTERPRET", _one(lambda value, survey: _on(value, survey) and not survey.concerned), NOTE,
         "Triton kernels run in Python; headrace's CPU path does not use them."),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _gpu(_on), HURTS, "Each tensor asks the driver for memory, which waits."),
    Rule("PYTORCH_TUNABLEOP_ENABLED", _gpu(_on), NOTE, "Each new matrix shape is tuned when it is met: requests wait."),
    Rule("CUDA_MODULE_LOADING", lambda value, survey: survey.vendor == "nvidia" and value.upper() == "EAGER", NOTE,
         "Every kernel of every library is loaded at start: slower, and hundreds of MiB of GPU memory."),
)  # fmt: skip


def check_variables(survey: Survey) -> Iterator[Finding]:
    environment = survey.machine.environment
    found = False
    for rule in RULES:
        value = environment.get(rule.name)
        if value is not None and rule.when(value, survey):
            found = True
            fix = rule.fix or f"unset {rule.name}"
            yield Finding(rule.name, rule.severity, f"{rule.name}={value}", rule.cost, fix)
    for finding in (*_rccl_names(survey), *_aiter(survey), *_kernel_arguments(survey)):
        found = True
        yield finding
    if not found:
        seen = sorted(name for name in environment if re.match(r"(R|N)CCL_|HSA_|AITER_", name))
        yield ok("variables", f"{', '.join(seen)} do no harm" if seen else "none set that hurts")


def _rccl_names(survey: Survey) -> Iterator[Finding]:
    wrong = [f"RCCL_{name}" for name in RCCL_READS_NCCL if f"RCCL_{name}" in survey.machine.environment]
    if wrong:
        fix = f"unset {' '.join(wrong)}"
        if survey.vendor == "amd":
            exports = (f"export N{name[1:]}={survey.machine.environment[name]}" for name in wrong)
            fix = "; ".join([fix, *exports])
        cost = "RCCL, as NCCL, reads these with the prefix NCCL_ alone: they do nothing."
        yield note(wrong[0], ", ".join(wrong), cost, fix)


def _aiter(survey: Survey) -> Iterator[Finding]:
    environment = survey.machine.environment
    names = sorted(name for name in environment if name.startswith((AITER_MASTER, "AITER_")))
    if not names:
        return
    rocm = survey.vendor == "amd" and survey.torch is not None and bool(survey.torch.hip)
    if not rocm:
        cost = "AITER is AMD's kernel library; without ROCm these do nothing."
        yield note("aiter", ", ".join(names), cost, f"unset {' '.join(names)}")
    elif AITER_MASTER not in environment and any(name.startswith(AITER_MASTER) for name in names):
        cost = f"vLLM asks {AITER_MASTER} first, which is off unless set; headrace reads none of them."
        yield note("aiter", f"{', '.join(names)} without {AITER_MASTER}", cost, f"export {AITER_MASTER}=1")


def _kernel_arguments(survey: Survey) -> Iterator[Finding]:
    name = "HIP_FORCE_DEV_KERNARG"
    if survey.vendor == "amd" and survey.concerned and name not in survey.machine.environment:
        cost = "Kernels fetch their arguments from host memory: 2 to 3 us a launch."
        yield note(name, f"{name} is not set", cost, f"export {name}=1")
