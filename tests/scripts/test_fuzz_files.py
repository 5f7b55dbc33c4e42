"""The fuzz of every file that is read: a short one from a new seed; and that it sees what no reader may do."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_gpipe.errors import DataError
from scripts.file_fuzz import mutate, watched
from tests.forked_command import Program


def fuzz(words: list[str]) -> int:
    from scripts import fuzz_files  # what it imports need be in its own process alone

    return fuzz_files.main(words)


def test_two_seconds_of_it_from_a_new_seed(tmp_path: Path) -> None:
    """The seed is printed; `--seed S --case N` repeats a case that is wrong."""
    process = Program(tmp_path, fuzz, ["--minutes", "0.035"])
    out, err = process.communicate(timeout=600)
    print(out)
    assert process.returncode == 0, out + err
    assert re.search(r"^seed \d+$", out, re.MULTILINE)
    assert re.search(r"cases: \d+ read, \d+ refused, 0 wrong", out)


def _spin() -> None:
    while True:
        pass


def _fill() -> None:
    kept = bytearray(3 * 10**8 + watched.GROWTH_BYTES)
    kept[::4096] = b"x" * len(kept[::4096])


def _refuse() -> None:
    raise DataError("a file that is damaged")


def _raise() -> None:
    raise KeyError("nothing")


@pytest.mark.parametrize(
    ("read", "outcome"),
    [
        (lambda: None, watched.READ),
        (lambda: Path("own").write_text("x"), watched.READ),
        (_refuse, watched.REFUSED),
        (_raise, r"exit code 3: .*KeyError: 'nothing'"),
        (lambda: sys.exit(0), "exit code 3: "),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
        (lambda: os.system("true"), "it ran os.system"),
        (lambda: subprocess.run(["true"], check=False), "it started "),
        (lambda: Path("../outside").write_text("x"), "to write"),
        (lambda: os.mkdir("../new"), "os.mkdir of '../new'"),
        (_fill, r"it took 1\.\d GB"),
        (_spin, "ended by SIGXCPU: over 1 s of the processor"),
        (lambda: time.sleep(60), "it had not ended after 5 s"),
    ],
)
def test_what_no_reader_may_do_is_seen(
    read: Callable[[], None], outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if read is _spin:
        monkeypatch.setattr(watched, "CPU_SECONDS", 1)
    elif "after 5 s" in outcome:
        monkeypatch.setattr(watched, "SECONDS", 5)
    (tmp_path / "case").mkdir()
    assert re.search(outcome, watched.run(read, tmp_path / "case"))


def test_a_seed_makes_the_same_damage() -> None:
    content = b'{"a": [1, {"b": "c"}], "d": null}'
    for change in (mutate.of_json, mutate.in_bytes, mutate.of_yaml, mutate.of_table):
        first, again = ([change(content, random.Random(seed)) for seed in range(50)] for _ in range(2))
        assert first == again
        assert len(set(first)) > 30
