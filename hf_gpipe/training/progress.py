"""Progress of a training in the main process: one progress bar, and a file metrics.jsonl with every metric."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.checkpoint.save import replace_file, writing
from hf_gpipe.errors import UserError
from hf_gpipe.training.meter import STAGE_PEAK

METRICS_FILE = "metrics.jsonl"

#: The project's metrics and how they are shown, in this order; metrics of a script come after them.
_SHOWN = {
    "loss": ".4f",
    "eval_loss": ".4f",
    "grad_norm": ".3f",
    "learning_rate": ".2e",
    "tokens_per_second": ",.0f",
    "rows_per_second": ",.0f",
    "bubble": ".1%",
}
#: Metrics of every training that are for files only, and the endings of other such metrics' names.
_HIDDEN = {"epoch", "total_flos", "train_loss", "training_seconds", "num_input_tokens_seen"}
_HIDDEN_ENDS = ("_runtime", "_samples_per_second", "_steps_per_second", "_tokens_per_second", "_compilation_time")


#: The bar of tqdm, which takes what the numbers leave of the terminal's width.
_BAR = "step {n_fmt}/{total_fmt} |{bar}| {remaining} left, {rate_fmt}{postfix}"


class ProgressBar(ProgressCallback):
    """Writes a line of metrics for each log, above a bar over all steps where stderr is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._is_terminal = sys.stderr.isatty()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and self._is_terminal:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                bar_format=_BAR,
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do nothing: evaluations have no bar of their own."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = words(logs or {})
        if not state.is_world_process_zero or not shown:
            return
        width = None
        if self.training_bar is not None:
            width = _width()
            if "loss" in shown:
                shown.pop("left", None)  # the bar has it
                self.training_bar.set_postfix_str(f"loss {shown['loss']}", refresh=False)
        tqdm.write(line_of(f"step {state.global_step}/{state.max_steps}", shown, width), file=sys.stderr)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def line_of(step: str, shown: Mapping[str, str], width: int | None) -> str:
    """The line of a log. It is folded between two metrics where it is longer than `width`; None: it is one line."""
    entries = [step, *(f"{name} {value}" for name, value in shown.items())]
    if width is None:
        return "  ".join(entries)
    unbroken = "  ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in entries)
    folded = textwrap.fill(unbroken, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return folded.replace("\N{NO-BREAK SPACE}", " ")


def _width() -> int:
    """The columns of the terminal that stderr is; 80 where it does not say."""
    with suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 80


def words(logs: dict[str, Any]) -> dict[str, str]:
    """The texts of the metrics that are shown, by name."""
    known = {name: format(logs[name], spec) for name, spec in _SHOWN.items() if name in logs}
    if "seconds_left" in logs:
        known["left"] = tqdm.format_interval(round(logs["seconds_left"]))
    if "peak_memory_bytes" in logs:
        of_stages = [value for name, value in logs.items() if name.startswith(STAGE_PEAK)]
        peaks = [f"{value / 1e9:.2f}" for value in of_stages or [logs["peak_memory_bytes"]]]
        known["memory"] = f"{'/'.join(peaks if len(set(peaks)) > 1 else peaks[:1])} GB"
    own = {
        name: value
        for name, value in logs.items()
        if name not in {*_SHOWN, *_HIDDEN, "seconds_left"}
        and not name.startswith("peak_memory_bytes")
        and not name.endswith(_HIDDEN_ENDS)
    }
    return known | {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in own.items()}


class MetricsFile(TrainerCallback):
    """Appends every logged dict of metrics to metrics.jsonl in the output directory, with its step.

    Raises CheckpointError where that file cannot be written, as on a full disk.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the file anew. A training that resumes keeps the lines up to its first step."""
        path = self._path(args)
        if not state.is_world_process_zero:
            return
        with writing(path):
            # A line that was damaged has no step, and is left out.
            lines = path.read_text(errors="replace").splitlines() if path.exists() and state.global_step else []
            kept = [line for line in lines if _step(line) <= state.global_step]
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, "".join(f"{line}\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero:
            path = self._path(args)
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a") as file:
                    file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")

    @staticmethod
    def _path(args: TrainingArguments) -> Path:
        return Path(args.output_dir) / METRICS_FILE


class _Line(TypedDict):
    step: strict_json.Number


def _step(line: str) -> float:
    """The step of a line of the file; infinity for a line that was cut off when its process was killed."""
    try:
        return float(strict_json.parse(line, METRICS_FILE, _Line, allows_nan=True)["step"])
    except UserError:
        return float("inf")
