"""The device that this process computes on, measured in about a second."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

from hf_gpipe.planner.devices import LINKS, Device, Link

_DTYPES = ("float32", "bfloat16", "float16")
_REPEATS = 3
#: What glibc's allocator keeps of what comes and goes: from a third to a half in eight runs.
_RESERVED_SHARE = 0.45


@cache
def this_machine(device: torch.device, num_processes: int = 1) -> Device:
    """Memory, rate of matrix products by type and bandwidths of a device of this machine.

    They are measured once in a process. A CPU is shared: its memory is divided by the number of processes, and the rate
    is that of this process's threads.

    Args:
        device: a CUDA device or the CPU.
        num_processes: processes that will share a CPU's memory.
    """
    rates = {dtype: _matrix_rate(getattr(torch, dtype), device) for dtype in _DTYPES}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        return Device(torch.cuda.get_device_name(device), memory, rates, _memory_rate(device), LINKS["pcie4"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_processes
    return Device("this machine", memory, rates, _memory_rate(device), _loopback(), _RESERVED_SHARE)


def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a product that is large enough, and on a CPU still quick."""
    size = 4096 if device.type == "cuda" else 512
    left, right = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _seconds(lambda: left @ right, device)


def _memory_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(1 << 24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loopback(size_bytes: int = 1 << 25) -> Link:
    """Measure the link between two processes of this machine through a socket, as gloo uses it."""
    sender, receiver = socket.socketpair()
    data, buffer = bytes(size_bytes), bytearray(1 << 20)

    def drain() -> None:
        left = size_bytes
        while left:
            left -= receiver.recv_into(buffer)

    with sender, receiver:
        reader = threading.Thread(target=drain)
        start = time.perf_counter()
        reader.start()
        sender.sendall(data)
        reader.join()
        seconds = time.perf_counter() - start
    return Link("loopback", size_bytes / seconds, 1e-4)
