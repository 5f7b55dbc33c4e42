"""The store at which the processes of a job meet, and the secret of a run, by which they know each other's words there.

Whoever reaches the store's port can read and write there. So with a secret every value is signed (HMAC-SHA-256, of the
start of the processes, the key and the value), and one that is not is refused: a peer without the secret cannot answer
before a process of the run, nor give an address of its own for that of a process. The secret is a variable of the
environment, which other users cannot read, and never an argument or part of a message. docs/security.md says what
remains open.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_gpipe.errors import UserError

#: Has the secret. Our own launcher makes one for each run; on several machines all processes need the same.
SECRET_VARIABLE = "HF_GPIPE_SECRET"
#: A shorter one could be guessed.
LEAST_CHARACTERS = 16

_DIGEST_BYTES = hashlib.sha256().digest_size
#: Between two looks whether a store that is asked is still there.
_LOOK_SECONDS = 0.25


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def store_on_loopback() -> dist.TCPStore:
    """A store for the processes of this machine alone, at a free port. torch's own would listen on all interfaces."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class SignedStore(dist.Store):
    """A store whose values are signed, for processes and for torch, which has its addresses there.

    Counters (`add`) are not signed: they say that somebody is there, never what is true.

    Args:
        store: has the values.
        purpose: of these values, such as the name of the processes' start: what was signed for another is refused.
    """

    def __init__(self, store: dist.Store, secret: bytes, purpose: str) -> None:
        super().__init__()
        self._store: Any = store  # torch's types do not know all of its methods
        self._secret, self._purpose = secret, purpose
        self._key = hmac.digest(secret, purpose.encode(), "sha256")

    def _signature(self, key: str, value: bytes) -> bytes:
        # With the length, no other key and value have the same text.
        return hmac.digest(self._key, f"{len(key)} {key} ".encode() + value, "sha256")

    def set(self, key: str, value: str | bytes | bytearray) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, (self._signature(key, data) + data).hex())

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for. Raises UserError where it is not signed by the run's secret."""
        try:
            content = bytes.fromhex(self._store.get(key).decode())
        except ValueError:
            content = b""
        value = content[_DIGEST_BYTES:]
        if not hmac.compare_digest(content[:_DIGEST_BYTES], self._signature(key, value)):
            raise UserError(
                f"the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} has a value that was "
                f"not written with this run's secret ({key}): a process of the run has another {SECRET_VARIABLE} or "
                "none, another run has the same MASTER_PORT, or somebody else has connected; give every process the "
                "same secret, and each run a port of its own"
            )
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    def num_keys(self) -> int:
        return int(self._store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self._store.timeout
        return limit

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._secret, self._purpose)


def signed(store: dist.Store, purpose: str) -> dist.Store:
    """The store, whose values are signed if this process's run has a secret. Raises UserError where it is too short."""
    secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if secret and len(secret) < LEAST_CHARACTERS:
        raise UserError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, and a secret needs at least {LEAST_CHARACTERS}; make one "
            "with: openssl rand -hex 32"
        )
    return SignedStore(store, secret, purpose) if secret else store


def count_in_store(host: str, port: int, key: str, seconds: float) -> int:
    """Add 1 to a counter in the store at an address, and return its new value.

    Raises:
        TimeoutError: the store does not answer within so many seconds: the process that has it is stopped, or its
            machine cannot be reached.
        OSError: the store is not there.
    """
    counts: list[int] = []

    def ask() -> None:
        with suppress(RuntimeError):
            store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
            counts.append(store.add(key, 1))

    thread = threading.Thread(target=ask, name="hf_gpipe-count", daemon=True)
    thread.start()
    end = time.monotonic() + seconds + 1
    while thread.is_alive() and time.monotonic() < end:
        # torch tries again and again to connect, also where nobody listens any more, and the process that has the
        # store may end while this one asks.
        try:
            socket.create_connection((host, port), timeout=seconds).close()
        except OSError:
            thread.join(_LOOK_SECONDS)
            if not counts:
                raise
        thread.join(_LOOK_SECONDS)
    if counts:
        return counts[0]
    if thread.is_alive():
        raise TimeoutError(f"the store at {host}:{port} does not answer")
    raise ConnectionError(f"there is no store at {host}:{port}")
