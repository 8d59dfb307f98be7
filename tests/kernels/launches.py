"""`python -m tests.kernels.launches TARGET`: what a launcher is given when attention runs twice over like tensors, then
over a slice that begins elsewhere, over another type, and over a cache that 31 bits do not address; and in the second
layer of a step, which repeats what the first launched, beside the same layer in a step of its own; and how often a
kernel is compiled for numbers that it is compiled for by value, and for others. One JSON line:
launches are lists of grid and arguments, tensors by name."""

import json
import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl

from headrace.attention import triton_attn
from headrace.attention.metadata import AttentionMetadata
from headrace.attention.spec import AttentionSpec
from headrace.kernels import attention, launch
from headrace.kernels.attention_config import plan_attention
from headrace.kernels.paged import Sequences
from tests.kernels.offline_target import TARGETS, OfflineDriver, compiled, use_target, without_code

given: list[list[object]] = []
FAR = 10**6
"""Whatever is larger is an address."""


def record(self, x, y, z, stream, function, metadata, told, enter, leave, *arguments):
    given.append([x, y, z, *arguments])


def said(names: dict[str, torch.Tensor]) -> list[list[object]]:
    """What was given since, with addresses as name and offset; `own` is what attention made for itself."""

    def name(argument: object) -> object:
        base = getattr(argument, "base", argument)  # a descriptor's
        address = base.data_ptr() if isinstance(base, torch.Tensor) else base
        if not isinstance(address, int) or address < FAR:
            return argument if isinstance(argument, (int, float, type(None))) else str(argument)
        for key, tensor in names.items():
            if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes:
                return f"{key} + {address - tensor.data_ptr()}"
        return "own"

    found = [[name(argument) for argument in one] for one in given]
    given.clear()
    return found


def attention_twice(family: str) -> dict[str, object]:
    numbers, cache = torch.zeros(64, dtype=torch.int32), torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16)
    plan = plan_attention(4, 4, 4, 4096, 8, 2, 64, 2, family, 132)

    def attend(q, kv_cache):
        out, table = torch.zeros(q.shape, dtype=q.dtype), numbers.view(4, 16)
        sequences = Sequences(table, numbers[:4], numbers[:5], numbers[:4])
        attention.paged_attention(q, kv_cache, sequences, 1.0, None, None, out, plan=plan)
        return said({"out": out, "q": q, "cache": kv_cache, "numbers": numbers})

    q = torch.zeros(5 * 8 * 64 + 1, dtype=torch.bfloat16)
    aligned, shifted = q[: 4 * 8 * 64].view(4, 8, 64), q[1 : 4 * 8 * 64 + 1].view(4, 8, 64)
    found = {"first": attend(aligned, cache), "again": attend(aligned, cache)}
    before = len(compiled(attention._attention_kernel))
    found["elsewhere"] = attend(shifted, cache)
    found["other"] = attend(aligned.half(), cache.half())
    kernels = [before, len(compiled(attention._attention_kernel)), len(launch._LAUNCHED)]
    attend(aligned, torch.empty(2, 2**19, 16, 2, 64, dtype=torch.bfloat16))  # 4 GiB that nobody touches
    return found | {"kernels": [*kernels, len(compiled(attention._attention_kernel))]}


def second_layers(copy_engine: bool) -> dict[str, list[object]]:
    """Of steps of prompts beside decodes -> [in a step whose first layer was launched before, in a step of its own]."""
    backend = triton_attn.TritonAttention()
    backend.copy_engine = copy_engine
    spec = AttentionSpec(8, 2, 128, 0.125, 16, "bfloat16", sinks=True)
    found = {}
    for name, num_decodes, num_tokens, dtype in (
        ("decodes in parts", 3, 3, torch.bfloat16),
        ("prompts beside decodes", 3, 1600, torch.bfloat16),
        ("of an fp8 cache", 3, 1600, torch.float8_e4m3fn),
        ("a lone prompt", 0, 1600, torch.bfloat16),
    ):
        quantized = dtype.itemsize == 1
        told = replace(spec, kv_cache_dtype="fp8_e4m3" if quantized else "auto")
        num_reqs = num_decodes + (num_tokens > num_decodes)
        numbers, table = torch.zeros(num_reqs + 1, dtype=torch.int32), torch.zeros(4, 128, dtype=torch.int32)
        longs = torch.zeros(num_tokens, dtype=torch.int64)

        def metadata(num_reqs=num_reqs, num_tokens=num_tokens, num_decodes=num_decodes, n=numbers, t=table, at=longs):
            longest = max(1, num_tokens - num_decodes)
            counts = (num_reqs, num_tokens, longest, 1600, num_decodes, 1600)
            return AttentionMetadata(n[:-1], n, n[:-1], at, (at,), (t,), *counts)

        arena = torch.zeros(80, 3, 2, 16, 2, 128, dtype=dtype)

        def layer(place: int, shift: int, num_tokens=num_tokens, arena=arena, quantized=quantized):
            """Its own tensors, `shift` elements behind a multiple of 16 bytes."""
            sized = torch.zeros(shift + num_tokens * 8 * 128, dtype=torch.bfloat16)[shift:].view(num_tokens, 8, 128)
            cache = arena[:, place].transpose(0, 1)
            scale = torch.ones(2) if quantized else None
            return sized, torch.zeros_like(sized), cache, scale, torch.zeros(8, dtype=torch.bfloat16)

        def attend(tensors, step, told=told, numbers=numbers, table=table):
            out, q, cache, scale, sinks = tensors
            assert backend.forward(q, cache, step, told, scale, out, sinks) is out
            names = {"out": out, "q": q, "cache": cache, "numbers": numbers, "table": table, "sinks": sinks}
            return said(names | ({} if scale is None else {"scale": scale}))

        first, second, shifted = layer(0, 0), layer(1, 0), layer(2, 1)
        step = metadata()
        attend(first, step)
        recorded = step.plan[told].recording is not None
        kernels = len(launch._LAUNCHED)
        pairs = [[attend(second, step), attend(second, metadata())]]
        assert len(launch._LAUNCHED) == kernels
        pairs.append([attend(shifted, step), attend(shifted, metadata())])
        found[name] = [recorded, pairs]
    return found


@triton.jit(do_not_specialize=["free"])
def numbers_kernel(out_ptr, told, free, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, told + free + lane)


def compiled_for() -> list[object]:
    """(told, free, kernels so far, what the launcher was given behind the tensor), launch by launch."""
    out, found = torch.zeros(16, dtype=torch.int32), []
    for told, free in ((1, 5), (3, 5), (3, 16), (16, 5), (32, 7), (5, 1), (1, 7)):
        launch.launch(numbers_kernel, (1, 1, 1), (out, told, free), {"BLOCK": 16})
        found.append([told, free, len(compiled(numbers_kernel)), said({"out": out})[0][4:6]])
    return found


def main() -> None:
    target = sys.argv[1]
    use_target(target)
    triton.knobs.runtime.add_stages_inspection_hook = without_code
    launch.DEVICE_FAMILY = family = triton_attn.DEVICE_FAMILY = TARGETS[target][0].backend
    triton_attn.multiprocessor_count = lambda device: 132
    OfflineDriver.launcher_cls.__call__ = record
    print(json.dumps(attention_twice(family) | {"numbers": compiled_for(), "layers": second_layers(target == "sm_90")}))


if __name__ == "__main__":
    main()
