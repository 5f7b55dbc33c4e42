"""Loss and predictions over a dataset: every process runs the stages, the last stage's process has the predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.training.generating import Generation
from hf_gpipe.training.loader import Batch, MiniBatches

Preprocess = Callable[[torch.Tensor, torch.Tensor], Any]
"""(logits (B, T, V), labels (B, T)) -> a tensor of B rows, or a tuple of such."""


@dataclass(frozen=True)
class Predicted:
    """What came out of one mini-batch, in the process of the last stage.

    Attributes:
        predictions: (rows, ...): logits, what `preprocess` left of them, or generated tokens.
        labels: (rows, T).
        inputs: input_ids (rows, S).
        row_losses: mean negative log-likelihood of each row.
    """

    predictions: Any
    labels: np.ndarray
    inputs: np.ndarray
    row_losses: np.ndarray


@dataclass
class Scores:
    """What came out of a pass over a dataset.

    Attributes:
        losses: the loss of each mini-batch, the same on every process.
        num_rows: the rows of each mini-batch, the same on every process.
    """

    losses: list[float] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)

    def mean_loss(self, *, only_finite: bool) -> float:
        """As transformers' Trainer has it: the mean over rows of the loss of their mini-batch.

        Args:
            only_finite: whether losses that are infinite or no numbers are left out, unless all are.
        """
        losses, weights = np.array(self.losses), np.array(self.num_rows)
        finite = np.isfinite(losses)
        if only_finite and finite.any():
            losses, weights = losses[finite], weights[finite]
        return float(np.average(losses, weights=weights)) if len(losses) else 0.0


def score(
    pipe: Pipeline,
    batches: MiniBatches | None,
    *,
    on_predicted: Callable[[Predicted, bool], None] | None = None,
    preprocess: Preprocess | None = None,
    generation: Generation | None = None,
    on_batch: Callable[[], None] | None = None,
) -> Scores:
    """Evaluate every row of a dataset. Every process calls it.

    Args:
        pipe: the pipeline.
        batches: read in the main process; the others may pass None.
        on_predicted: called in the process of the last stage for each mini-batch, with what was predicted, and whether
            it is the last one; None, in every process: there are no predictions.
        preprocess: makes less of a micro-batch's logits, as soon as they are there.
        generation: makes the predictions, in place of the logits.
        on_batch: called after each mini-batch.
    """
    scores = Scores()
    takes_logits = on_predicted is not None and generation is None
    has_predictions = pipe.num_stages - 1 in pipe.stages
    source = ([_with_labels(batch)] for batch in batches.epoch(0)) if batches is not None else None
    for (batch,), is_last in _with_end(shared_stream(source if pipe.topology.is_main else None, pipe.topology)):
        logits = _Logits(preprocess, pipe.adapter.autocast is not None)
        evaluation = pipe.eval_on(batch, logits.add if takes_logits else None)
        tokens = generation(batch).numpy() if on_predicted is not None and generation is not None else None
        scores.losses.append(evaluation.loss)
        scores.num_rows.append(len(evaluation.row_nll))
        if on_predicted is not None and has_predictions:
            predicted = Predicted(
                logits.concatenated(batch["labels"].shape[1]) if tokens is None else tokens,
                batch["labels"].numpy(),
                batch["input_ids"].numpy(),
                (evaluation.row_nll / evaluation.row_tokens.clamp(min=1)).numpy(),
            )
            on_predicted(predicted, is_last)
        if on_batch is not None:
            on_batch()
    return scores


def concatenated(parts: Sequence[Any], fill: int = IGNORED_LABEL) -> Any:
    """The rows of all mini-batches in one array, or in a tuple of arrays; shorter rows are filled up."""
    if isinstance(parts[0], tuple):
        return tuple(concatenated(column, fill) for column in zip(*parts, strict=True))
    if parts[0].ndim > 1:
        num_columns = max(part.shape[1] for part in parts)
        parts = [_padded(part, num_columns, fill) for part in parts]
    return np.concatenate(parts)


class _Logits:
    """What is kept of the logits of a mini-batch's micro-batches."""

    def __init__(self, preprocess: Preprocess | None, is_autocast: bool) -> None:
        self._preprocess, self._is_autocast = preprocess, is_autocast
        self._parts: list[tuple[Any, int]] = []

    def add(self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        labels = inputs["labels"]
        # As transformers' Trainer hands them over under autocast, whatever type the head gave them.
        logits = logits.float() if self._is_autocast else logits
        kept = logits if self._preprocess is None else self._preprocess(logits, labels)
        self._parts.append((kept, labels.shape[1]))

    def concatenated(self, num_columns: int) -> Any:
        """All rows as numpy arrays; those that have the labels' columns get back the ones cut off as padding."""
        return concatenated([_as_arrays(kept, columns, num_columns) for kept, columns in self._parts])


def _as_arrays(kept: Any, columns: int, num_columns: int) -> Any:
    if isinstance(kept, list | tuple):
        return tuple(_as_arrays(one, columns, num_columns) for one in kept)
    tensor = kept.detach().cpu()
    array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    has_columns = array.ndim > 1 and array.shape[1] == columns
    return _padded(array, num_columns, IGNORED_LABEL) if has_columns else array


def _with_labels(batch: Batch) -> Batch:
    if "labels" not in batch:
        raise DataError(
            f"a mini-batch to evaluate has no 'labels', only {', '.join(batch)}; without targets use Pipeline.generate"
        )
    return batch


def _with_end(stream: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Each entry of a stream, and whether it is the last one."""
    pending = next(stream, None)
    while pending is not None:
        following = next(stream, None)
        yield pending, following is None
        pending = following


def _padded(array: np.ndarray, num_columns: int, fill: int) -> np.ndarray:
    """(B, T, ...) -> (B, num_columns, ...)."""
    missing = num_columns - array.shape[1]
    return np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), constant_values=fill)
