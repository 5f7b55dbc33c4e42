"""The functions of `torch.cuda` on emulated devices. torch's own need a build with CUDA."""

from __future__ import annotations

import ctypes
import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import torch

from tests.emulated_cuda.native import MEMORY_BYTES, NUM_DEVICES, native

Device = torch.device | str | int | None


def index_of(device: Device) -> int:
    """The number of a device; None or "cuda" is the current one."""
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        assert device.type == "cuda", f"{device} is not a CUDA device"
        if device.index is not None:
            return device.index
    return torch._C._accelerator_getDeviceIndex()


def set_device(device: Device) -> None:
    torch._C._accelerator_setDeviceIndex(index_of(device))


def exchange_device(index: int) -> int:
    """Make a device the current one; returns the one before. A negative number changes nothing."""
    before = index_of(None)
    if index >= 0:
        set_device(index)
    return before


def current_stream(device: Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(index_of(device))


def stream(chosen: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if chosen is None else chosen


class Stream(torch.Stream):
    """A stream of a CUDA device."""

    def __new__(cls, device: Device = None, priority: int = 0, **values: Any) -> Any:
        return torch.Stream(torch.device("cuda", index_of(device)), priority=priority)


class Event(torch.Event):
    """An event of a CUDA device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        return torch.Event("cuda", enable_timing=enable_timing)


def properties(device: Device = None) -> SimpleNamespace:
    index = index_of(device)
    return SimpleNamespace(
        name="emulated CUDA device",
        total_memory=MEMORY_BYTES,
        major=9,
        minor=0,
        multi_processor_count=132,
        uuid=UUID(int=index + 1),
    )


def allocated(device: Device = None) -> int:
    return native().emulated_cuda_allocated(index_of(device))


def peak(device: Device = None) -> int:
    return native().emulated_cuda_peak(index_of(device))


def generator(index: int) -> torch.Generator:
    """Make the generator from which operations on a device draw."""
    made = torch.Generator(device=f"cuda:{index}")
    native().emulated_cuda_use_generator(index, ctypes.c_void_p(made._cdata))
    return made


def register_host(address: int, size: int, flags: int) -> int:
    """Pin CPU memory; returns cudaSuccess."""
    native().emulated_cuda_register_host(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return 0


def patch() -> None:
    """Put these functions into `torch.cuda`."""
    cuda: Any = torch.cuda
    replaced = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: index_of(None),
        "set_device": set_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "stream": stream,
        "set_stream": lambda chosen: torch._C._accelerator_setStream(chosen),
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(index_of(device)),
        "default_generators": tuple(generator(index) for index in range(NUM_DEVICES)),
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_properties": properties,
        "get_device_name": lambda device=None: properties(device).name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda device, peer: True,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: native().emulated_cuda_reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: (MEMORY_BYTES - allocated(device), MEMORY_BYTES),
    }
    originals = {name: getattr(cuda, name) for name in replaced}
    cuda._initialized = True
    cuda._cudart = SimpleNamespace(cudaError=SimpleNamespace(success=0), cudaHostRegister=register_host)
    # Other modules of torch have imported some of these.
    for module in [one for name, one in sys.modules.items() if name.startswith("torch.")]:
        for name, original in originals.items():
            if vars(module).get(name) is original:
                setattr(module, name, replaced[name])
    torch.cuda.nvtx._nvtx = SimpleNamespace(  # type: ignore[attr-defined]
        rangePushA=lambda text: 0,
        rangePop=lambda: 0,
        rangeStartA=lambda text: 0,
        rangeEnd=lambda number: None,
        markA=lambda text: None,
    )
