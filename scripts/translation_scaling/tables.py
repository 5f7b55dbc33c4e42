"""Reads what a report was made of from its tables, so that its pictures can be drawn without the runs."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from hf_gpipe.errors import DataError
from translation_scaling.curves import Curve
from translation_scaling.differences import Difference, Interval
from translation_scaling.learning import Learning
from translation_scaling.results import MEASURES, Finished

_Row = dict[str, Any]


def read_results(path: Path) -> list[Finished]:
    """The runs of a table with a row a language, in its order. Raises DataError if there is no such table."""
    return [
        Finished(model, seed, path.parent, {"per_language": {row["language"]: row for row in rows}})
        for (model, seed), rows in _by_run(_rows(path), "recipe")
    ]


def read_learning(path: Path, runs: Iterable[Finished]) -> list[Learning]:
    """The curves of runs by a table with a row an entry; empty if there is no such table."""
    if not path.exists():
        return []
    by_run = {(run.model, run.seed): run for run in runs}
    return [
        Learning(by_run[name], Curve(tuple(_without_gaps(row) for row in rows)), rows[0]["operations_per_token"])
        for name, rows in _by_run(_rows(path), "run")
        if name in by_run
    ]


def read_differences(path: Path) -> list[Difference]:
    """The differences of a table, without those of seeds; empty if there is no such table."""
    if not path.exists():
        return []
    measures = {measure.key: measure for measure in MEASURES}
    return [
        Difference(
            *(row["first"], row["second"], measures[row["measure"]], row["bucket"], row["mean"]),
            None if row["low"] is None else Interval(row["low"], row["high"]),
            *({}, row["num_languages"], row["num_better"]),
        )
        for row in _rows(path)
    ]


def _rows(path: Path) -> list[_Row]:
    if not path.exists():
        raise DataError(f"there is no {path}; give the folder of a report, with its tables")
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _value(word) for key, word in row.items()} for row in csv.DictReader(file)]


def _by_run(rows: Iterable[_Row], key: str) -> list[tuple[tuple[str, int], list[_Row]]]:
    return [(name, list(group)) for name, group in groupby(rows, lambda row: (row[key], row["seed"]))]


def _without_gaps(row: _Row) -> _Row:
    """A curve's entry has what was logged at its update alone."""
    return {key: value for key, value in row.items() if value is not None}


def _value(word: str) -> Any:
    """A cell as it was before it was written."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word or None
