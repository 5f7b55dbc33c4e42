"""How a run ends after a fault: exit code and message of each phase and kind (scripts/chaos.py), and the faults drawn.

The faults that scripts/random_faults draws end as their moment decides, so their list alone is frozen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.chaos import some_faults
from scripts.freezing.results import Entries, exact
from scripts.random_faults.faults import FAULTS

FILE = "faults.txt"
tolerance_of = exact
IS_WHOLE = True

_ROOT = Path(__file__).resolve().parents[2]
#: What depends on the moment, or on the speed of the machine: who notices first, and what the others do meanwhile.
_VARYING = (
    (re.compile(r"/\S*hf_gpipe-chaos\S*?/(?=\d\d\.\d/|out|run)"), "FOLDER/"),
    (re.compile(r"\d\d\.\d/"), ""),
    (re.compile(r"after step \d of"), "after step N of"),
    (re.compile(r"\bstep \d\b"), "step N"),
    (re.compile(r"checkpoint-\d"), "checkpoint-N"),
    (re.compile(r"\d+(\.\d+)? (seconds|GiB|MiB|KiB)"), r"N \2"),
    (re.compile(r"(line) \d+"), r"\1 N"),
    (re.compile(r" ?\(action \d+ of \d+ of this process: .*?\)"), ""),
    (re.compile(r"By the planner, .*"), "By the planner, ..."),
    (re.compile(r"its loss was noticed by .*"), "its loss was noticed"),
    (re.compile(r"process \d(, stage \d, action \w+)?(?=: RuntimeError: waited)"), "a process"),
    (re.compile(r" \((evaluating|training step N|saving checkpoint-N)\)"), ""),
    (re.compile(r"\bwhile [^,;(]+"), "while it worked"),
)


def names() -> list[str]:
    """The faults."""
    return ["faults that are drawn", *map(str, some_faults())]


def all_entries(only: str, *, is_new: bool) -> Entries:
    """The endings of the faults whose name contains `only`."""
    found: Entries = {}
    if only in "faults that are drawn":
        lines = [
            f"{fault.name}: in {', '.join(fault.launches)}; at the start {fault.is_at_start}, survives "
            f"{fault.survives}, silent {fault.is_silent}"
            for fault in FAULTS
        ]
        found["faults that are drawn"] = "\n".join(lines)
    if not any(only in str(fault) for fault in some_faults()):
        return found
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-chaos-") as folder:
        command = [sys.executable, str(_ROOT / "scripts" / "chaos.py"), "--quick", "--output", folder, "--only", only]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        subprocess.run(command, cwd=_ROOT, env=environment, stdout=sys.stderr)
        for line in (Path(folder) / "results.jsonl").read_text().splitlines():
            result = json.loads(line)
            told = [_plain(text.replace(folder, "FOLDER")) for text in result.get("told", [])]
            problems = [_plain(text) for text in result["problems"]]
            found[result["fault"]] = "\n".join([f"exit code {result.get('exit_code')}", *told, *problems])
    return found


def _plain(text: str) -> str:
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text
