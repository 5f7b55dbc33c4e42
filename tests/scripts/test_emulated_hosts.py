"""Emulated machines have their own names and network, which can be cut; nothing of them stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.emulated_hosts import Hosts, is_running, why_not

LISTEN = """
import socket
door = socket.create_server(("a", 5000))
open("NAME", "w").write(socket.gethostname())
while True:
    door.accept()[0].sendall(b"here")
"""
ASK = 'import socket; print(socket.create_connection(("a", 5000), 0.3).recv(4))'


def test_a_machine_is_reached_by_its_name_until_its_network_is_cut(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"no emulated machines: {reason}")
    with Hosts(2) as hosts:
        hosts.start(0, [sys.executable, "-c", LISTEN.replace("NAME", str(tmp_path / "name"))])
        (tmp_path / "name").touch()
        while not (tmp_path / "name").read_text():
            assert hosts.exit_codes()[0] is None
        assert (tmp_path / "name").read_text() == "a"

        def ask() -> int:
            with (tmp_path / "log").open("w") as log:
                return hosts.start(1, [sys.executable, "-c", ASK], log=log).wait()

        assert ask() == 0, (tmp_path / "log").read_text()
        hosts.cut(0, both_ways=False)
        assert ask() != 0
        assert "timed out" in (tmp_path / "log").read_text()
        *_, process = hosts.processes(0)
        prefix = hosts._prefix
    assert not is_running(process)
    assert prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
