"""Loss and predictions over a dataset: every process runs the stages, the last stage's process sees the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.training.loader import Batch, MiniBatches

Preprocess = Callable[[torch.Tensor, torch.Tensor], Any]
"""(logits (B, T, V), labels (B, T)) -> a tensor of B rows, or a tuple of such."""


@dataclass
class Scores:
    """What came out of a pass over a dataset.

    Attributes:
        loss: mean negative log-likelihood per target token, the same on every process.
        num_rows: rows of the dataset, the same on every process.
        predictions: where they were asked for and in the last stage's process: (rows, ...), padded with -100.
        labels: (rows, T), padded with -100, where predictions are.
        inputs: input_ids, in the same way.
        row_losses: mean negative log-likelihood of each row, in the same way.
    """

    loss: float
    num_rows: int
    predictions: Any = None
    labels: np.ndarray | None = None
    inputs: np.ndarray | None = None
    row_losses: np.ndarray | None = None


def score(
    pipe: Pipeline,
    batches: MiniBatches | None,
    *,
    with_predictions: bool = False,
    preprocess: Preprocess | None = None,
    on_batch: Callable[[], None] | None = None,
) -> Scores:
    """Evaluate every row of a dataset. Every process calls it.

    Args:
        pipe: the pipeline.
        batches: read in the main process; the others may pass None.
        with_predictions: whether to keep the logits, as much as `preprocess` leaves of them.
        preprocess: makes less of a micro-batch's logits, as soon as they are there.
        on_batch: called after each mini-batch.
    """
    nll, num_tokens, num_rows = 0.0, 0, 0
    collected = _Collected(preprocess)
    source = ([_with_labels(batch)] for batch in batches.epoch(0)) if batches is not None else None
    for (batch,) in shared_stream(source if pipe.topology.is_main else None, pipe.topology):
        if with_predictions:
            collected.begin(batch)
        evaluation = pipe.eval_on(batch, collected.add_logits if with_predictions else None)
        collected.row_losses.append((evaluation.row_nll / evaluation.row_tokens.clamp(min=1)).numpy())
        nll += float(evaluation.row_nll.sum())
        num_tokens += int(evaluation.row_tokens.sum())
        num_rows += len(evaluation.row_nll)
        if on_batch is not None:
            on_batch()
    scores = Scores(nll / max(num_tokens, 1), num_rows)
    if with_predictions and collected.predictions:
        scores.predictions = _concatenated(collected.predictions)
        scores.labels = _concatenated(collected.labels)
        scores.inputs = _concatenated(collected.inputs)
        scores.row_losses = np.concatenate(collected.row_losses)
    return scores


class _Collected:
    """Predictions and labels as they come; predictions in the last stage's process only."""

    def __init__(self, preprocess: Preprocess | None) -> None:
        self._preprocess = preprocess
        self._num_columns = 0
        self.predictions: list[Any] = []
        self.labels: list[np.ndarray] = []
        self.inputs: list[np.ndarray] = []
        self.row_losses: list[np.ndarray] = []

    def begin(self, batch: Batch) -> None:
        self._num_columns = batch["labels"].shape[1]
        self.labels.append(batch["labels"].numpy())
        self.inputs.append(batch["input_ids"].numpy())

    def add_logits(self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        labels = inputs["labels"]
        kept = logits if self._preprocess is None else self._preprocess(logits, labels)
        self.predictions.append(self._as_arrays(kept, labels.shape[1]))

    def _as_arrays(self, kept: Any, num_columns: int) -> Any:
        """Tensors as numpy arrays; one that has the labels' columns gets back those cut off as padding."""
        if isinstance(kept, list | tuple):
            return tuple(self._as_arrays(one, num_columns) for one in kept)
        tensor = kept.detach().cpu()
        array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return _padded(array, self._num_columns) if array.ndim > 1 and array.shape[1] == num_columns else array


def _with_labels(batch: Batch) -> Batch:
    if "labels" not in batch:
        raise DataError(
            f"a mini-batch to evaluate has no 'labels', only {', '.join(batch)}; without targets use Pipeline.generate"
        )
    return batch


def _concatenated(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_concatenated(column) for column in zip(*parts, strict=True))
    if parts[0].ndim > 1:
        num_columns = max(part.shape[1] for part in parts)
        parts = [_padded(part, num_columns) for part in parts]
    return np.concatenate(parts)


def _padded(array: np.ndarray, num_columns: int) -> np.ndarray:
    """(B, T, ...) -> (B, num_columns, ...), filled with -100."""
    missing = num_columns - array.shape[1]
    return np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), constant_values=IGNORED_LABEL)
