"""Compiles the device's C++ once, into a cache. It does not import torch, which must be loaded after the device."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC")


class NoCompilerError(Exception):
    """The device cannot be built here."""


def torch_folder() -> Path:
    """The folder of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None
    return Path(found.origin).parent


def library() -> Path:
    """The device as a shared library, compiled if this version of it was not yet.

    Raises:
        NoCompilerError: there is no C++ compiler, or the system is not Linux; the message says which.
    """
    if sys.platform != "linux":
        raise NoCompilerError(f"the emulated CUDA device is built on Linux only; this is {sys.platform}")
    key = hashlib.sha256(SOURCE.read_bytes() + repr((FLAGS, version("torch"), str(torch_folder()))).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_gpipe" / "emulated_cuda"
    built = cache / f"{key.hexdigest()[:16]}.so"
    if built.exists():
        return built
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError("the emulated CUDA device needs a C++ compiler, and there is none; install g++")
    cache.mkdir(parents=True, exist_ok=True)
    # Several processes may want it at the same time; the first one compiles.
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile(compiler, built)
    return built


def _compile(compiler: str, target: Path) -> None:
    folder = torch_folder()
    includes = [f"-I{folder / 'include'}", f"-I{folder / 'include/torch/csrc/api/include'}"]
    links = [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    partial = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(partial), *links]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise RuntimeError(f"the emulated CUDA device does not compile:\n{' '.join(command)}\n{outcome.stderr[-4000:]}")
    partial.replace(target)
