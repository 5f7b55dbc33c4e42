"""One pass over a dataset in evaluation: the losses, logits and generated tokens of each mini-batch, in order.

`evaluate` and `predict` of the trainer and the reports at the end of a run all consume this one generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError
from hf_gpipe.job.world import World
from hf_gpipe.pipeline import Evaluation, Pipeline
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.training.generating import Generation
from hf_gpipe.training.loader import Batch

Preprocess = Callable[[torch.Tensor, torch.Tensor], Any]
"""(logits (B, T, V), labels (B, T)) -> a tensor of B rows, or a tuple of such tensors.

Where columns of padding were cut off all micro-batches, it is called again with one row of one column more, to see
which dimensions of the result are the columns.
"""


@dataclass(frozen=True)
class Predicted:
    """An evaluated mini-batch, which is equal in every process except for its logits.

    Attributes:
        batch: the mini-batch.
        has_labels: whether it came with labels; without labels its loss means nothing.
        evaluation: its loss, in total and for each row.
        logits: an array (rows, ...) or a tuple of such arrays, in the last stage's leader; None elsewhere, and where
            logits were not asked for.
        tokens: the generated token ids (rows, T'); None where they were not asked for.
        is_last: whether no mini-batch follows.
    """

    batch: Batch
    has_labels: bool
    evaluation: Evaluation
    is_last: bool
    logits: Any = None
    tokens: np.ndarray | None = None


def predict(
    pipe: Pipeline,
    batches: Iterable[Batch] | None,
    *,
    with_logits: bool = False,
    needs_labels: bool = True,
    preprocess: Preprocess | None = None,
    generation: Generation | None = None,
    prepared: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Predicted]:
    """Evaluate mini-batches, one after the other. Every process iterates over it, to the end.

    Args:
        pipe: the pipeline; its weights must not change meanwhile.
        batches: the mini-batches, which the main process reads; the others may pass None.
        with_logits: whether logits are kept.
        needs_labels: whether a mini-batch without labels is an error.
        preprocess: a function that reduces a micro-batch's logits as soon as they exist; its result goes to the host.
        generation: generates tokens for each row; None: nothing is generated.
        prepared: a mini-batch as it is read -> the mini-batch to evaluate; called in every process.

    Raises:
        DataError: a mini-batch without labels, where they are needed.
    """
    with pipe.ties.holding_values():
        for given, is_last in _with_end(shared_batches(batches, pipe.world)):
            given = prepared(given)
            has_labels = bool(given.keys() & {"labels", "shift_labels"})
            if needs_labels and not has_labels:
                raise DataError(
                    f"a mini-batch to evaluate has no 'labels', only {', '.join(given)}; without targets use predict"
                )
            no_targets = {} if has_labels else {"labels": pipe.adapter.no_targets(given, reads_logits=with_logits)}
            batch = pipe.adapter.as_rows({**given, **no_targets})
            num_columns, is_autocast = batch["labels"].shape[-1], pipe.adapter.autocast is not None
            logits = _Logits(preprocess, num_columns, is_autocast=is_autocast) if with_logits else None
            evaluation = pipe.eval_on(batch, None if logits is None else logits.add)
            yield Predicted(
                batch,
                has_labels,
                evaluation,
                is_last,
                None if logits is None else logits.collected(pipe.world),
                None if generation is None else generation(batch if has_labels else given).numpy(),
            )


def shared_batches(batches: Iterable[Batch] | None, world: World) -> Iterator[Batch]:
    """The mini-batches of the main process, one after the other, on every process; the others may pass None."""
    source = ([batch] for batch in batches) if batches is not None and world.is_main else None
    for (batch,) in shared_stream(source, world):
        yield batch


def from_last_stage(pipe: Pipeline, value: Any) -> Any:
    """Send the value of the last stage's leader to every process."""
    return pipe.world.broadcast_value(value, pipe.world.leader_of(pipe.num_stages - 1))


def mean_loss(losses: Sequence[float], num_rows: Sequence[int], *, only_finite: bool) -> float:
    """The mean over rows of the loss of their mini-batch, as transformers' Trainer computes it.

    Args:
        losses: the loss of each mini-batch.
        num_rows: the number of rows of each mini-batch.
        only_finite: whether losses that are inf or NaN are left out, unless all are.
    """
    values, weights = np.array(losses), np.array(num_rows)
    finite = np.isfinite(values)
    if only_finite and finite.any():
        values, weights = values[finite], weights[finite]
    return float(np.average(values, weights=weights))


def concatenated(parts: Sequence[Any], fill: int = IGNORED_LABEL) -> Any:
    """The rows of all mini-batches in one array, or in a tuple of arrays; shorter rows are filled up."""
    if isinstance(parts[0], tuple):
        return tuple(concatenated(column, fill) for column in zip(*parts, strict=True))
    if parts[0].ndim > 1:
        num_columns = max(part.shape[1] for part in parts)
        parts = [_padded(part, num_columns, fill) for part in parts]
    return np.concatenate(parts)


class _Logits:
    """The logits of a mini-batch, collected from its micro-batches.

    Args:
        preprocess: what is kept of the logits of a micro-batch; None: all.
        num_columns: the columns of the mini-batch's labels, which are given back to what has a micro-batch's columns.
        is_autocast: whether forwards compute under autocast.
    """

    def __init__(self, preprocess: Preprocess | None, num_columns: int, *, is_autocast: bool) -> None:
        self._preprocess = preprocess if preprocess is not None else lambda logits, labels: logits
        self._num_columns, self._is_autocast = num_columns, is_autocast
        #: What was kept of each micro-batch that this process ran on the last stage, in order, and its columns.
        self._parts: list[tuple[Any, int]] = []
        #: The first column of a row's logits and labels, on the device.
        self._column: tuple[torch.Tensor, ...] = ()

    def add(self, logits: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> None:
        labels = inputs["labels"]
        # Under autocast transformers' Trainer returns logits in float32, whatever type the head gave them.
        logits = logits.float() if self._is_autocast else logits
        # They go to the host at once, since the logits of a whole mini-batch need not fit on the device.
        kept = _on_host(self._preprocess(logits, labels))
        # A classifier's rows have no columns of labels.
        has_columns = labels.dim() > 1
        self._parts.append((kept, labels.shape[1] if has_columns else self._num_columns))
        if has_columns:
            self._column = tuple(one[:1, :1].clone() for one in (logits, labels))

    def collected(self, world: Mesh) -> Any:
        """All rows as numpy arrays, in the last stage's leader; None elsewhere. Every process must call it."""
        of_replicas = world.gather_at_first(self._parts, world.replicas_of(world.placement.num_stages - 1))
        if of_replicas is None:
            return None
        # Replica m % r of r replicas has run micro-batch m.
        in_order = [part for parts in zip_longest(*of_replicas) for part in parts if part is not None]
        # What follows the columns of its micro-batch is filled up to those of the widest.
        filled = concatenated([kept for kept, _ in in_order])
        missing = self._num_columns - max(columns for _, columns in in_order)
        if not missing:
            return filled
        kept, columns = self._parts[-1]
        wider = (one.expand(1, columns + 1, *one.shape[2:]) for one in self._column)
        return _widened(filled, kept, _on_host(self._preprocess(*wider)), missing)


def _on_host(kept: Any) -> Any:
    """Turn a tensor into an array, and a list or tuple of tensors into a tuple of arrays."""
    if isinstance(kept, list | tuple):
        return tuple(_on_host(part) for part in kept)
    tensor = kept.detach().cpu()
    array: np.ndarray = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _widened(filled: Any, kept: Any, wider: Any, missing: int) -> Any:
    """Give arrays the columns back that were cut off all micro-batches.

    `kept` is what was kept of one of them, and `wider` of a row with one column more.
    """
    if isinstance(filled, tuple):
        return tuple(_widened(*parts, missing) for parts in zip(filled, kept, wider, strict=True))
    has_columns = kept.ndim > 1 and wider.shape[1] == kept.shape[1] + 1
    return _padded(filled, filled.shape[1] + missing, IGNORED_LABEL) if has_columns else filled


def _with_end(stream: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each entry of a stream, and whether it is the last."""
    pending = next(stream, None)
    while pending is not None:
        following = next(stream, None)
        yield pending, following is None
        pending = following


def _padded(array: np.ndarray, num_columns: int, fill: int) -> np.ndarray:
    """Pad (B, T, ...) with `fill` to (B, num_columns, ...)."""
    missing = num_columns - array.shape[1]
    return np.pad(array, [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2), constant_values=fill)
