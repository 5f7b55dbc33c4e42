"""The facts of a process, told to all others at the start, and compared before any two are connected.

They go through the store at which the processes meet. The main process compares, and every process raises what it has
found: all of it at once, with the names of the machines. Between the processes of one machine it costs two messages to
the store; only where there are several machines is anything measured or opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hf_gpipe.errors import MessageError, UserError, listed
from hf_gpipe.job.network import REACH_SECONDS, addresses, gloo_address, is_loopback, seen_from

_version_of = cache(version)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CGROUP = Path("/sys/fs/cgroup")
#: So many keys of two recipes that differ are named, and so many of the processes that have a value.
_MOST_KEYS, _MOST_RANKS = 3, 8


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
    address: str = ""
    interface: str = ""
    interfaces: tuple[str, ...] = ()
    port: int = 0
    nccl: str = ""
    problem: str = ""
    devices: tuple[DeviceFacts, ...] = ()

    @classmethod
    def current(cls, *, is_alone: bool = True) -> RankFacts:
        """The facts of this process.

        Args:
            is_alone: whether its machine is the only one, or the processes are connected already. Then nothing is said
                of the network, nor of the files of this package.
        """
        versions = {"torch": str(torch.__version__), "transformers": _version_of("transformers")}
        facts = cls(socket.gethostname(), boot_id(), os.getpid(), versions)
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

    @property
    def place(self) -> str:
        """Where gloo listens, in messages."""
        return f"{self.address}{f' ({self.interface})' if self.interface else ''}"


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


# ---------------------------------------------------------------------- told to all


def exchange(store: dist.Store, rank: int, size: int, limit: timedelta, prefix: str) -> tuple[RankFacts, ...]:
    """The facts of every process, in order of rank. Every process calls it, with a prefix that is new in the store."""
    return _told(store, rank, size, RankFacts.current(), limit, prefix)


def check(store: dist.Store, rank: int, size: int, limit: timedelta, prefix: str) -> tuple[RankFacts, ...]:
    """Wait until every process is here, and compare them. Every process calls it.

    Args:
        limit: how long the processes may start apart.
        prefix: of the keys in the store, new for each check.

    Returns:
        The facts of every process, in order of rank.

    Raises:
        UserError: on every process: they differ, or machines do not reach each other.
    """
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    facts = RankFacts.current(is_alone=is_alone)
    with contextlib.ExitStack() as stack:
        if not is_alone and os.environ.get("LOCAL_RANK", "0") == "0" and not facts.problem:
            family = socket.AF_INET6 if ":" in facts.address else socket.AF_INET
            door = stack.enter_context(socket.create_server((facts.address, 0), family=family))
            facts = replace(facts, port=door.getsockname()[1])
        everyone = _told(store, rank, size, facts, limit, prefix)
        _agree(store, rank, complaints(everyone) if rank == 0 else [], limit, f"{prefix}/compared")
        if len({process.host for process in everyone}) > 1:
            own = unreached(facts, everyone) if facts.port else []
            told = _gathered(store, rank, size, own, limit, f"{prefix}/reached")
            problems = [problem for text in told for problem in _read(text, list[str])]
            _agree(store, rank, problems, limit, f"{prefix}/checked")
        return everyone


def _told(
    store: dist.Store, rank: int, size: int, facts: RankFacts, limit: timedelta, prefix: str
) -> tuple[RankFacts, ...]:
    return tuple(_read(text, RankFacts) for text in _gathered(store, rank, size, asdict(facts), limit, prefix))


def _gathered(store: dist.Store, rank: int, size: int, value: object, limit: timedelta, prefix: str) -> list[bytes]:
    """The JSON of a value of every process, in order of rank."""
    keys = [f"{prefix}/{number}" for number in range(size)]
    store.set(keys[rank], json.dumps(value))
    begin = time.monotonic()
    try:
        store.wait(keys, limit)
    except dist.DistError:
        missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
        if time.monotonic() - begin < 0.9 * limit.total_seconds():
            raise  # the store is gone: a process has failed, and its message is the cause
        raise UserError(
            f"process {rank} is on machine {socket.gethostname()} and after {limit.total_seconds():g} seconds "
            f"{'process' if len(missing) == 1 else 'processes'} {listed(missing)} of {size} had not started; look at "
            "the machines on which they should be, and start as many processes as the launcher was told"
        ) from None
    return list(store.multi_get(keys))


def _agree(store: dist.Store, rank: int, problems: Sequence[str], limit: timedelta, key: str) -> None:
    """Raise the complaints of the main process on every process, if there are any."""
    if rank == 0:
        store.set(key, json.dumps(list(problems)))
    store.wait([key], limit)
    if told := _read(store.get(key), list[str]):
        raise UserError("; ".join(told))


def _read(text: bytes, kind: Any) -> Any:
    """Read what a process has told. Raises MessageError for anything but the JSON of this type."""
    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise MessageError(
            f"what a process has told at the start is not hf_gpipe's: {where}{': ' * bool(where)}{first['msg']}; see "
            "that all processes run the same version, and that nothing else reaches the store"
        ) from None


# ---------------------------------------------------------------------- compared


def complaints(everyone: Sequence[RankFacts]) -> list[str]:
    """The problems of the processes of a job, one sentence each."""
    lines = []
    if different := disagreements([(process.host, process.versions) for process in everyone]):
        lines += [*different, "install the same on all machines"]
    boots: dict[str, set[str]] = {}
    for process in everyone:
        boots.setdefault(process.host, set()).add(process.boot)
    lines += [
        f"{len(own)} machines have the name {host}; give each its own (hostnamectl set-hostname NAME)"
        for host, own in boots.items()
        if len(own) > 1
    ]
    if len(boots) == 1:
        return lines
    for process in {process.host: process for process in everyone}.values():
        if process.problem:
            lines.append(f"machine {process.host}: {process.problem}")
        elif is_loopback(process.address):
            names = " or ".join(f"GLOO_SOCKET_IFNAME={name}" for name in process.interfaces) or "GLOO_SOCKET_IFNAME"
            lines.append(
                f"machine {process.host}: its name resolves to {process.address or 'no address'}, where no "
                f"other machine reaches gloo; set {names} there (with GPUs also NCCL_SOCKET_IFNAME), or correct its "
                "/etc/hosts"
            )
    return lines


def disagreements(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """The settings in which processes differ, a sentence each: the values, and the processes that have them.

    Args:
        everyone: the machine and the settings of each process, in order of rank.
    """
    has_several_hosts = len({host for host, _ in everyone}) > 1
    names = dict.fromkeys(name for _, settings in everyone for name in settings)
    keys = [name for name in names if len({settings.get(name) for _, settings in everyone}) > 1]
    lines = []
    for name in keys[:_MOST_KEYS]:
        ranks: dict[str, list[int]] = {}
        for rank, (_, settings) in enumerate(everyone):
            ranks.setdefault(settings.get(name, "missing"), []).append(rank)
        parts = []
        for value, own in ranks.items():
            where = f"{'process' if len(own) == 1 else 'processes'} {listed([str(rank) for rank in own], _MOST_RANKS)}"
            hosts = " and ".join(dict.fromkeys(everyone[rank][0] for rank in own))
            parts.append(f"{value} on {hosts} ({where})" if has_several_hosts else f"{value} in {where}")
        lines.append(f"{name} is {', '.join(parts)}")
    if keys[_MOST_KEYS:]:
        lines.append(f"also different: {listed(keys[_MOST_KEYS:])}")
    return lines


def machines(everyone: Sequence[RankFacts]) -> list[str]:
    """A line about each of several machines: its processes, and the addresses and interfaces of gloo and NCCL."""
    of_hosts = {facts.host: facts for facts in everyone}
    if len(of_hosts) <= 1 or not everyone[0].address:
        return []
    ranks = {host: ", ".join(str(r) for r, facts in enumerate(everyone) if facts.host == host) for host in of_hosts}
    return [
        f"{host}: processes {ranks[host]}; gloo at {facts.place}; NCCL by {facts.nccl or 'its own choice'}"
        for host, facts in of_hosts.items()
    ]


def unreached(mine: RankFacts, everyone: Sequence[RankFacts]) -> list[str]:
    """Which of the other machines the first process of this one cannot reach, one sentence each."""
    problems = []
    for other in everyone:
        if not other.port or other.host == mine.host:
            continue
        try:
            address = seen_from(other.address, mine.interface)
            socket.create_connection((address, other.port), REACH_SECONDS, (mine.address, 0)).close()
        except OSError as error:
            problems.append(
                f"machine {mine.host}, at {mine.place}, cannot reach machine {other.host} at {other.place}: "
                f"{error.strerror or error}; allow all TCP ports between the machines (gloo and NCCL take any that are "
                "free), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to interfaces of one network"
            )
    return problems
