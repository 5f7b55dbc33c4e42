"""The memory of this process: the most that it has held, on its CUDA devices or in main memory, and mapped files."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import tempfile
from collections.abc import Collection
from io import FileIO
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: Tells Linux to begin a process's peak at what it holds now.
_PEAK = "5"
#: A tensor in memory that several share begins at a multiple of it, as memory that CUDA hands out.
ALIGNMENT = 512


def aligned(size: int) -> int:
    """A number of bytes rounded up, so that another tensor can begin after them."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def reserved_file(folder: Path, size: int) -> FileIO:
    """Open a new file of so many zeros, which has its room, for memory that is mapped.

    It has no name, so it is gone with the last process that has it open or maps it, however that ends.

    Raises:
        OSError: the folder cannot be written to, or has too little room.
    """
    file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (the caller closes it)
    try:
        # Without it a write to memory that is not there would end the process.
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError:
        file.close()
        raise
    return file


def path_of(file: FileIO) -> str:
    """The path under which processes of this user open a file without a name, while it is open here."""
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"


def peak_memory_bytes(devices: Collection[torch.device]) -> int:
    """The highest memory of this process: the most of any of its CUDA devices, or its resident set on the CPU."""
    on_cuda = [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]
    if on_cuda:
        return max(on_cuda)
    if _STATUS.exists():
        # Unlike getrusage, it does not begin with the peak of the process that started this one.
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(devices: Collection[torch.device]) -> int:
    """Let the peak begin at what this process holds now, after what was freed is given back.

    Returns:
        The new peak in bytes, as `peak_memory_bytes` gives it.

    Raises:
        OSError: the peak of main memory can be reset on Linux alone.
    """
    gc.collect()
    on_cuda = [device for device in devices if device.type == "cuda"]
    for device in on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    if not on_cuda:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text(_PEAK)
    return peak_memory_bytes(devices)
