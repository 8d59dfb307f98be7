"""Makes Triton's interpreter right for bf16, which it treats as raw 16-bit integers: dots, sums, comparisons and casts
go through float32 and round as torch does. Casts from and to fp8, a few percent of which it gets wrong, are torch's.

Dots are added up here, since numpy leaves them to the machine's BLAS, which picks an order of summation by the shape
and by the processor: two tiles of one kernel would then differ in their last bits for no reason of the kernel's."""

import os

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.interpreter import quicken

if os.environ.get("TRITON_INTERPRET") != "1":  # a file named on the command line comes here past collect_ignore
    raise pytest.UsageError(
        "tests/kernels/interpreted needs TRITON_INTERPRET=1 in the environment; without it Triton looks for a GPU"
    )

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
plain = {name: getattr(Builder, name) for name in ("binary_op", "unary_op")}
plain_convert = interpreter._convert_float
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp8e4b8": torch.float8_e4m3fnuz}


def is_bf16(handle):
    return getattr(handle.dtype.scalar, "name", "") == "bf16"


def widen(bits):
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    rounded = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def wide(handle):
    return Handle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def convert_float(value, source, target, rounding):
    names = {source.name, target.name}
    if not names & {"bf16", *FP8} or names - {"bf16", "fp32", "fp16", "fp64", *FP8}:
        return plain_convert(value, source, target, rounding)
    if source.name in FP8:
        numbers = torch.from_numpy(np.array(value).view(np.uint8)).view(FP8[source.name]).float().numpy()
    else:
        numbers = widen(value) if source.name == "bf16" else np.ascontiguousarray(value)
    if numbers.dtype.kind == "u":
        numbers = numbers.view({2: np.float16, 4: np.float32, 8: np.float64}[numbers.dtype.itemsize])
    if target.name == "bf16":
        return narrow(numbers).reshape(value.shape)
    if target.name in FP8:
        rounded = torch.from_numpy(numbers.astype(np.float32)).to(FP8[target.name])
        return rounded.view(torch.uint8).numpy().reshape(value.shape)
    kind = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[target.name]
    converted = numbers.astype(kind)
    return converted.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[converted.itemsize]).reshape(value.shape)


def binary_op(self, left, right, op):
    if not (is_bf16(left) and is_bf16(right)):
        return plain["binary_op"](self, left, right, op)
    result = op(widen(left.data), widen(right.data))
    if result.dtype.kind == "f":
        return Handle(narrow(result).reshape(result.shape), tl.bfloat16)
    return Handle(result, tl.int1)


def unary_op(self, argument, op):
    if not is_bf16(argument):
        return plain["unary_op"](self, argument, op)
    return Handle(narrow(op(widen(argument.data))), tl.bfloat16)


def numbers(handle):
    if handle.dtype.scalar.is_fp8():
        return convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
    return wide(handle).data


def create_dot(self, left, right, total, *options):
    """Each sum on its own, from the first product to the last, by one multiplication and one addition of float64 each,
    which IEEE 754 leaves no choice: its bits depend on its row and column alone. Rounded once, at the end."""
    rows, columns = numbers(left), numbers(right)
    exact = np.float64 if total.data.dtype.kind == "f" else total.data.dtype
    rows, columns = np.moveaxis(rows.astype(exact), -1, 0), np.moveaxis(columns.astype(exact), -2, 0)
    terms = np.empty((len(rows) + 1, *total.data.shape), exact)
    terms[0] = total.data
    with np.errstate(invalid="ignore", over="ignore"):
        np.multiply(rows[..., None], columns[..., None, :], out=terms[1:])
        sums = np.add.reduce(terms, axis=0)  # over the outermost axis: one after the other
        return Handle(sums.astype(total.data.dtype), total.dtype.scalar)


quicken()
torch.testing._comparison._HAS_DTENSOR = False  # of distributed tensors there are none, and their import takes seconds
interpreter._convert_float = convert_float
Builder.binary_op, Builder.unary_op, Builder.create_dot = binary_op, unary_op, create_dot


@pytest.fixture
def fresh_inputs_and_poisoned_outputs():
    """Inputs that no run had before, and memory of torch.empty that is full of NaN."""
    torch.seed()
    torch.set_deterministic_debug_mode("warn")  # the other function for it first imports a compiler
    yield
    torch.set_deterministic_debug_mode("default")
