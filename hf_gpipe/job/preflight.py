"""Checks at the start of a job, before its processes are connected: one program and one recipe on machines that reach
each other.

What is compared goes through the store at which the processes meet, so nothing here needs a connection between two of
them. The main process compares, and every process raises what it has found: all of it at once, with the names of the
machines. Between the processes of one machine it costs two messages to the store; only where there are several
machines is anything measured or opened.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from hf_gpipe.errors import UserError, listed
from hf_gpipe.job.facts import RankFacts, not_ours
from hf_gpipe.job.network import REACH_SECONDS, is_loopback, seen_from

#: So many keys of two recipes that differ are named.
_MOST_KEYS = 3
#: And so many of the processes that have a value.
_MOST_RANKS = 8


def check(
    store: dist.Store,
    rank: int,
    size: int,
    settings: Mapping[str, str],
    limit: timedelta,
    prefix: str = "hf_gpipe/started",
) -> tuple[RankFacts, ...]:
    """Wait until every process is here, and compare them. Every process calls it.

    Args:
        settings: values that must be the same in every process, by their names.
        limit: how long the processes may start apart.
        prefix: of the keys in the store, new for each check.

    Returns:
        The facts of every process, in order of rank.

    Raises:
        UserError: on every process: they differ, or machines do not reach each other.
    """
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    facts = RankFacts.of_this_process(settings, is_alone=is_alone)
    door = None
    if not is_alone and os.environ.get("LOCAL_RANK", "0") == "0" and not facts.problem:
        family = socket.AF_INET6 if ":" in facts.address else socket.AF_INET
        door = socket.create_server((facts.address, 0), family=family)
        facts = replace(facts, port=door.getsockname()[1])
    try:
        everyone = exchange(store, rank, size, facts, limit, prefix)
        _agree(store, rank, complaints(everyone) if rank == 0 else [], limit, f"{prefix}/compared")
        if len({process.host for process in everyone}) > 1:
            own = unreached(facts, everyone) if facts.port else []
            told = _gathered(store, rank, size, own, limit, f"{prefix}/reached")
            problems = [problem for lines in told for problem in _lines(lines)]
            _agree(store, rank, problems, limit, f"{prefix}/checked")
        return everyone
    finally:
        if door is not None:
            door.close()


def exchange(
    store: dist.Store, rank: int, size: int, facts: RankFacts, limit: timedelta, prefix: str
) -> tuple[RankFacts, ...]:
    """Tell the facts of this process, and read those of all. Arguments are those of `check`."""
    return tuple(map(RankFacts.read, _gathered(store, rank, size, asdict(facts), limit, prefix)))


def complaints(everyone: Sequence[RankFacts]) -> list[str]:
    """The problems of the processes of a job, one sentence each."""
    lines = []
    for compared, advice in (
        ("versions", "install the same on all machines"),
        ("settings", "give all processes the same recipe and the same arguments"),
    ):
        if different := disagreements([(process.host, getattr(process, compared)) for process in everyone]):
            lines += [*different, advice]
    hosts = {process.host: process for process in everyone}
    boots: dict[str, set[str]] = {}
    for process in everyone:
        boots.setdefault(process.host, set()).add(process.boot)
    for host, own in boots.items():
        if len(own) > 1:
            lines.append(f"{len(own)} machines have the name {host}; give each its own (hostnamectl set-hostname NAME)")
    if len(hosts) > 1:
        lines += [
            _network_problem(process) for process in hosts.values() if process.problem or is_loopback(process.address)
        ]
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


def _network_problem(process: RankFacts) -> str:
    if process.problem:
        return f"machine {process.host}: {process.problem}"
    names = " or ".join(f"GLOO_SOCKET_IFNAME={name}" for name in process.interfaces) or "GLOO_SOCKET_IFNAME"
    return (
        f"machine {process.host}: its name resolves to {process.address or 'no address'}, where no other machine "
        f"reaches gloo; set {names} there (with GPUs also NCCL_SOCKET_IFNAME), or correct its /etc/hosts"
    )


def machines(everyone: Sequence[RankFacts]) -> list[str]:
    """A line about each of several machines: its processes, and the addresses and interfaces of gloo and NCCL."""
    lines: list[str] = []
    if not everyone or not everyone[0].address or len({process.host for process in everyone}) == 1:
        return lines
    for process in {facts.host: facts for facts in everyone}.values():
        ranks = ", ".join(str(rank) for rank, facts in enumerate(everyone) if facts.host == process.host)
        lines.append(
            f"{process.host}: processes {ranks}; gloo at {_at(process)}; NCCL by {process.nccl or 'its own choice'}"
        )
    return lines


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
                f"machine {mine.host}, at {_at(mine)}, cannot reach machine {other.host} at {_at(other)}: "
                f"{error.strerror or error}; allow all TCP ports between the machines (gloo and NCCL take any that are "
                "free), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to interfaces of one network"
            )
    return problems


def _at(facts: RankFacts) -> str:
    return f"{facts.address}{f' ({facts.interface})' if facts.interface else ''}"


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
    if told := _lines(store.get(key)):
        raise UserError("; ".join(told))


def _lines(text: bytes) -> list[str]:
    """The lines that a process has told. Raises MessageError for anything else."""
    try:
        return TypeAdapter(list[str]).validate_json(text, strict=True)
    except ValidationError as error:
        raise not_ours(error) from None
