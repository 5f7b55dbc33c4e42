"""How well a model does on held-out rows: what the reports of tasks share, and that of the loss.

Every process calls the functions here, with the same arguments, and gets the same report. The rows are made in the main
process alone. Logits are not clipped and labels not smoothed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import EvalPrediction

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.collate import PairCollator
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.loader import Batch, Collate
from hf_gpipe.training.predicting import from_last_stage, predict, shared_batches


@dataclass(frozen=True)
class HeldOutReport:
    """The measurements on held-out rows.

    Attributes:
        task: its name in metrics.json.
        values: the metrics, by name.
        rows: what the rows are, and how many of them, or of their tokens.
        note: a sentence about the metrics; empty: there is none.
    """

    task: str
    values: Mapping[str, float]
    rows: tuple[str, str]
    note: str = ""
    #: Only a translation has some.
    translations: ClassVar[tuple[()]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The metrics with the name of the task, ready for JSON."""
        return {"task": self.task, **self.values}

    def text(self, split: str) -> str:
        """The report for people."""
        what, count = self.rows
        metrics = {name: value for name, value in self.values.items() if not name.startswith("num_")}
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        return f"Quality on held-out {what} ({split} split, {count})\n\n{words}{self.note and f' ({self.note})'}"


@dataclass
class HeldOut:
    """Rows that a model is measured on. Every process has them and calls `mini_batches`; the main process makes them.

    Attributes:
        make: makes the rows, a map-style dataset, in the main process.
        batch_size: rows at a time.
        max_rows: how many rows to take, the first ones; None: all.
        rows: in the main process, once they are made.
    """

    make: Callable[[], Any]
    batch_size: int
    max_rows: int | None = None
    rows: Any = None

    def mini_batches(self, pipe: Pipeline, collate: Collate) -> tuple[int, Iterator[Batch]]:
        """The number of rows to take, and their mini-batches. On every process it raises the DataError of the rows."""

        def prepare() -> int:
            self.rows = self.make()
            return min(len(self.rows), self.max_rows or len(self.rows))

        num_rows = pipe.world.from_main(prepare, takes_long=True)
        starts = range(0, num_rows, self.batch_size)
        # Read in the main process alone.
        return num_rows, (
            collate([self.rows[index] for index in range(start, min(start + self.batch_size, num_rows))])
            for start in starts
        )


def evaluate_text(pipe: Pipeline, held_out: HeldOut, collate: Collate | None = None) -> HeldOutReport:
    """The loss per target token, each counting alike, and its exponential; rows are {"input_ids", "labels"}.

    Of a block of text all tokens but the first are targets, of a conversation those that are learnt.
    """
    # The mask leaves padding out, so any token serves as padding.
    num_rows, batches = held_out.mini_batches(pipe, collate or PairCollator(0))
    nll, num_tokens = 0.0, 0
    for log_probs, batch in log_probs_of(pipe, batches):
        nll -= float(log_probs.sum())
        num_tokens += int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
    return text_report(num_rows, num_tokens, nll / max(num_tokens, 1))


def text_report(num_rows: int, num_tokens: int, loss: float) -> HeldOutReport:
    """The report of a loss per token, natural logarithm; the perplexity is infinite beyond float."""
    perplexity = math.inf if loss > 700 else math.exp(loss)
    values = {"num_rows": num_rows, "num_tokens": num_tokens, "loss": loss, "perplexity": perplexity}
    return HeldOutReport("language modelling", values, ("text", f"{num_tokens} tokens"))


def measure_classes(pipe: Pipeline, held_out: HeldOut, collate: Collate, top: int = 1) -> dict[str, float]:
    """The metrics of classes; `top` is how many of the most likely ones are looked at too."""
    num_rows, batches = held_out.mini_batches(pipe, collate)

    def are_right(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.argsort(-logits, axis=-1, kind="stable")[:, :top] == labels[:, None]

    nll, is_right = of_logits(pipe, batches, are_right)
    shares, loss = (is_right.sum(axis=0).cumsum() / num_rows).tolist(), nll / num_rows
    values = {"num_rows": num_rows, "accuracy": shares[0], "loss": loss}
    return values | ({f"top_{top}_accuracy": shares[-1]} if top > 1 else {})


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a trainer, for logits (N, C) and labels (N,)."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def of_logits(
    pipe: Pipeline, batches: Iterator[Batch], measure: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, np.ndarray]:
    """The negative log-likelihood of all rows, and what `measure` makes of the logits and labels of each mini-batch.

    Every process gets them, those of all mini-batches in one array; the last stage's leader has the logits.
    """
    nll, parts = 0.0, []
    for predicted in predict(pipe, batches, with_logits=True):
        nll += float(predicted.evaluation.row_nll.sum())
        if predicted.logits is not None:
            parts.append(measure(predicted.logits, predicted.batch["labels"].numpy()))
    return nll, from_last_stage(pipe, np.concatenate(parts) if parts else None)


def log_probs_of(pipe: Pipeline, batches: Iterator[Batch]) -> Iterator[tuple[torch.Tensor, Batch]]:
    """The log-probabilities of the rows of each mini-batch, and the mini-batch, in every process."""
    with pipe.ties.holding_values():
        for batch in shared_batches(batches, pipe.world):
            yield pipe.log_probs(batch), batch


def evaluate_loss(pipe: Pipeline, held_out: HeldOut, collate: Collate, task: str, items: str) -> HeldOutReport:
    """The loss of training per example, with the metrics that it notes; an example is a unit of the loss."""
    loss = pipe.loss
    assert isinstance(loss, NotingLoss)
    num_rows, batches = held_out.mini_batches(pipe, collate)
    loss.take(is_training=False)
    total = sum(float(predicted.evaluation.row_losses.sum()) for predicted in predict(pipe, batches))
    metrics = {"loss": total / num_rows, **loss.means(pipe.world.all_reduce, is_training=False)}
    return HeldOutReport(task, {"num_rows": num_rows, **metrics}, (items, f"{num_rows} {items}"))
