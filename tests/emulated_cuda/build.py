"""Compiles the C++ of this folder once, into a cache. It does not import torch, which is loaded after the device."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
#: name of a library -> what it is linked with.
LIBRARIES = {"device": ("torch_cpu", "c10"), "nccl": ("torch_cpu", "c10", "torch_python")}
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC")


class NoDeviceError(Exception):
    """There can be no emulated device here."""


class NoCompilerError(NoDeviceError):
    """The device cannot be built here."""


@cache
def torch_folder() -> Path:
    """The folder of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None
    return Path(found.origin).parent


def library(name: str) -> Path:
    """The shared library made from a C++ file of this folder. All are compiled if this version of them was not yet.

    Raises:
        NoDeviceError: the installed torch has real CUDA devices.
        NoCompilerError: there is no C++ compiler, or the system is not Linux; the message says which.
    """
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise NoDeviceError("the emulated CUDA device needs a build of torch without CUDA, and this one has it")
    if sys.platform != "linux":
        raise NoCompilerError(f"the emulated CUDA device is built on Linux only; this is {sys.platform}")
    targets = {one: _target(one) for one in LIBRARIES}
    if not all(target.exists() for target in targets.values()):
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        if compiler is None:
            raise NoCompilerError("the emulated CUDA device needs a C++ compiler, and there is none; install g++")
        _compile(compiler, targets)
    return targets[name]


def _target(name: str) -> Path:
    """Where the library is kept, under a digest of all that it is made from."""
    source = (FOLDER / f"{name}.cpp").read_bytes()
    made_from = repr((source, FLAGS, LIBRARIES[name], version("torch"), str(torch_folder()), sys.version)).encode()
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_gpipe" / "emulated_cuda"
    return cache_folder / f"{name}-{hashlib.sha256(made_from).hexdigest()[:16]}.so"


def _compile(compiler: str, targets: dict[str, Path]) -> None:
    folder = next(iter(targets.values())).parent
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes may want them at the same time; the first one compiles.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = {}
        for name, target in targets.items():
            if not target.exists():
                command = _command(compiler, name, target)
                running[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        errors = {name: process.communicate()[1] for name, process in running.items()}
        for name, process in running.items():
            if process.returncode:
                raise RuntimeError(f"{name}.cpp does not compile:\n{errors[name][-4000:]}")
            _partial(targets[name]).replace(targets[name])


def _command(compiler: str, name: str, target: Path) -> list[str]:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    return [
        compiler,
        *FLAGS,
        *(f"-I{one}" for one in includes),
        str(FOLDER / f"{name}.cpp"),
        *("-o", str(_partial(target))),
        *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"),
        *(f"-l{one}" for one in LIBRARIES[name]),
    ]


def _partial(target: Path) -> Path:
    return target.with_suffix(f".{os.getpid()}")
