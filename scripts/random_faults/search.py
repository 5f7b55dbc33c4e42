"""Cases of a seed, two at a time, until the time is over."""

from __future__ import annotations

import json
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

from scripts import forked
from scripts.random_faults.table import table
from scripts.random_faults.trial import Prepared, note, prepare, try_case

AT_ONCE = 2


def search(seed: int, seconds: float, folder: Path, only: str = "", case: int | None = None) -> int:
    """Try cases that the results do not have yet, and print the table of all results; 1 if anything was wrong.

    Args:
        seed: of the cases.
        seconds: to begin new ones; one is begun whatever they are.
        folder: for what all runs read, `results.jsonl`, and the runs in which anything was wrong.
        only: a word of the faults and launches to try.
        case: this one alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prepared, results = prepare(folder, only), folder / "results.jsonl"
    done = {(result["seed"], result["case"]) for result in read(results)}
    end, number, running = time.monotonic() + seconds, -1 if case is None else case - 1, list[forked.Forked]()
    while not running or time.monotonic() < end:
        running = [process for process in running if process.poll() is None]
        if len(running) < AT_ONCE:
            number += 1
            if case is not None and number > case:
                break
            if case is not None or (seed, number) not in done:
                # A process that a case leaves behind must not have this one's files open.
                running.append(forked.Forked(partial(_one, seed, number, only, prepared, folder)))
        time.sleep(0.05)
    for process in running:
        process.wait(1200.0)
    every = read(results)
    print(f"\n{table(every)}\n\n{sum(not result['met'] for result in every)} more cases did not come to their fault")
    return int(any(result["problems"] for result in every))


def read(results: Path) -> list[dict[str, Any]]:
    """The results so far. A line that was cut off, as when the machine lost its power, is left out."""
    entries = []
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


def _one(seed: int, number: int, only: str, prepared: Prepared, folder: Path) -> int:
    own = folder / f"case-{seed}-{number}"
    shutil.rmtree(own, ignore_errors=True)
    result = try_case(seed, number, only, prepared, own)
    note(result, folder / "results.jsonl")
    where = f"{result['fault']}, {result['launch']}, in {result['phase']}, process {result['victim']}"
    told = re.sub(r"\s+", " ", "; ".join(result["told"]))[:160]
    print(f"{number:4} {where:80} {result['seconds']:6.1f} s, exit code {result['exit_code']}  {told}", flush=True)
    for problem in result["problems"]:
        print(f"     WRONG: {problem}", flush=True)
    if not result["problems"]:
        shutil.rmtree(own, ignore_errors=True)
    return 0
