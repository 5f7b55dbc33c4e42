"""Emulated CUDA devices for a torch without CUDA: `torch.device("cuda:0")` to `"cuda:7"` work, on the CPU's memory.

`load_with_torch` must be called before torch is imported. `counting` tells what an operation asked of the host.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from tests.emulated_cuda.native import load, native

_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)


def load_with_torch() -> None:
    """Load the devices when torch is imported, and let `torch.cuda` find them."""
    assert "torch" not in sys.modules, "the emulated CUDA device must be loaded before torch"
    sys.meta_path.insert(0, _TorchFinder())
    # Its kernels are for real GPUs, and it looks for them as soon as it is imported.
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as usual; its loader loads the device first and patches `torch.cuda` at the end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_on_the_device(module: ModuleType) -> None:
            load()
            execute(module)
            from tests.emulated_cuda import nccl, torch_cuda  # these need torch

            torch_cuda.patch()
            nccl.patch()

        loader.exec_module = execute_on_the_device
        return spec


@dataclass(frozen=True)
class Place:
    """One thing that was counted.

    Attributes:
        name: the operation, such as "aten::nonzero" or "copy to the host".
        stack: the Python frames that led to it, the innermost last; those of the main thread for a backward.
    """

    name: str
    stack: Sequence[traceback.FrameSummary]

    def __str__(self) -> str:
        """The operation, and the innermost lines outside of torch."""
        lines = [f"{frame.filename}:{frame.lineno}" for frame in self.stack if "/torch/" not in frame.filename]
        return f"{self.name} at {' < '.join(reversed(lines[-3:]))}"


@dataclass
class Counts:
    """What the host did with the devices.

    Attributes:
        synchronisations: where the host waited for a device: item(), nonzero, copies to the host, blocking copies to
            the device, synchronize().
        pageable_copies: copies between a device and memory that is not pinned, for which the host waits as well.
    """

    synchronisations: list[Place] = field(default_factory=list)
    pageable_copies: list[Place] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = {"synchronisations": self.synchronisations, "pageable copies": self.pageable_copies}
        return "\n".join(
            line for kind, places in kinds.items() for line in (f"{len(places)} {kind}", *map(str, places))
        )


@contextmanager
def counting() -> Iterator[Counts]:
    """Context manager that counts and locates synchronisations and pageable copies, of all threads."""
    counts = Counts()
    of_kind = {"synchronisation": counts.synchronisations, "pageable copy": counts.pageable_copies}
    main = threading.main_thread().ident
    assert main is not None

    def note(kind: bytes, name: bytes) -> None:
        frame = sys._getframe(1) if threading.get_ident() == main else sys._current_frames()[main]
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)[::-1]
        of_kind[kind.decode()].append(Place(name.decode(), stack))

    listener = _LISTENER(note)
    native().emulated_cuda_listen(listener)
    try:
        yield counts
    finally:
        native().emulated_cuda_listen(_LISTENER())
