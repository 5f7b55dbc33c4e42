"""Checks that the machine is quiet, and reads a process's own memory. Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from importlib import metadata
from pathlib import Path

import psutil
import torch

from hf_gpipe.runtime.memory import peak_memory_bytes, reset_peak_memory

#: Cores' worth of other work below which the machine counts as quiet, and for how long it is watched, in seconds.
QUIET_CORES, WATCH_SECONDS = 0.25, 1.5


def wait_until_quiet(limit_seconds: float) -> bool:
    """Wait until nothing else computes; False where that did not happen within the limit."""
    end = time.monotonic() + limit_seconds
    while time.monotonic() < end:
        if psutil.cpu_percent(WATCH_SECONDS) * (psutil.cpu_count() or 1) < 100 * QUIET_CORES:
            return True
    return False


def reset_peak(device: str = "cpu") -> None:
    """Give back what was freed, and let this process's peak, or that of its GPU, begin at what it holds now."""
    reset_peak_memory([torch.device(device)])


def peak_bytes(device: str = "cpu") -> int:
    """The most memory this process has held since `reset_peak` (VmHWM), or torch on its GPU."""
    return peak_memory_bytes([torch.device(device)])


def resident_bytes() -> int:
    """The memory that this process holds now (VmRSS)."""
    return status_bytes("VmRSS")


def status_bytes(key: str) -> int:
    """A line of this process's status, such as RssAnon: what it allocated itself, without the pages of mapped files."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def wake_up_on_time() -> None:
    """Let sleeps of this thread end when they should, not up to 50 microseconds later (PR_SET_TIMERSLACK)."""
    set_timer_slack, nanoseconds = 29, 1
    ctypes.CDLL(None).prctl(set_timer_slack, nanoseconds)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed: else it gives pages back, and whoever comes next pays for new ones."""
    trim_threshold, mmap_threshold = -1, -3
    for option, num_bytes in ((trim_threshold, 1 << 30), (mmap_threshold, 32 << 20)):
        ctypes.CDLL(None).mallopt(option, num_bytes)


def environment() -> dict[str, str | int]:
    """The environment that figures depend on besides the code."""
    return {
        **{"cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "python": platform.python_version()},
        **{name: metadata.version(name) for name in ("torch", "transformers")},
    }
