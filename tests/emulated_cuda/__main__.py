"""Runs a script on emulated CUDA devices: `python -m tests.emulated_cuda SCRIPT ...`, or `-m MODULE ...`.

Every Python process that it starts has the devices too, so launchers work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.emulated_cuda.build import library

SITE = Path(__file__).with_name("site")
ROOT = Path(__file__).parents[2]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The same environment, in which Python loads the devices with torch."""
    paths = [str(SITE), str(ROOT), *filter(None, [given.get("PYTHONPATH")])]
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    library("device")  # so that an error is shown once
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment(os.environ))
