"""The completions of each log as a file, as of TRL's `log_completions`, and what reward functions log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from hf_gpipe.data.chats import text_of_message
from hf_gpipe.errors import UserError
from hf_gpipe.text import shorten, table_text


class CompletionLog:
    """The completions of a training since its last log, in the main process.

    Args:
        folder: where each log writes completions_STEP.parquet; None: completions are not kept.
        num_printed: how many of them are printed; None: all.
    """

    def __init__(self, folder: Path | None, num_printed: int | None = None) -> None:
        self._folder, self._num_printed = folder, num_printed
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, list[Any]] = defaultdict(list)
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the completions whose rewards are asked for, with a value for each."""
        self._columns[column] += values

    def log_metric(self, name: str, value: float) -> None:
        """Log a number beside the other metrics, as the mean of those since the last log."""
        self._metrics[name].append(float(value))

    def take_metrics(self) -> dict[str, float]:
        """The mean of each number that was logged since the last call."""
        means = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return means

    def add(
        self, given: Mapping[str, Any], rewards: Mapping[str, Sequence[float]], advantages: Sequence[float]
    ) -> None:
        """Add completions.

        Args:
            given: what reward functions got.
            rewards: of each function by its name, NaN of none.
            advantages: of the completions.

        Raises:
            UserError: a column of `log_extra` has not one value for each completion.
        """
        extra = dict(self._columns)
        self._columns.clear()
        if self._folder is None:
            return
        columns = {name: given[f"{name}s"] for name in ("prompt", "completion")}
        for name, values in extra.items():
            if len(values) != len(advantages):
                raise UserError(
                    f"log_extra({name!r}, ...) got {len(values)} values for {len(advantages)} completions; give one "
                    "for each"
                )
        columns |= {**rewards, **extra, "advantage": advantages}
        self._rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def write(self, step: int) -> None:
        """Write the completions since the last call into the file of a step, and print some of them."""
        rows, self._rows = self._rows, []
        if not rows or self._folder is None:
            return
        names = ["step", *dict.fromkeys(name for row in rows for name in row)]
        columns = {name: [row.get(name, step if name == "step" else None) for row in rows] for name in names}
        self._folder.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), self._folder / f"completions_{step:05d}.parquet")
        cells = [[_cell(row.get(name)) for name in names[1:]] for row in rows[: self._num_printed]]
        print(f"completions before step {step}:", table_text([names[1:], *cells], left=range(len(names))), sep="\n")


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = " ".join(map(text_of_message, value))
    return f"{value:.4g}" if isinstance(value, float) else shorten(repr(value))
