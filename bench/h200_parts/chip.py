"""What this chip gives at best, measured in about two seconds, and which chip and software it is."""

from __future__ import annotations

import itertools
import platform
import subprocess
import time
from collections.abc import Callable
from statistics import median

import torch

from h200_parts.bounds import Ceilings

GIB = 2**30
REPEATS = 10


def measure_ceilings(device: torch.device, toy: bool = False) -> Ceilings:
    """Buffers are freed again. `toy`: sizes for a smoke run, whose figures mean nothing."""
    copy, read = _bandwidths(GIB // 256 if toy else 4 * GIB, device)
    bf16, fp8 = _matmul_rates(64 if toy else 8192, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(copy=copy, read=read, bf16=bf16, fp8=fp8)


def _bandwidths(size: int, device: torch.device) -> tuple[float, float]:
    """Bytes/s of a copy, read and written, and of a sum, over `size` bytes."""
    source = torch.randn(size // 4, device=device)
    into = torch.empty_like(source)
    return 2 * size / _seconds(lambda: into.copy_(source), device), size / _seconds(source.sum, device)


def _matmul_rates(side: int, device: torch.device) -> tuple[float, float]:
    """Operations/s of cubes of random numbers in bf16 and in fp8."""
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * side**3 / _seconds(lambda: a @ b, device), 2 * side**3 / _seconds(fp8, device)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of REPEATS, after three to warm up."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    return median(first.elapsed_time(last) / 1000 for first, last in itertools.pairwise(events))


def versions() -> dict[str, str]:
    import headrace

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    found = {"headrace": headrace.__version__, "torch": torch.__version__, "triton": triton_version}
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = _said(query) or "unknown"
    return found


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"no GPU ({platform.machine()})"


def commit() -> str | None:
    """With a `+` where tracked files differ from it; None outside a git checkout."""
    head = _said(["git", "rev-parse", "--short=12", "HEAD"])
    if not head:
        return None
    return head + ("+" if _said(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _said(command: list[str]) -> str:
    """The command's first line; empty where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.splitlines() or [""])[0].strip()
