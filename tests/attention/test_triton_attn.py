"""Which layers' long prompts go to the kernel of kernels/prefill.py."""

from dataclasses import replace

import pytest
import torch

from headrace.attention.spec import AttentionSpec
from headrace.attention.triton_attn import TritonAttention

SPEC = AttentionSpec(32, 8, 128, 128**-0.5, 16, "bfloat16")
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("changes", "dtype", "cache_dtype", "takes"),
    [
        ({}, BF16, BF16, True),
        ({}, FP16, FP16, True),
        ({"head_dim": 64}, BF16, BF16, True),
        ({}, FP32, FP32, False),
        ({}, BF16, FP8, True),
        ({}, FP32, FP8, False),
        ({}, BF16, FP16, False),
        ({"head_dim": 96}, BF16, BF16, False),
        ({"block_size": 1}, BF16, BF16, False),
        ({"num_heads": 64, "num_kv_heads": 1}, BF16, BF16, True),
        ({"num_heads": 128, "num_kv_heads": 1}, BF16, BF16, False),
        ({"sliding_window": 100}, BF16, BF16, False),
        ({"batch_invariant": True}, BF16, BF16, False),
    ],
)
def test_only_layers_that_it_was_written_for_go_to_the_copy_engine(changes, dtype, cache_dtype, takes):
    backend = TritonAttention()
    backend.copy_engine = True
    assert backend.prefills_by_copy_engine(replace(SPEC, **changes), dtype, cache_dtype) == takes
    backend.copy_engine = False
    assert not backend.prefills_by_copy_engine(SPEC, BF16, BF16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is a matter of the GPU")
def test_a_machine_without_such_a_gpu_has_none():
    assert not TritonAttention().copy_engine
