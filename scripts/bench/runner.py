"""The common parts of the benchmarks: their options, and repetitions that take turns on a quiet machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from bench import machine

Key = TypeVar("Key")
Found = TypeVar("Found")


def parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A parser with the text at the top of a script as its help, and a whole-number option for each of `numbers`."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default: {default}")
    return made


def bench_parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """The same with the options of all benchmarks that measure in processes of their own."""
    made = parser(doc, **numbers)
    made.add_argument("--quiet", type=float, default=120, help="seconds to wait for a quiet machine before each run")
    made.add_argument("--json", type=Path, help="where to write the figures")
    made.add_argument("--quick", action="store_true", help="tiny models, once, to see that everything runs")
    return made


def await_quiet(options: argparse.Namespace) -> None:
    """Wait for a quiet machine as long as the options say, and say so where it does not become quiet."""
    if not options.quick and options.quiet and not machine.wait_until_quiet(options.quiet):
        print("the machine is not quiet", file=sys.stderr)


def take_turns(cases: Mapping[Key, Callable[[], Found]], options: argparse.Namespace) -> dict[Key, list[Found]]:
    """Measure each case `options.reps` times, in turn, every other time in reverse; with `options.quick` once."""
    results: dict[Key, list[Found]] = {case: [] for case in cases}
    if options.quick:
        print("QUICK: tiny models, measured once; these speeds mean nothing", flush=True)
    reps = 1 if options.quick else options.reps
    for rep in range(reps):
        for case in list(cases)[:: -1 if rep % 2 else 1]:
            await_quiet(options)
            results[case].append(cases[case]())
            print(f"{rep + 1}/{reps}: {case}", file=sys.stderr, flush=True)
    return results


def say(text: str) -> None:
    """Print how far a benchmark is."""
    print(text, file=sys.stderr, flush=True)
