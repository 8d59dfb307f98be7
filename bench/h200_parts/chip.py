"""Measures what this chip reaches at best, in about two seconds, and says which chip and software it is."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from h200_parts.bounds import Ceilings
from headrace.planner.chips import run_tool
from headrace.quantization import gpu_linear

GIB = 2**30
REPEATS = 10


def measure_ceilings(device: torch.device, toy: bool = False) -> Ceilings:
    """Measure memory bandwidth and matmul rates; buffers are freed again. With `toy` the figures mean nothing."""
    copy, read = _bandwidths(GIB // 256 if toy else 4 * GIB, device)
    bf16, fp8 = _matmul_rates(64 if toy else 8192, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(copy=copy, read=read, bf16=bf16, fp8=fp8)


def _bandwidths(size: int, device: torch.device) -> tuple[float, float]:
    """Return the bytes/s of a copy (read and written) and of a sum over `size` bytes."""
    source = torch.randn(size // 4, device=device)
    into = torch.empty_like(source)
    copy = graph_seconds(lambda: torch.add(source, 0, out=into))  # a kernel: graphs copy by other means
    return 2 * size / copy, size / graph_seconds(source.sum)


def _matmul_rates(side: int, device: torch.device) -> tuple[float, float]:
    """Return the operations/s of square matmuls of random numbers in bf16 and in fp8."""
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    a8, b8 = a.to(torch.float8_e4m3fn), b.t().contiguous().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)

    def fp8() -> torch.Tensor:
        return torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * side**3 / graph_seconds(lambda: a @ b), 2 * side**3 / graph_seconds(fp8)


def graph_seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call inside a graph, the median of REPEATS replays. Without a GPU it runs once, and the
    result means nothing."""
    if torch.cuda.is_available():
        return gpu_linear.graph_seconds(lambda one: one(), [call], REPEATS)
    call()
    return 1e-6


def versions() -> dict[str, str]:
    """Return the versions of headrace, torch, Triton, Python and the driver."""
    import headrace

    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    known = {"headrace": headrace.__version__, "torch": torch.__version__, "triton": triton_version}
    known["python"] = platform.python_version()
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        known["driver"] = _first_line(query) or "unknown"
    return known


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"no GPU ({platform.machine()})"


def commit() -> str | None:
    """Return HEAD, with a `+` where tracked files differ from it; None outside a git checkout."""
    head = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    if not head:
        return None
    return head + ("+" if _first_line(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _first_line(command: list[str]) -> str:
    """Return the first line that a command prints; empty where it fails or does not exist."""
    return (run_tool(command).splitlines() or [""])[0].strip()
