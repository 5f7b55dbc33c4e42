"""The facts of a process: its machine, versions, settings, network and devices, as it tells them to all others."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import psutil
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hf_gpipe.errors import MessageError, UserError
from hf_gpipe.job.network import addresses, gloo_address, is_loopback
from hf_gpipe.job.wire import sendable

_version_of = cache(version)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CGROUP = Path("/sys/fs/cgroup")


@sendable
@dataclass(frozen=True)
class DeviceFacts:
    """A device on which a process computes.

    Attributes:
        name: as torch knows it.
        free_bytes: of its memory, with what this process holds of a GPU's, when it was chosen.
        total_bytes: of its memory. All processes of a machine share that of the CPU.
        model: the name of a GPU's kind, such as "NVIDIA A100-SXM4-80GB"; empty: the CPU.
    """

    name: str
    free_bytes: int
    total_bytes: int
    model: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.name.startswith("cuda")

    @classmethod
    def of(cls, device: torch.device) -> DeviceFacts:
        """The facts of a device of this process."""
        if device.type != "cuda":
            return cls(str(device), available_memory(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return cls(str(device), int(free + reserved), total, torch.cuda.get_device_name(device))


@dataclass(frozen=True)
class RankFacts:
    """The facts of one process, which it tells all others at the start.

    Attributes:
        host: the name of its machine.
        boot: tells machines of one name apart.
        pid: its number there.
        versions: of what must be installed alike, by their names.
        settings: values that must be the same, by their names.
        address: at which gloo will listen.
        interface: of that address; empty: not known.
        interfaces: names of the interfaces that other machines may reach.
        port: at which a machine's first process waits for the check of the network; 0: it is another one.
        nccl: the interfaces that NCCL_SOCKET_IFNAME names; empty: NCCL chooses.
        problem: why there is no address; empty: there is one.
        devices: those on which it computes, once they are chosen.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    host: str
    boot: str
    pid: int
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    address: str = ""
    interface: str = ""
    interfaces: tuple[str, ...] = ()
    port: int = 0
    nccl: str = ""
    problem: str = ""
    devices: tuple[DeviceFacts, ...] = ()

    @classmethod
    def read(cls, text: bytes) -> RankFacts:
        """The facts that a process has told. Raises MessageError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise not_ours(error) from None

    @classmethod
    def of_this_process(cls, settings: Mapping[str, str] | None = None, *, is_alone: bool = True) -> RankFacts:
        """The facts of this process.

        Args:
            settings: values that must be the same in every process.
            is_alone: whether its machine is the only one, or the processes are connected already. Then nothing is said
                of the network, nor of the files of this package.
        """
        versions = {"torch": str(torch.__version__), "transformers": _version_of("transformers")}
        facts = cls(socket.gethostname(), boot_id(), os.getpid(), versions, settings or {})
        if is_alone:
            return facts
        versions["the hash of hf_gpipe's files"] = _digest_of_package()
        of_interfaces = addresses()
        outside = tuple(name for name, address in of_interfaces.items() if not is_loopback(address))
        try:
            address = gloo_address(of_interfaces)
        except UserError as error:
            return replace(facts, interfaces=outside, problem=str(error))
        interface = next((name for name, own in of_interfaces.items() if own == address), "")
        nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
        return replace(facts, address=address, interface=interface, interfaces=outside, nccl=nccl)


def available_memory() -> int:
    """Bytes that processes of this machine, or of this container, may still use."""
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        # The file cache is given back on demand.
        available = min(available, limit - used + int(counts["inactive_file"]))
    return available


def boot_id() -> str:
    """A mark that tells this machine from others of its name, and from itself before its last start; else empty."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _digest_of_package() -> str:
    """A short hash of this package's files: a checkout may differ without another version."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def not_ours(error: ValidationError) -> MessageError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return MessageError(
        f"what a process has told at the start is not hf_gpipe's: {where}{': ' * bool(where)}{first['msg']}; see that "
        "all processes run the same version, and that nothing else reaches the store"
    )
