"""Checks at the start of a job, before its processes are connected: one program and one recipe on machines that reach
each other.

What is compared goes through the store at which the processes meet, so nothing here needs a connection between two of
them. The main process compares, and every process raises what it has found: all of it at once, with the names of the
machines. Between the processes of one machine it costs two messages to the store; only where there are several
machines is anything measured or opened.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hf_gpipe.errors import MessageError, UserError, listed

#: How long a machine tries to reach another one. A firewall that drops packets answers nothing.
_REACH_SECONDS = 5.0
#: How long the main process may take to listen after another process has started.
_LISTENS_SECONDS = 30.0
#: So many keys of two recipes that differ are named.
_MOST_KEYS = 3
#: And so many of the processes that have a value.
_MOST_RANKS = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: The request for the IPv4 address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Facts:
    """The facts about a process that the main process compares.

    Attributes:
        host: the name of its machine.
        boot: tells machines of one name apart.
        versions: of what must be installed alike, by their names.
        settings: values that must be the same, by their names.
        address: at which gloo will listen.
        interface: of that address; empty: not known.
        interfaces: names of the interfaces that other machines may reach.
        port: at which a machine's first process waits for the check of the network; 0: it is another one.
        nccl: the interfaces that NCCL_SOCKET_IFNAME names; empty: NCCL chooses.
        problem: why there is no address; empty: there is one.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    host: str
    boot: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    address: str = ""
    interface: str = ""
    interfaces: tuple[str, ...] = ()
    port: int = 0
    nccl: str = ""
    problem: str = ""

    @classmethod
    def read(cls, text: bytes) -> Facts:
        """The facts that a process has told. Raises MessageError for anything else."""
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            raise _not_ours(error) from None

    @classmethod
    def of_this_process(cls, settings: Mapping[str, str], *, is_alone: bool) -> Facts:
        """The facts of this process.

        Args:
            settings: values that must be the same in every process.
            is_alone: whether its machine is the only one. Then nothing is said of the network, nor of the files of
                this package.
        """
        versions = {"torch": str(torch.__version__), "transformers": version("transformers")}
        facts = cls(socket.gethostname(), boot_id(), versions, settings)
        if is_alone:
            return facts
        versions["the hash of hf_gpipe's files"] = _digest_of_package()
        found = addresses()
        outside = tuple(name for name, address in found.items() if not is_loopback(address))
        try:
            address = gloo_address(found)
        except UserError as error:
            return replace(facts, interfaces=outside, problem=str(error))
        interface = next((name for name, own in found.items() if own == address), "")
        nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
        return replace(facts, address=address, interface=interface, interfaces=outside, nccl=nccl)


def check(
    store: dist.Store,
    rank: int,
    size: int,
    settings: Mapping[str, str],
    limit: timedelta,
    prefix: str = "hf_gpipe/started",
) -> list[str]:
    """Wait until every process is here, and compare them. Every process calls it.

    Args:
        store: that all processes share.
        rank: of this process.
        size: the number of processes.
        settings: values that must be the same in every process, by their names.
        limit: how long the processes may start apart.
        prefix: of the keys in the store, new for each check.

    Returns:
        Of several machines for each a line for people: its processes and its network.

    Raises:
        UserError: on every process: they differ, or machines do not reach each other.
    """
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    facts = Facts.of_this_process(settings, is_alone=is_alone)
    door = None
    if not is_alone and os.environ.get("LOCAL_RANK", "0") == "0" and not facts.problem:
        family = socket.AF_INET6 if ":" in facts.address else socket.AF_INET
        door = socket.create_server((facts.address, 0), family=family)
        facts = replace(facts, port=door.getsockname()[1])
    try:
        everyone = [Facts.read(one) for one in _gathered(store, rank, size, asdict(facts), limit, prefix)]
        _agree(store, rank, complaints(everyone) if rank == 0 else [], limit, f"{prefix}/compared")
        if len({one.host for one in everyone}) > 1:
            found = unreached(facts, everyone) if facts.port else []
            told = _gathered(store, rank, size, found, limit, f"{prefix}/reached")
            problems = [problem for one in told for problem in _lines(one)]
            _agree(store, rank, problems, limit, f"{prefix}/checked")
            return machines(everyone)
    finally:
        if door is not None:
            door.close()
    return []


def boot_id() -> str:
    """What tells this machine from others of its name, and from itself before its last start; empty: not known."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def complaints(everyone: Sequence[Facts]) -> list[str]:
    """The problems of the processes of a job, one sentence each.

    Args:
        everyone: the facts of each process, in order of rank.
    """
    found = []
    for name in everyone[0].versions:
        if differing := _differing([(one.host, one.versions.get(name, "")) for one in everyone]):
            found.append(f"{name} is {differing}; install the same on all machines")
    if different := disagreements([(one.host, one.settings) for one in everyone]):
        found += [*different, "give all processes the same recipe and the same arguments"]
    hosts = {one.host: one for one in everyone}
    boots: dict[str, set[str]] = {}
    for one in everyone:
        boots.setdefault(one.host, set()).add(one.boot)
    for host, own in boots.items():
        if len(own) > 1:
            found.append(f"{len(own)} machines have the name {host}; give each its own (hostnamectl set-hostname NAME)")
    if len(hosts) > 1:
        found += [_network_problem(one) for one in hosts.values() if one.problem or is_loopback(one.address)]
    return found


def disagreements(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """The settings in which processes differ, a sentence each: the values, and the processes that have them.

    Args:
        everyone: the machine and the settings of each process, in order of rank.
    """
    has_several_hosts = len({host for host, _ in everyone}) > 1
    names = dict.fromkeys(name for _, settings in everyone for name in settings)
    keys = [name for name in names if len({settings.get(name) for _, settings in everyone}) > 1]
    found = []
    for name in keys[:_MOST_KEYS]:
        ranks: dict[str, list[int]] = {}
        for rank, (_, settings) in enumerate(everyone):
            ranks.setdefault(settings.get(name, "missing"), []).append(rank)
        parts = []
        for value, own in ranks.items():
            where = f"{'process' if len(own) == 1 else 'processes'} {listed([str(rank) for rank in own], _MOST_RANKS)}"
            hosts = " and ".join(dict.fromkeys(everyone[rank][0] for rank in own))
            parts.append(f"{value} on {hosts} ({where})" if has_several_hosts else f"{value} in {where}")
        found.append(f"{name} is {', '.join(parts)}")
    if keys[_MOST_KEYS:]:
        found.append(f"also different: {listed(keys[_MOST_KEYS:])}")
    return found


def _network_problem(one: Facts) -> str:
    if one.problem:
        return f"machine {one.host}: {one.problem}"
    names = " or ".join(f"GLOO_SOCKET_IFNAME={name}" for name in one.interfaces) or "GLOO_SOCKET_IFNAME"
    return (
        f"machine {one.host}: its name resolves to {one.address or 'no address'}, where no other machine reaches gloo; "
        f"set {names} there (with GPUs also NCCL_SOCKET_IFNAME), or correct its /etc/hosts"
    )


def _differing(values: Sequence[tuple[str, str]]) -> str:
    """The values of machines in words, "2.13 on a, 2.11 on b and c"; empty where they are all the same."""
    hosts: dict[str, list[str]] = {}
    for host, value in values:
        if host not in hosts.setdefault(value, []):
            hosts[value].append(host)
    if len(hosts) == 1:
        return ""
    return ", ".join(f"{value} on {' and '.join(own)}" for value, own in hosts.items())


def machines(everyone: Sequence[Facts]) -> list[str]:
    """For each machine its processes, and the addresses and interfaces of gloo and NCCL."""
    lines = []
    for one in {facts.host: facts for facts in everyone}.values():
        ranks = ", ".join(str(rank) for rank, facts in enumerate(everyone) if facts.host == one.host)
        lines.append(f"{one.host}: processes {ranks}; gloo at {_at(one)}; NCCL by {one.nccl or 'its own choice'}")
    return lines


def unreached(mine: Facts, everyone: Sequence[Facts]) -> list[str]:
    """Which of the other machines the first process of this one cannot reach, one sentence each."""
    found = []
    for other in everyone:
        if not other.port or other.host == mine.host:
            continue
        try:
            socket.create_connection((other.address, other.port), _REACH_SECONDS, (mine.address, 0)).close()
        except OSError as error:
            found.append(
                f"machine {mine.host}, at {_at(mine)}, cannot reach machine {other.host} at {_at(other)}: "
                f"{error.strerror or error}; allow all TCP ports between the machines (gloo and NCCL take any that are "
                "free), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to interfaces of one network"
            )
    return found


def _at(facts: Facts) -> str:
    return f"{facts.address}{f' ({facts.interface})' if facts.interface else ''}"


def check_main_address(rank: int) -> None:
    """Raise UserError where this process could never find the main one, instead of trying for minutes.

    Args:
        rank: of this process.
    """
    own = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if rank < own or own == 0 or int(os.environ.get("WORLD_SIZE", "1")) == own:
        return  # on one machine with the main process
    name, here = os.environ.get("MASTER_ADDR", ""), socket.gethostname()
    advice = (
        "give MASTER_ADDR the first machine's address in your network (torchrun: --local-addr on that machine), or "
        f"correct /etc/hosts on {here}"
    )
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UserError(
            f"machine {here} finds no address for {name!r}, the first machine's name (MASTER_ADDR): "
            f"{error.strerror}; {advice}"
        ) from None
    if is_loopback(str(address)) and not _answers(str(address), int(os.environ.get("MASTER_PORT", "0"))):
        raise UserError(
            f"on machine {here} the first machine's name {name!r} (MASTER_ADDR) resolves to {address}, which is {here} "
            f"itself; {advice}"
        )


def _answers(address: str, port: int) -> bool:
    """Whether the main process, or its agent, soon listens on this very machine, as where one stands for several."""
    deadline = time.monotonic() + _LISTENS_SECONDS
    while True:
        with suppress(OSError), socket.create_connection((address, port), _REACH_SECONDS):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def is_loopback(address: str) -> bool:
    """Whether an address reaches no further than its own machine; also for an empty one."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def gloo_address(found: Mapping[str, str]) -> str:
    """The address at which gloo listens, as ProcessGroupGloo::createDefaultDevice chooses it.

    Args:
        found: from `addresses`.

    Raises:
        UserError: GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        name = names.split(",")[0]
        if found and name not in found:
            raise UserError(f"GLOO_SOCKET_IFNAME is {names!r}; the interfaces with an address are {', '.join(found)}")
        return found.get(name, "")
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as tried:
                tried.bind((address[0], 0))
                return str(address[0])
    return "127.0.0.1"


def stay_on_loopback() -> None:
    """Let gloo and NCCL listen where no other machine reaches them, unless their variables say where.

    Only for processes that are all on this machine.
    """
    for name, address in addresses().items():
        if is_loopback(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return


def addresses() -> dict[str, str]:
    """The IPv4 address of each network interface that has one; on Linux only."""
    found: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        return found
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _digest_of_package() -> str:
    """A short hash of this package's files: a checkout may differ without another version."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _gathered(store: dist.Store, rank: int, size: int, value: object, limit: timedelta, prefix: str) -> list[bytes]:
    """The JSON of a value of every process, in order of rank."""
    keys = [f"{prefix}/{one}" for one in range(size)]
    store.set(keys[rank], json.dumps(value))
    begin = time.monotonic()
    try:
        store.wait(keys, limit)
    except dist.DistError:
        missing = [str(one) for one, key in enumerate(keys) if not store.check([key])]
        if time.monotonic() - begin < 0.9 * limit.total_seconds():
            raise  # the store is gone: a process has failed, and its message is the cause
        raise UserError(
            f"process {rank} is on machine {socket.gethostname()} and after {limit.total_seconds():g} seconds "
            f"{'process' if len(missing) == 1 else 'processes'} {listed(missing)} of {size} had not started; look at "
            "the machines on which they should be, and start as many processes as the launcher was told"
        ) from None
    return list(store.multi_get(keys))


def _agree(store: dist.Store, rank: int, found: Sequence[str], limit: timedelta, key: str) -> None:
    """Raise the complaints of the main process on every process, if there are any."""
    if rank == 0:
        store.set(key, json.dumps(list(found)))
    store.wait([key], limit)
    if told := _lines(store.get(key)):
        raise UserError("; ".join(told))


def _lines(text: bytes) -> list[str]:
    """The lines that a process has told. Raises MessageError for anything else."""
    try:
        return TypeAdapter(list[str]).validate_json(text, strict=True)
    except ValidationError as error:
        raise _not_ours(error) from None


def _not_ours(error: ValidationError) -> MessageError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return MessageError(
        f"what a process has told at the start is not hf_gpipe's: {where}{': ' * bool(where)}{first['msg']}; see that "
        "all processes run the same version, and that nothing else reaches the store"
    )
