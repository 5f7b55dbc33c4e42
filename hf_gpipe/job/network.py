"""The network of this machine: where gloo and NCCL listen, the way to the main process, and how many may connect."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import time
from collections.abc import Mapping
from contextlib import suppress

import psutil

from hf_gpipe.errors import UserError

#: How long a machine tries to reach another one. A firewall that drops packets answers nothing.
REACH_SECONDS = 5.0
#: How long the main process may take to listen after another process has started.
_LISTENS_SECONDS = 30.0


def check_main_address(rank: int) -> None:
    """Raise UserError where this process could never find the main one, instead of trying for minutes."""
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
        with suppress(OSError), socket.create_connection((address, port), REACH_SECONDS):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def is_loopback(address: str) -> bool:
    """Whether an address reaches no further than its own machine; also for an empty one."""
    return not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback


def gloo_address(interfaces: Mapping[str, str]) -> str:
    """The address at which gloo listens, as ProcessGroupGloo::createDefaultDevice chooses it.

    Args:
        interfaces: from `addresses`.

    Raises:
        UserError: GLOO_SOCKET_IFNAME names an interface that does not exist.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        several = names.split(",")
        if interfaces and not interfaces.keys() >= {*several}:
            raise UserError(
                f"GLOO_SOCKET_IFNAME is {names!r}; the interfaces with an address are {', '.join(interfaces)}: name "
                "one of them, or several with commas"
            )
        return interfaces.get(several[0], "")
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
    """The address of each network interface that has one, as gloo takes it: its first IPv4 address, or else IPv6."""
    by_interface: dict[str, str] = {}
    for name, own in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in own:
                if entry.family == family:
                    by_interface.setdefault(name, entry.address)
    return by_interface


def seen_from(address: str, interface: str) -> str:
    """Another machine's address for this one: a link-local address is reached by an interface of this machine."""
    plain, _, scope = address.partition("%")
    return f"{plain}%{interface}" if scope else address


#: What a process opens in a job of one, and for each further process: five groups connect all with all, and there is
#: one for each edge and for each stage with replicas. Measured with 2 and 4 processes: 42 and 58 at most.
_FILES, _FILES_PER_PROCESS = 64, 8
#: What a process may open at most, where the system allows it: connections that are not of the run stay open too.
_MANY_FILES = 1 << 16


def check_open_files(num_processes: int) -> None:
    """Raise this process's limit of open files, so that nobody ends the job by some connections that say nothing.

    Each connection to another process is an open file, and gloo aborts a process that runs out.

    Raises:
        UserError: the system does not allow as many as the job needs.
    """
    needed = _FILES + _FILES_PER_PROCESS * num_processes
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    if highest != resource.RLIM_INFINITY and highest < needed:
        raise UserError(
            f"process {os.environ.get('RANK', '0')} may open {highest} files, and each process of a job of "
            f"{num_processes} needs {needed}, for its connections to the others; raise the limit before the start "
            "(ulimit -n 65536; in Docker --ulimit nofile=65536, in a service of systemd LimitNOFILE=65536)"
        )
    many = max(needed, _MANY_FILES)
    wanted = many if highest == resource.RLIM_INFINITY else min(many, highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, wanted), highest))
