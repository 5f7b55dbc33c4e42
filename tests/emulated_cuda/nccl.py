"""torch.distributed with the backend "nccl" on emulated CUDA devices. The rules that it keeps are in nccl.cpp."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.emulated_cuda.build import library
from tests.emulated_cuda.native import native


class Options(SimpleNamespace):
    """Of a group on NCCL, as torch fills them in; `_timeout` is how long an operation may wait for the others."""


def patch() -> None:
    """Give torch.distributed the backend."""
    extension = _load()
    extension.ProcessGroupNCCL.Options = Options
    c10d: Any = dist.distributed_c10d
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    for module in (c10d, dist):
        module.ProcessGroupNCCL = extension.ProcessGroupNCCL
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    native().emulated_cuda_wait_for_messages_by(ctypes.c_void_p(extension.drain()))


def _load() -> ModuleType:
    name = "emulated_nccl"
    loader = importlib.machinery.ExtensionFileLoader(name, str(library("nccl")))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def transport_of(store: dist.Store, options: Options) -> Callable[[str, int, int], dist.Backend]:
    """For a group: (name, rank, size) -> what moves the bytes of one of its communicators."""
    return lambda name, rank, size: dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options._timeout)
