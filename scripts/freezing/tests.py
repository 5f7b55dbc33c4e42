"""Errors, exit codes and settings of the tests, by the name of the test: see `scripts.freezing.noting`.

`check` runs the tests that have an entry, and `write` all but those of EXCLUDED, twice: what differs between the two
runs is left out, because a port, a time or a draw decided it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.freezing.results import FOLDER, Entries, exact, read

FILE = "tests.txt.xz"
tolerance_of = exact
#: One process computes all, and starts others itself.
IS_WHOLE = True

_ROOT = Path(__file__).resolve().parents[2]
#: They draw or inject at random, need a device, take long and raise little, or are of scripts and pages.
EXCLUDED = (
    *("tests/gpu", "tests/emulated_cuda", "tests/docs", "tests/scripts", "tests/test_faults.py"),
    *("tests/test_random_search.py", "tests/test_foreign_scripts.py", "tests/test_examples.py"),
    *("tests/test_image_families.py", "tests/training/test_integrations.py"),
)
_PATH = re.compile(r"(?:/[\w.+-]+)*/(?:pytest-of-[\w-]+|hf_gpipe-[\w-]+|tmp[\w-]{6,})[\w./+-]*")
_FOLDER_OF_TEST = re.compile(r"test_\w*\d$")
_VARYING = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"),
    (re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):\d+"), r"\1:PORT"),
    (re.compile(r"\b(process|pid|port) \d{4,}"), r"\1 NUMBER"),
    (re.compile(r"\bon machine [\w.-]+"), "on machine NAME"),
)


def names() -> list[str]:
    """The tests that have an entry."""
    return list(read(FOLDER / FILE))


def all_entries(only: str, *, is_new: bool) -> Entries:
    """The notes of the tests whose name contains `only`.

    Args:
        only: a part of names.
        is_new: whether all tests run, twice, and not those alone that have an entry.
    """
    if not is_new:
        return _noted([name for name in names() if only in name])
    first, second = _noted(None), _noted(None)
    kept = {}
    for name in first.keys() & second.keys():
        same = set(first[name].splitlines()) & set(second[name].splitlines())
        if same:
            kept[name] = "\n".join(sorted(same))
    return kept


def _noted(wanted: list[str] | None) -> Entries:
    """Run tests, and return what they have noted.

    Raises:
        SystemExit: a test failed, so that its notes say nothing.
    """
    with tempfile.TemporaryDirectory(prefix="freeze-") as name:
        folder = Path(name)
        (folder / "notes").mkdir()
        environment = {**os.environ, "HF_GPIPE_NOTES": str(folder / "notes"), "PYTHONPATH": str(_ROOT)}
        if wanted is not None:
            (folder / "wanted").write_text("\n".join(wanted), encoding="utf-8")
            environment["HF_GPIPE_WANTED"] = str(folder / "wanted")
        # conftest.py says with which instructions tests compute.
        for variable in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
            environment.pop(variable, None)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "scripts.freezing.noting", "tests"]
        command += [f"--ignore={path}" for path in EXCLUDED]
        done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 5):
            print("\n".join(done.stdout.splitlines()[-40:]), file=sys.stderr)
        entries: dict[str, set[str]] = {}
        for path in (folder / "notes").iterdir():
            for line in path.read_text(encoding="utf-8").splitlines():
                test, kind, text = json.loads(line)
                entries.setdefault(test, set()).add(f"{kind}: {_plain(text)}")
        return {test: "\n".join(sorted(lines)) for test, lines in entries.items()}


def _plain(text: str) -> str:
    """A text without what varies from run to run, in one line."""
    text = _PATH.sub(_path, text).replace(str(_ROOT), ".").replace("\n", "\\n")
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


def _path(found: re.Match[str]) -> str:
    """A path in a folder of one run: the name of the file is left."""
    name = found[0].rpartition("/")[2]
    return "PATH" if _FOLDER_OF_TEST.match(name) else f"PATH/{name}"
