"""Whom the processes of a run believe, and who reaches their ports."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_gpipe.errors import MessageError, UserError
from hf_gpipe.job.facts import RankFacts, _read
from hf_gpipe.job.meeting import meet
from hf_gpipe.job.store import SECRET_VARIABLE, SignedStore, new_secret, signed, store_on_loopback
from scripts.random_faults.peers import flood, listening
from tests.forked_command import Program
from tests.job import peers

REPOSITORY = Path(__file__).parents[2]
LIMIT = timedelta(seconds=20)
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def start(what: str, folder: Path, port: int, rank: int, **variables: str) -> Program:
    """A process of a local job of two, as our launcher starts them."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return Program(folder / f"process-{rank}", peers.start, what, folder, **place, **variables)


@contextmanager
def ended(*processes: Program) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def test_an_uninvited_peer_that_answers_first_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    store = store_on_loopback()
    peer = start("uninvited", tmp_path, store.port, 1)
    main = start("rank", tmp_path, store.port, 0, **{SECRET_VARIABLE: new_secret()})
    with ended(peer, main):
        _, err = main.communicate(timeout=200)
        assert not (tmp_path / "executed").exists(), "code of the peer ran in a process of the run"
        assert main.returncode == 2, err
        assert err.startswith(f"error: the store at 127.0.0.1:{store.port} has a value that was not written with")
        assert SECRET_VARIABLE in err
        assert "Traceback" not in err


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_a_local_run_listens_on_loopback_alone_and_survives_garbage(tmp_path: Path) -> None:
    dice = random.Random(0)
    (tmp_path / "stay").touch()
    store, own = store_on_loopback(), {SECRET_VARIABLE: new_secret()}
    processes = [start("rank", tmp_path, store.port, rank, **own) for rank in range(2)]
    with ended(*processes):
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("found-*"))) < 2:
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in processes), processes[0].communicate()[1]
            time.sleep(0.05)
        ports = [found for process in processes for found in listening(process.pid)]
        ports += [found for found in listening(os.getpid()) if found[1] == store.port]
        assert len(ports) >= 3, "gloo of two processes, and the store"
        assert {address for address, _ in ports} <= LOOPBACK
        for _, port in ports:
            for size in (0, 1, 8, 64, 5000):
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    try:
                        peer.sendall(dice.randbytes(size))
                    except OSError:
                        continue
        (tmp_path / "stay").unlink()
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
    for rank in range(2):
        assert (tmp_path / f"found-{rank}").read_text() == "['of 0', 'of 1'] [2.0, 2.0]"


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8192, reason="the system allows fewer files")
def test_connections_that_say_nothing_do_not_use_up_the_open_files(tmp_path: Path) -> None:
    """gloo aborts a process that cannot take a connection, and systems usually begin with a limit of 1024."""
    (tmp_path / "stay").touch()
    store, own = store_on_loopback(), {SECRET_VARIABLE: new_secret()}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = [start("rank of few files", tmp_path, store.port, rank, **own) for rank in range(2)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    with ended(*processes):
        try:
            deadline = time.monotonic() + 120
            while len(list(tmp_path.glob("found-*"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            flood([process.pid for process in processes], count=600)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        (tmp_path / "stay").unlink()
        for process in processes:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err


def test_our_launcher_gives_its_processes_a_secret_and_shows_it_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import os, sys; from hf_gpipe.job.launch import launch;"
        "sys.exit(launch('tests.job.said_secret', [sys.argv[1]], 2))"
    )
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    secrets = []
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for turn in range(2):
        done = Program(tmp_path / f"launcher-{turn}", program, str(tmp_path))
        out, err = done.communicate(timeout=200)
        assert done.returncode == 0, err
        first, second = ((tmp_path / str(rank)).read_text().split("\n", 1) for rank in range(2))
        assert first[0] == second[0]
        assert len(first[0]) == 64
        assert first[0] not in first[1] + second[1] + out + err
        secrets.append(first[0])
    assert secrets[0] != secrets[1]


def test_what_is_not_signed_for_a_key_and_a_start_is_refused() -> None:
    plain = dist.HashStore()
    store = SignedStore(plain, b"k" * 32, "start")
    store.set("a", "text")
    store.set("b", b"\x00\xff")
    assert store.get("a") == b"text"
    assert store.multi_get(["a", "b"]) == [b"text", b"\x00\xff"]
    assert b"text" not in plain.get("b")
    of_a = plain.get("a")
    forgeries = [b"", b"text", b"zz", of_a[:-2] + b"00", of_a[:-2]]
    for forged in forgeries:
        plain.set("a", forged.decode())
        with pytest.raises(UserError, match="not written with this run's secret"):
            store.get("a")
    plain.set("b", of_a.decode())  # signed, for another key
    plain.set("a", of_a.decode())
    with pytest.raises(UserError, match=r"secret \(b\)"):
        store.get("b")
    for other in (SignedStore(plain, b"k" * 32, "other start"), SignedStore(plain, b"x" * 32, "start")):
        with pytest.raises(UserError, match=r"secret \(a\)"):
            other.get("a")


def test_gloo_connects_to_no_address_that_is_not_signed() -> None:
    """A peer writes its own address where that of rank 1 belongs, before rank 1 does."""
    plain = dist.HashStore()
    own = SignedStore(plain, b"k" * 32, "start")
    for name in ("0/1", "1", "rank_1"):
        plain.set(name, b"an address of somebody else".hex())
    with pytest.raises(UserError, match=r"not written with this run's secret \(0/1\)"):
        dist.ProcessGroupGloo(own, 0, 2, timedelta(seconds=20))


def test_a_secret_has_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert signed(store, "start") is store
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(UserError, match="has 5 characters, and a secret needs at least 16"):
        signed(store, "start")


def test_processes_meet_in_a_signed_store() -> None:
    plain = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        stores = [SignedStore(plain, b"k" * 32, "meeting") for _ in range(2)]
        names = {one.result() for one in [pool.submit(meet, store, r, 2, LIMIT) for r, store in enumerate(stores)]}
    assert len(names) == 1


@pytest.mark.parametrize(
    "told",
    [b"", b"[]", b'{"host": "a"}', b'{"host": 1, "boot": "", "versions": {}}', b"[" * 10**5,
     b'{"host": "a", "boot": "", "versions": {}, "more": 1}', b"\xff"],
)  # fmt: skip
def test_what_a_peer_tells_at_the_start_is_read_strictly(told: bytes) -> None:
    with pytest.raises(MessageError, match="what a process has told at the start is not hf_gpipe's"):
        _read(told, RankFacts)
