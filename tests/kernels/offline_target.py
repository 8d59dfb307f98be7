"""Compiles Triton kernels for a GPU that is not here: a stand-in driver names the target, and launches do nothing.

One target a process, since a kernel keeps what it compiled by device.
"""

import os
import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    # name: (target, shared memory of a program in bytes)
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 163840),
}


class OfflineDriver:
    class launcher_cls:
        def __init__(self, *args, **kwargs):
            pass

        def __call__(self, *args, **kwargs):
            pass

    class utils:
        @staticmethod
        def load_binary(*args):
            return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads

    def __init__(self, name):
        self.target, shared = TARGETS[name]
        properties = {"max_shared_mem": shared, "warpSize": self.target.warp_size, "multiprocessor_count": 132}
        self.utils.get_device_properties = staticmethod(lambda device: properties)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def set_current_device(self, device):
        pass

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind):
        return kind

    def get_benchmarker(self):
        return None


def use_target(name):
    triton.knobs.compilation.disable_line_info = True  # a fifth of the time, of which no instruction depends
    driver.set_active(OfflineDriver(name))


def without_code(*stages_of_one):
    """Triton's hook into what it compiles: kernels end as Triton's own program, which says what they are launched with,
    in a quarter of the time. Without arguments: what sets them apart in its cache."""
    if not stages_of_one:
        return "without code", "without code"
    _, stages, *_ = stages_of_one
    *texts, binary = list(stages)[list(stages).index("llir") :]

    def end(source, metadata):
        metadata |= {"name": "kernel", "shared": 0, "tmem_size": None}
        for kind in ("global", "profile"):
            metadata |= {f"{kind}_scratch_size": 0, f"{kind}_scratch_align": 1}
        return ""

    stages |= {**dict.fromkeys(texts, end), binary: lambda source, metadata: b""}
    return None


def shorten_all_but_first(begun):
    """Have Triton compile the first variant of each kernel to the end, and further ones `without_code`. `begun`: names
    of kernels that have had their first; whoever empties it begins anew."""
    short = False

    def stages(*stages_of_one):
        if short:
            return without_code(*stages_of_one)
        return None if stages_of_one else ("", "")

    def before(*, fn, **_):
        nonlocal short
        short = fn.name in begun
        begun.add(fn.name)

    def after(**_):
        nonlocal short
        short = False  # what a launch looks for among the kernels of this process says nothing of it

    triton.knobs.runtime.add_stages_inspection_hook = stages
    triton.knobs.runtime.jit_cache_hook, triton.knobs.runtime.jit_post_compile_hook = before, after


def reached_the_end(found):
    return any(found.asm.get(binary) for binary in ("cubin", "hsaco"))


def compiled(kernel):
    """What `kernel` has compiled so far."""
    return [found for cache in kernel.device_caches.values() for found in cache[0].values()]


def spills(found):
    """Bytes of stack (NVIDIA) or registers (AMD) that the compiled kernel spills, out of the binary's own record."""
    if "amdgcn" in found.asm:
        return sum(map(int, re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", found.asm["amdgcn"])))
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.findall(r"(?:STACK|LOCAL):(\d+)", report)
    if not usage:
        raise RuntimeError(f"cuobjdump names no stack: {report}")
    return sum(map(int, usage))


def loads_before_it_waits(found):
    """Whether a kernel for NVIDIA's GPUs begins to load before it first waits for the kernel in front of it."""
    text = found.asm.get("ptx", "")
    first = re.search(r"cp\.async\.c[ag]|ld\.global", text)
    return first is not None and first.start() < text.find("griddepcontrol.wait")


def trusts_its_cache_early(found):
    """Whether a kernel for NVIDIA's GPUs loads by its processor's own cache before it first waits."""
    return re.search(r"ld\.global\.[bv]", found.asm.get("ptx", "").partition("griddepcontrol.wait")[0]) is not None
