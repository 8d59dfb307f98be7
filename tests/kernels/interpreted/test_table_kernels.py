"""Every kernel of the table against its reference, on the small sizes of bench/kernel_sweeps.py."""

import inspect

import pytest
import torch
from kernel_sweeps import SWEEPS, swept
from triton.runtime import interpreter

from headrace.kernels.cases import Inputs
from headrace.kernels.fp8 import Rounding
from headrace.kernels.table import REFERENCE_KERNELS, TRITON_KERNELS
from tests.sampled import cases

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HAS_FNUZ = "get_fp8e4b8_ty()" in inspect.getsource(interpreter)  # not in 3.6
FP8 = [torch.float8_e4m3fn] + [torch.float8_e4m3fnuz] * HAS_FNUZ
pytestmark = pytest.mark.usefixtures("fresh_inputs_and_poisoned_outputs")


@pytest.mark.parametrize(
    ("name", "size", "dtype"), [case for name, sweep in SWEEPS.items() for case in cases([name], sweep.small, DTYPES)]
)
def test_a_kernel_equals_its_reference(name, size, dtype):
    for fp8 in FP8 if "quantize" in name else (None,):
        for error, bound in swept(name, Inputs(dtype, torch.device("cpu"), torch.seed(), fp8), size):
            assert error <= bound


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_rows_of_zeros_of_tiny_and_of_impossible_numbers(fp8):
    x = torch.randn(6, 40)
    x[0] = 0
    x[1] *= 1e-30
    x[2, 7] = float("nan")
    x[3, 7] = float("inf")
    x[4] = 3e38
    for kernels in (TRITON_KERNELS, REFERENCE_KERNELS):
        back = kernels.quantize(x, Rounding(fp8)).dequantize(torch.float32)
        assert (back[:2] == 0).all()
        assert back[2, 7].isnan()
        assert back[3].isnan().any()
        torch.testing.assert_close(back[4:], x[4:], rtol=0.07, atol=0.01)
