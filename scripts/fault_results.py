"""Results of injected faults: a line of JSON for each. A script that is started again with their folder goes on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any


class Results:
    """Those in a folder, which is made if it is missing.

    Each is a dictionary with what came of a fault: `seconds` until the last process ended, `exit_code`, `told`, the
    lines that say why, `problems`, what is not as it should be, and whether there was a `hang` or a `loss`: a process
    that did not end in time, a checkpoint that was lost or broken.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "results.jsonl"

    def read(self) -> list[dict[str, Any]]:
        """The results so far. A line that was cut off, as when the machine lost its power, is left out."""
        entries = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            try:
                entries.append(json.loads(line))
            except ValueError:
                continue
        return entries

    def add(self, name: str, result: dict[str, Any], run: Path) -> None:
        """Add one and print it; the folder of its run stays where anything was wrong."""
        with self._path.open("ab", buffering=0) as file:  # at once, as another process may do so at the same moment
            file.write(json.dumps(result).encode() + b"\n")
        told = re.sub(r"\s+", " ", "; ".join(result.get("told", [])))[:300]
        seconds = f"{result['seconds']:.1f}" if "seconds" in result else "?"
        print(f"{name:80} {seconds:>6} s, exit code {result.get('exit_code')}  {told}", flush=True)
        for problem in result["problems"]:
            print(f"    WRONG: {problem}", flush=True)
        if not result["problems"]:
            shutil.rmtree(run, ignore_errors=True)

    def summary(self) -> int:
        """Print the sums; 1 where anything was wrong."""
        every = self.read()
        hangs, losses, wrong = (sum(bool(one.get(name)) for one in every) for name in ("hang", "loss", "problems"))
        slowest = max((one["seconds"] for one in every if one.get("told") and "seconds" in one), default=0.0)
        print(
            f"\n{len(every)} faults: {hangs} hangs, {losses} lost or corrupt checkpoints, {wrong} with anything wrong; "
            f"the slowest end took {slowest:.1f} seconds"
        )
        return int(bool(wrong))
