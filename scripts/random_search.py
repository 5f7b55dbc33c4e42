"""Searches at random for configurations, options and mini-batches of which stages compute other numbers than the model.

    python scripts/random_search.py                           a minute, from a new seed, which is printed
    python scripts/random_search.py --minutes 60 --seed 7     an hour
    python scripts/random_search.py --seed 7 --first 5000     on from case 5000
    python scripts/random_search.py --seed 7 --case 1234      this case alone, reduced to what it needs to be wrong
    python scripts/random_search.py --families bart falcon    of these families alone
    python scripts/random_search.py --output cases.jsonl      also a line of JSON for each case, appended
    python scripts/random_search.py --counts a.jsonl b.jsonl  the counts of such files together; nothing is run

Each case draws a family, changes of its configuration's own fields, a number of stages and micro-batches, a schedule, a
recomputation, a partition, padding, packing, chunks, accumulation and more (`scripts/random_cases/`). The loss and
every gradient are compared with those of the plain transformers model looped over the same micro-batches, in float64 to
1e-10 of the gradient norm. A case is right, refused (by an error that names what is not supported), not runnable (the
plain model fails), or wrong: other numbers, or an error that does not say what to do. The exit code is 1 if any is
wrong. A seed and a number make the same case wherever transformers is the same.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from hf_gpipe.adapters.families import EXACT
from scripts.random_cases.draw import families
from scripts.random_cases.run import NOT_RUNNABLE, REFUSED, RIGHT, WRONG, Outcome, examine, reduced


def search(seed: int, minutes: float, names: tuple[str, ...] = (), number: int = 0) -> Iterator[Outcome]:
    """The cases of a seed in order, from a number on, until the time is over."""
    end = time.monotonic() + 60 * minutes
    names = names or families()
    while time.monotonic() < end:
        yield examine(seed, number, names)
        number += 1


def counts(lines: Sequence[dict[str, str]]) -> str:
    """The numbers of cases, families and verdicts, and the refusals with their numbers."""
    verdicts = Counter(line["verdict"] for line in lines)
    of_families = {line["family"] for line in lines}
    known = of_families & EXACT
    told = ", ".join(f"{verdicts[word]} {word}" for word in (RIGHT, REFUSED, NOT_RUNNABLE, WRONG))
    compared = {line["family"] for line in lines if line["verdict"] == RIGHT}
    text = [f"{len(lines)} cases of {len(of_families)} families ({len(known)} of them listed as exact): {told}"]
    text.append(f"{len(compared)} families have a right case")
    reasons = Counter(re.sub(r"\d+", "N", line["detail"]) for line in lines if line["verdict"] == REFUSED)
    text += [f"{count:6} refused: {reason[:150]}" for reason, count in reasons.most_common(15)]
    return "\n".join(text)


def line_of(outcome: Outcome) -> dict[str, str]:
    """The record of a case."""
    case = outcome.case
    drawn = {"seed": str(case.seed), "case": str(case.number), "family": case.family}
    return {**drawn, "verdict": outcome.verdict, "detail": outcome.detail, "told": str(case)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    for name, default in (("--seed", None), ("--case", None), ("--first", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--families", nargs="+", default=())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--counts", nargs="+", type=Path)
    arguments = parser.parse_args(words)
    lines: list[dict[str, str]] = []
    if arguments.counts:
        lines = [json.loads(line) for path in arguments.counts for line in path.read_text().splitlines()]
        return _told(lines)
    quiet()
    names = tuple(arguments.families)
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    if arguments.case is not None:
        outcome = examine(seed, arguments.case, names or families())
        print(f"{outcome.verdict}: {outcome.case}\n    {outcome.detail}")
        if outcome.verdict == WRONG:
            least = reduced(outcome)
            print(f"reduced: {least.case}\n    {least.detail}")
        return int(outcome.verdict == WRONG)
    print(f"seed {seed}", flush=True)
    for outcome in search(seed, arguments.minutes, names, arguments.first):
        lines.append(line_of(outcome))
        if arguments.output is not None:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
        if outcome.verdict == WRONG:
            print(f"WRONG --seed {seed} --case {outcome.case.number}: {outcome.case}: {outcome.detail}", flush=True)
            least = reduced(outcome)
            print(f"    reduced: {least.case}: {least.detail}", flush=True)
    return _told(lines)


def _told(lines: Sequence[dict[str, str]]) -> int:
    """Print the counts; the exit code."""
    print(counts(lines))
    return int(any(line["verdict"] == WRONG for line in lines))


def quiet() -> None:
    """Leave out what transformers and we say about odd configurations."""
    warnings.filterwarnings("ignore")
    logging.getLogger("hf_gpipe").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
