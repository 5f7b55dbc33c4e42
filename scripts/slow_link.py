"""Carry the frames between two tap devices late, and lose some: the link of an emulated machine (emulated_hosts.py).

python scripts/slow_link.py NEAR FAR DELAY_SECONDS LOSS
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LARGEST_FRAME = 1 << 16


def opened(name: str) -> int:
    """A file descriptor for the frames of a tap device."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def carry(near: int, far: int, delay_seconds: float, loss: float, chance: random.Random) -> None:
    """Carry frames in both directions until the process is ended."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for device in select.select([near, far], [], [], wait)[0]:
            frame = os.read(device, _LARGEST_FRAME)
            if chance.random() >= loss:
                under_way.append((time.monotonic() + delay_seconds, far if device == near else near, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, device, frame = under_way.popleft()
            os.write(device, frame)


if __name__ == "__main__":
    carry(opened(sys.argv[1]), opened(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), random.Random(0))
