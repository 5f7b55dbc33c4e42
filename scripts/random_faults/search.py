"""Cases of a seed, two at a time, until the time is over."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

from scripts import forked
from scripts.fault_results import Results
from scripts.random_faults.table import table
from scripts.random_faults.trial import Prepared, prepare, try_case

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
    results = Results(folder)
    prepared, done = prepare(folder, only), {(result["seed"], result["case"]) for result in results.read()}
    end, number, running = time.monotonic() + seconds, -1 if case is None else case - 1, list[forked.Forked]()
    while not running or time.monotonic() < end:
        running = [process for process in running if process.poll() is None]
        if len(running) < AT_ONCE:
            number += 1
            if case is not None and number > case:
                break
            if case is not None or (seed, number) not in done:
                # A process that a case leaves behind must not have this one's files open.
                running.append(forked.Forked(partial(_one, seed, number, only, prepared, folder, results)))
        time.sleep(0.05)
    for process in running:
        process.wait(1200.0)
    every = results.read()
    print(f"\n{table(every)}\n\n{sum(not result['met'] for result in every)} more cases did not come to their fault")
    return int(any(result["problems"] for result in every))


def _one(seed: int, number: int, only: str, prepared: Prepared, folder: Path, results: Results) -> int:
    own = folder / f"case-{seed}-{number}"
    shutil.rmtree(own, ignore_errors=True)
    result = try_case(seed, number, only, prepared, own)
    where = f"{number:4} {result['fault']}, {result['launch']}, in {result['phase']}, process {result['victim']}"
    results.add(where, result, own)
    return 0
