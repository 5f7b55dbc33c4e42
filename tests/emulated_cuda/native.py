"""The C++ part of the emulated devices, once this process has loaded it."""

from __future__ import annotations

import ctypes

from tests.emulated_cuda.build import library, torch_folder

NUM_DEVICES = 8
MEMORY_BYTES = 80 << 30

_library: ctypes.CDLL | None = None


def load() -> None:
    """Load the C++ part. torch asks for CUDA's hooks and guards as soon as it is loaded itself."""
    global _library
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(library("device")))
    for name in ("emulated_cuda_allocated", "emulated_cuda_peak"):
        getattr(_library, name).restype = ctypes.c_int64


def is_loaded() -> bool:
    """Whether this process has the emulated devices."""
    return _library is not None


def native() -> ctypes.CDLL:
    """The C++ part."""
    assert _library is not None, "this process has no emulated CUDA device"
    return _library
