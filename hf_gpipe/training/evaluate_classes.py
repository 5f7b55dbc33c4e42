"""How well a model classifies held-out texts: the loss per text, and the share of right classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import EvalPrediction

from hf_gpipe.data.labelled import LabelCollator, LabelledExamples
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.held_out import held_out
from hf_gpipe.training.predicting import predict


@dataclass(frozen=True)
class ClassReport:
    """Of held-out texts.

    Attributes:
        num_rows: their number.
        accuracy: the share of them whose most likely class is the right one.
        loss: negative log-likelihood of the right class per text, natural logarithm.
    """

    num_rows: int
    accuracy: float
    loss: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"task": "classification", **asdict(self)}

    def text(self) -> str:
        """One line for people."""
        return f"accuracy {self.accuracy:.1%}, loss {self.loss:.4f}"


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a trainer, for logits (N, C) and labels (N,)."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def evaluate_classes(
    pipe: Pipeline, make_rows: Callable[[], LabelledExamples], batch_size: int, *, max_rows: int | None = None
) -> ClassReport:
    """Classify held-out texts.

    Every process calls it, and every process gets the same report. Logits are not clipped and labels not smoothed.

    Args:
        pipe: the model.
        make_rows: called in the main process only.
        batch_size: texts at a time.
        max_rows: how many to take, the first ones; None: all.

    Raises:
        DataError: on every process, what `make_rows` raises in the main one.
    """
    collate = LabelCollator.for_config(pipe.adapter.config)
    num_rows, batches = held_out(pipe, make_rows, collate, batch_size, max_rows)
    nll, num_right = 0.0, 0
    for one in predict(pipe, batches, with_logits=True):
        nll += float(one.evaluation.row_nll.sum())
        if one.logits is not None:  # in the last stage's leader
            num_right += int((one.logits.argmax(-1) == one.batch["labels"].numpy()).sum())
    num_right = pipe.world.broadcast_value(num_right, pipe.world.leader_of(pipe.num_stages - 1))
    return ClassReport(num_rows, num_right / num_rows, nll / num_rows)
