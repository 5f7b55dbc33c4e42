"""Emulated machines on this one: network namespaces with their own interface, name, /etc/hosts and shared memory.

They are joined by a bridge in a namespace of its own, and share the file system. It needs root, `ip`, `tc`, `bridge`
and `unshare`, and takes everything away again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

#: Inside of the new namespaces, before the command.
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; mount -t tmpfs tmpfs /dev/shm; shift 2; exec "$@"'
#: The same where the namespaces of mounts and processes are new.
_SETTLE = "mount --make-rprivate / && mount -t proc proc /proc && " + _ENTER
_NEW_NETWORK, _NEW_MOUNTS, _NEW_NAME, _NEW_PROCESSES = 0x40000000, 0x00020000, 0x04000000, 0x20000000
_DIE_WITH_PARENT = 1


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")


def why_not() -> str:
    """Why there can be no emulated machines here; empty where there can."""
    try:
        with Hosts(2) as hosts:
            hosts.start(0, ["true"]).wait()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


class Hosts:
    """Context manager that makes emulated machines, named a, b, c and so on, and ends all that runs on them.

    Raises:
        RuntimeError: they cannot be made here.
    """

    def __init__(self, count: int) -> None:
        self.names = [chr(ord("a") + number) for number in range(count)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]
        self._prefix = f"hfg{os.getpid()}"
        self._running: dict[int, list[Any]] = {number: [] for number in range(count)}
        self._slow_links: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hf_gpipe-hosts-")

    def __enter__(self) -> Hosts:
        try:
            _run("ip", "netns", "add", self._switch)
            self._in_switch("ip", "link", "add", "br0", "type", "bridge")
            self._in_switch("ip", "link", "set", "br0", "up")
            for number in range(len(self.names)):
                self._make(number)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def _space(self, number: int) -> str:
        return f"{self._prefix}-{self.names[number]}"

    def _port(self, number: int) -> str:
        return f"port-{self.names[number]}"

    def _in_switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", self._switch, *command)

    def _make(self, number: int) -> None:
        space, port = self._space(number), self._port(number)
        _run("ip", "netns", "add", space)
        self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        self._in_switch("ip", "link", "set", port, "master", "br0", "up")
        for words in (["addr", "add", f"{self.addresses[number]}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            _run("ip", "-n", space, *words)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        lines = ["127.0.0.1 localhost"]
        lines += [f"{address} {name}" for name, address in zip(self.names, self.addresses, strict=True)]
        self._hosts_file(number).write_text("\n".join(lines) + "\n")

    def _hosts_file(self, number: int) -> Path:
        return Path(self._folder.name) / f"hosts-{self.names[number]}"

    def _remove(self) -> None:
        for number in self._running:
            self.end_processes(number)
        for number in list(self._slow_links):
            self._end_slow_link(number)
        for space in (*map(self._space, range(len(self.names))), self._switch):
            with suppress(RuntimeError):  # it was not made
                _run("ip", "netns", "del", space)
        self._folder.cleanup()

    # ------------------------------------------------------------------ processes

    def start(
        self,
        number: int,
        command: Sequence[str],
        *,
        log: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a machine.

        Args:
            number: of the machine.
            command: and its arguments.
            log: for its stdout and stderr; None: this process's.
            environment: more variables.
        """
        space = ["ip", "netns", "exec", self._space(number)]
        own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["sh", "-c", _ENTER, "sh", self.names[number], str(self._hosts_file(number))]
        process = subprocess.Popen(
            [*space, *own, *enter, *command],
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._running[number].append(process)
        return process

    def note(self, number: int, process: Any) -> None:
        """Note a process that was started otherwise, as by `enter`; it has the methods of subprocess.Popen."""
        self._running[number].append(process)

    def enter(self, number: int) -> None:
        """Let the children of this process be on a machine. The first one must call `settle`, and ends them all."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (Path("/run/netns") / self._space(number)).open() as space:
            _check(libc.setns(space.fileno(), _NEW_NETWORK))
        _check(libc.unshare(_NEW_MOUNTS | _NEW_NAME | _NEW_PROCESSES))

    def settle(self, number: int) -> None:
        """Give the machine its name and files; see `enter`."""
        _check(ctypes.CDLL(None, use_errno=True).prctl(_DIE_WITH_PARENT, int(signal.SIGKILL)))
        _run("sh", "-c", _SETTLE, "sh", self.names[number], str(self._hosts_file(number)), "true")

    def still_running(self) -> list[str]:
        """The machines on which something that was started has not ended."""
        return [self.names[n] for n, own in self._running.items() if any(process.poll() is None for process in own)]

    def exit_codes(self) -> list[int | None]:
        """Of the last command of each machine; None while it runs."""
        return [own[-1].poll() if own else None for own in self._running.values()]

    def end_processes(self, number: int) -> None:
        """Kill all that runs on a machine, and wait for its end."""
        left = self.processes(number)
        for process in self._running[number]:
            process.kill()  # the first process of its namespace dies with it, and all others with that
            process.wait()
        while any(map(is_running, left)):
            time.sleep(0.01)

    def processes(self, number: int) -> list[int]:
        """The processes of a machine, by this machine's numbers."""
        found: set[int] = set()
        for process in self._running[number]:
            with suppress(psutil.NoSuchProcess):
                found |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
        return sorted(found)

    # ------------------------------------------------------------------ the network

    def cut(self, number: int, *, both_ways: bool = True) -> None:
        """Lose everything between a machine and the others, without a word; or only what the others send to it."""
        port = self._port(number)
        if both_ways:
            self._in_switch("bridge", "link", "set", "dev", port, "state", "0")
            return
        # The bridge forgets where the machine is, and does not try this port.
        for flag in ("learning", "flood", "bcast_flood", "mcast_flood"):
            self._in_switch("bridge", "link", "set", "dev", port, flag, "off")
        self._in_switch("ip", "link", "set", port, "type", "bridge_slave", "fdb_flush")

    def slow_down(self, number: int, delay_seconds: float, loss: float) -> None:
        """Let everything between a machine and the others take longer, each way, and lose a share of it."""
        near, far, bridge = f"near-{self.names[number]}", f"far-{self.names[number]}", f"slow-{self.names[number]}"
        self._in_switch("ip", "link", "add", bridge, "type", "bridge")
        for tap, master in ((near, bridge), (far, "br0")):
            self._in_switch("ip", "tuntap", "add", "dev", tap, "mode", "tap")
            self._in_switch("ip", "link", "set", tap, "master", master, "up")
        words = [
            sys.executable,
            str(Path(__file__).with_name("slow_link.py")),
            near,
            far,
            f"{delay_seconds}",
            f"{loss}",
        ]
        self._slow_links[number] = subprocess.Popen(["ip", "netns", "exec", self._switch, *words])
        self._in_switch("ip", "link", "set", bridge, "up")
        self._in_switch("ip", "link", "set", self._port(number), "master", bridge)

    def speed_up(self, number: int) -> None:
        """End what `slow_down` has begun."""
        self._in_switch("ip", "link", "set", self._port(number), "master", "br0")
        self._end_slow_link(number)
        for name in ("near", "far", "slow"):
            self._in_switch("ip", "link", "del", f"{name}-{self.names[number]}")

    def _end_slow_link(self, number: int) -> None:
        process = self._slow_links.pop(number)
        process.kill()
        process.wait()

    def limit_rate(self, rate: str) -> None:
        """Limit every machine's link, in both directions, to a rate such as 100mbit."""
        words = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        for number in range(len(self.names)):
            self._in_switch("tc", "qdisc", "replace", "dev", self._port(number), *words)
            _run("tc", "-n", self._space(number), "qdisc", "replace", "dev", "eth0", *words)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_running(process: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
