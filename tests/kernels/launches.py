"""`python -m tests.kernels.launches TARGET`: what a launcher is given when attention runs twice over like tensors, then
over a slice that begins elsewhere, over another type, and over a cache that 31 bits do not address. One JSON line: a
list of [grid and arguments] for each, and how many kernels were compiled by then."""

import json
import sys

import torch

from headrace.kernels import _triton, attention
from headrace.kernels.attention_config import plan_attention
from tests.kernels.offline_target import TARGETS, OfflineDriver, compiled, use_target


def main() -> None:
    target = sys.argv[1]
    use_target(target)
    _triton.DEVICE_FAMILY = TARGETS[target][0].backend
    given: list[list[object]] = []

    def record(self, x, y, z, stream, function, metadata, told, enter, leave, *arguments):
        given.append([x, y, z, *arguments])

    OfflineDriver.launcher_cls.__call__ = record
    numbers, cache = torch.zeros(64, dtype=torch.int32), torch.zeros(2, 4, 16, 2, 64, dtype=torch.bfloat16)
    plan = plan_attention(4, 4, 4, 4096, 8, 2, 64, 2, _triton.DEVICE_FAMILY, 132)

    def attend(q, kv_cache):
        given.clear()
        out = torch.zeros(q.shape, dtype=q.dtype)
        table = numbers.view(4, 16)
        attention.paged_attention(
            q, kv_cache, table, numbers[:4], numbers[:5], numbers[:4], 1.0, 1, 64, None, out, plan
        )
        return [
            [str(x.dtype) + str(tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in launch]
            for launch in given
        ]

    q = torch.zeros(5 * 8 * 64 + 1, dtype=torch.bfloat16)
    aligned, shifted = q[: 4 * 8 * 64].view(4, 8, 64), q[1 : 4 * 8 * 64 + 1].view(4, 8, 64)
    first, again = attend(aligned, cache), attend(aligned, cache)
    before = len(compiled(attention._attention_kernel))
    elsewhere = attend(shifted, cache)
    other = attend(aligned.half(), cache.half())
    kernels = [before, len(compiled(attention._attention_kernel)), len(_triton._LAUNCHED)]
    attend(aligned, torch.empty(2, 2**19, 16, 2, 64, dtype=torch.bfloat16))  # 4 GiB that nobody touches
    kernels.append(len(compiled(attention._attention_kernel)))
    print(json.dumps({"first": first, "again": again, "elsewhere": elsewhere, "other": other, "kernels": kernels}))


if __name__ == "__main__":
    main()
