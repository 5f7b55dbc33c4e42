"""Damage every file that is read, at random, and see that each ends in a listed error, in seconds and bounded memory.

    python scripts/fuzz_files.py                            a minute, from a new seed, which is printed
    python scripts/fuzz_files.py --minutes 60 --seed 7      an hour
    python scripts/fuzz_files.py --seed 7 --case 1234       this case alone, whose files and output are kept
    python scripts/fuzz_files.py --formats recipe table     of these formats alone

The formats are checkpoint (a run is resumed), model (a training starts from it), recipe, table, cache, and data. A case
copies a good sample, changes bytes or values of a file in it, and in most cases its digest too, and lets the product
read it in a process of its own. That process may end well or by a UserError, in one line for a command. Wrong are any
other exception or exit code, more than 10 s of the processor's time or 60 s in all, a growth of more than 1 GB, a file
that is written outside of the case's folder, and anything that is run. The exit code is 1 if a case is wrong. A seed
and a number make the same case.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.file_fuzz import watched
from scripts.file_fuzz.readers import FORMATS, prepare


@dataclass
class Counts:
    """The outcomes of the cases of each format."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: str, case: str) -> None:
        """Count a case."""
        is_right = outcome in (watched.READ, watched.REFUSED)
        self.outcomes.setdefault(name, Counter())[outcome if is_right else "wrong"] += 1
        if not is_right:
            self.wrong.append(f"{case}, {name}: {outcome}")
            print(self.wrong[-1], flush=True)

    def text(self) -> str:
        """A line for each format."""
        lines = [
            f"{name:10}  {sum(tally.values()):6} cases: {tally[watched.READ]} read, {tally[watched.REFUSED]} refused, "
            f"{tally['wrong']} wrong"
            for name, tally in self.outcomes.items()
        ]
        return "\n".join(lines)


def examine(prepared: Path, seed: int, number: int, names: Sequence[str], folder: Path) -> tuple[str, str]:
    """One case: the name of its format, and what came of it.

    Args:
        prepared: the samples.
        seed, number: of the case.
        names: the formats among which it is drawn.
        folder: a new one, for the case's files.
    """
    choose = random.Random(f"{seed} {number}")
    name = choose.choice(names)
    shutil.copytree(prepared / FORMATS[name].sample, folder)
    FORMATS[name].damage(folder, choose)
    return name, watched.run(partial(FORMATS[name].read, folder, prepared), folder)


def search(seed: int, seconds: float, names: Sequence[str], folder: Path, first: int = 0) -> Counts:
    """The cases of a seed in order, until the time is over.

    Args:
        seed: of the cases.
        seconds: to search.
        names: of formats.
        folder: an empty one.
        first: the number to begin with.
    """
    prepared = folder / "prepared"
    prepared.mkdir()
    # In a process of its own: this one forks, and must have no threads and nothing cached.
    outcome = watched.run(partial(prepare, prepared), folder)
    assert outcome == watched.READ, folder.with_name(f"{folder.name}.out").read_text()
    counts, end, number = Counts(), time.monotonic() + seconds, first
    while time.monotonic() < end:
        case = folder / f"case-{number}"
        name, outcome = examine(prepared, seed, number, names, case)
        counts.add(name, outcome, f"--seed {seed} --case {number}")
        for left in folder.glob(f"{case.name}*"):
            left.unlink() if left.is_file() else shutil.rmtree(left, ignore_errors=True)
        number += 1
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, default=None)
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="fuzz_files-"))
    if args.case is not None:
        (folder / "prepared").mkdir()
        print(watched.run(partial(prepare, folder / "prepared"), folder))
        print(*examine(folder / "prepared", seed, args.case, args.formats, folder / "case"), f"(see {folder})")
        return 0
    try:
        counts = search(seed, 60 * args.minutes, args.formats, folder, args.first)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(counts.text())
    return bool(counts.wrong)


if __name__ == "__main__":
    sys.exit(main())
