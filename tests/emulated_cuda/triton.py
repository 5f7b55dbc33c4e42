"""liger-kernel's kernels without a GPU: triton's interpreter computes them, also on the memory of emulated devices.

It needs the packages liger-kernel and triton, and the variable TRITON_INTERPRET=1 from the start of the process. Import
it before liger-kernel. The interpreter computes float32 and float16 as a GPU does, up to the order of summation, and no
bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

_convert: Any = interpreter._implicit_cvt


def _with_numbers(argument: Any) -> Any:
    """A kernel's argument as the interpreter takes it: liger's kernels call methods of numbers too."""
    if not isinstance(argument, float):
        return _convert(argument)
    handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
    return tl.tensor(handle, tl.float32)


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]  # triton compiles it, and takes annotations for its own
    return 1.0 / tl.sqrt(x)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 1 - 2 / (tl.exp(2 * x) + 1)


# What a GPU's own library computes, the interpreter does not have.
libdevice.rsqrt, libdevice.tanh = _rsqrt, _tanh
interpreter._implicit_cvt = _with_numbers
# Tensors of emulated devices are in CPU memory, where the interpreter reads and writes them.
interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
