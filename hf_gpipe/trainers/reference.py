"""`ReferenceTrainer`: a trainer whose loss reads the log-probabilities of the model before its training.

They are entries of the mini-batches. With new PEFT adapters the pipeline computes them in each step, with the adapters
turned off; otherwise they are computed once, before the training. Where they cannot be, because the rows are a stream
or the reference follows the model, the reference stays in memory: `ref_model`, or a copy of the trained weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_gpipe.data.encoded import Columns
from hf_gpipe.data.stream import EncodedStream
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import LogProbs
from hf_gpipe.model.kept_weights import KeptWeights
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.progress import progress
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.schedule import is_table_file
from hf_gpipe.trainers.arguments import ReferenceArguments
from hf_gpipe.trainers.trainer import TaskTrainer, each
from hf_gpipe.training.batches import by_name
from hf_gpipe.training.loader import Batch, MiniBatches
from hf_gpipe.training.predicting import shared_batches


class ReferenceTrainer(TaskTrainer):
    """A trainer with a reference; its subclasses explain the arguments."""

    args: ReferenceArguments

    def __init__(
        self,
        model: Pipeline | ModelSource,
        ref_model: ModelSource | None = None,
        args: ReferenceArguments | None = None,
        *others: Any,
        **named: Any,
    ) -> None:
        self._given_reference = ref_model
        if isinstance(ref_model, nn.Module) and ref_model is model:
            raise UserError(
                "`model` and `ref_model` are the same object, whose weights are trained; leave ref_model out, for the "
                "reference is the model before its training in any case, or give a copy"
            )
        if ref_model is not None and isinstance(args, ReferenceArguments):
            if not args.make_loss().needs_reference:
                raise UserError(f"ref_model is given, and {args.loss_text} reads no reference; leave it out")
            if args.sync_ref_model:
                raise UserError(
                    "sync_ref_model=True moves a copy of the weights that the model has before its training, and "
                    "ref_model is another reference; leave one of them out"
                )
        super().__init__(model, args, *others, **named)
        pipe, args = self.pipe, self.args
        self._kept: KeptWeights | None = None
        reads = pipe.loss.needs_reference and (ref_model is not None or not pipe.has_new_adapters)
        keeps = reads and not args.precompute_ref_log_probs and (args.sync_ref_model or self._trains_on_stream())
        self._precomputes = not keeps and (reads or (pipe.loss.needs_reference and args.precompute_ref_log_probs))
        if not self._precomputes and (size := getattr(args, "precompute_ref_batch_size", None)) is not None:
            raise UserError(
                f"precompute_ref_batch_size={size} would have no effect: no log-probabilities of a reference are "
                "computed before the training; leave it out, or set precompute_ref_log_probs=True"
            )
        if args.sync_ref_model and not keeps:
            raise UserError(
                "sync_ref_model=True: the reference is the model without its new adapters, which never changes; leave "
                "it out, or train all weights"
            )
        reference = pipe if ref_model is None else self._opened(ref_model)
        if keeps:
            self._keep(reference)
        elif self._precomputes:
            self._precompute(reference)

    def _trains_on_stream(self) -> bool:
        return bool(self.world.from_main(lambda: isinstance(self.train_dataset, EncodedStream)))

    def _opened(self, ref_model: ModelSource) -> Pipeline:
        """The reference that was given, in as many stages."""
        config = self.pipe.config.reopened(partition="count")
        if is_table_file(config.schedule):  # it only runs forwards
            config = config.replace(schedule="gpipe", recompute="stage")
        options: dict[str, Any] = {}
        if isinstance(ref_model, str | os.PathLike):
            options = {"dtype": self.pipe.adapter.dtype, "trust_remote_code": self.args.trusts_model}
        return Pipeline(ref_model, config=config, autocast=self.args.autocast, **options)

    def _keep(self, reference: Pipeline) -> None:
        """Keep the reference in memory, for each step."""
        if reference is not self.pipe:
            self.pipe.forwards.reference = reference.log_probs
            return
        kept = self._kept = kept_reference(self, "sync_ref_model and streams need it")

        def log_probs(rows: Batch) -> torch.Tensor:
            with kept.in_place():
                return self.pipe.log_probs(rows)

        self.pipe.forwards.reference = log_probs

    @property
    def ref_model(self) -> Any:
        """The reference, where it is a model of its own: the given one, or a copy of the weights kept in memory, whose
        tensors on other processes are on the meta device. Every process asks for it."""
        if self._kept is None:
            return self._given_reference if isinstance(self._given_reference, nn.Module) else None
        return model_with(self._kept, self.model)

    def _log_probs_of(self, log_probs: LogProbs, batch: Batch) -> torch.Tensor:
        """The columns of a mini-batch's examples, (examples, len(_other_columns)), by the reference."""
        return log_probs(batch).view(-1, len(self._other_columns))

    def _batch_size_of_reference(self, batch_size: int) -> int:
        """Examples of a mini-batch of the pass of the reference, instead of those of training or evaluation."""
        return batch_size

    def _precompute(self, reference: Pipeline) -> None:
        """Add the reference's log-probabilities to the rows of all datasets. Every process calls it."""
        args = self.args
        self.train_dataset = self._with_reference(reference, self.train_dataset, args.per_device_train_batch_size)
        given, size = by_name(self, self.eval_dataset), args.per_device_eval_batch_size
        self.eval_dataset = each(given, lambda dataset, _: self._with_reference(reference, dataset, size))

    def _lacks_columns(self, dataset: Any) -> bool:
        """Whether a dataset has rows, without the reference's log-probabilities. Raises UserError for a stream."""
        if isinstance(dataset, EncodedStream):
            raise UserError(
                "precompute_ref_log_probs=True is not supported with IterableDataset: the log-probabilities are "
                "columns of a dataset with an index; leave it out, or give list(...) of train_dataset"
            )
        return dataset is not None and len(dataset) > 0 and self._other_columns[0] not in dataset[0]

    def _with_reference(self, reference: Pipeline, dataset: Any, batch_size: int) -> Any:
        """A dataset whose rows have the reference's log-probabilities; None in processes that do not read data."""
        if not self.world.from_main(lambda: self._lacks_columns(dataset)):
            return dataset
        batches = None
        if self.world.is_main:
            batches = MiniBatches(dataset, self.data_collator, BatchSize(self._batch_size_of_reference(batch_size)))
        of_batches, has_new_adapters = [], reference is self.pipe and reference.has_new_adapters

        def log_probs(rows: Batch) -> torch.Tensor:
            return reference.log_probs(rows, with_adapters=not has_new_adapters)

        with self.job.during("computing the reference's log-probabilities"), reference.ties.holding_values():
            stream: Iterable[Batch] = shared_batches(batches, self.world)
            if batches is not None:
                stream = progress(stream, "reference log-probabilities", "mini-batches", len(batches))
            for batch in stream:
                of_batches.append(self._log_probs_of(log_probs, batch))
        return _WithReference(dataset, torch.cat(of_batches), self._other_columns) if self.world.is_main else None

    def _completed(self, dataset: Any) -> Any:
        if not self._precomputes:
            return dataset
        is_gone = self._given_reference is not None or (self.state.global_step and not self.pipe.has_new_adapters)
        if is_gone and self.world.from_main(lambda: self._lacks_columns(dataset)):
            raise UserError(
                "Cannot compute reference log-probs for a dataset passed to evaluate: the reference is not in memory "
                "any more; give this dataset to the constructor"
            )
        return self._with_reference(self.pipe, dataset, self.args.per_device_eval_batch_size)


def kept_reference(trainer: TaskTrainer, why: str) -> KeptWeights:
    """A copy of the trained weights, as the reference, which follows the model if the arguments say so.

    Every process calls it. Raises UserError, which says why there is a copy, where the weights visit the device.
    """
    if trainer.pipe.config.visits.offload_weights == "all":
        raise UserError(
            f"offload_weights is all, and the reference would be a second copy of these weights: {why}; train new "
            "adapters (peft_config), or give list(...) of a stream"
        )
    kept = KeptWeights(trainer.pipe.weights)
    if trainer.args.sync_ref_model:
        trainer.callback_handler.add_callback(_Sync(kept))
    return kept


def model_with(kept: KeptWeights, model: Any) -> Any:
    """A copy of a trainer's model with kept weights; every process calls it."""
    with kept.in_place():
        return copy.deepcopy(model)


class _Sync(TrainerCallback):
    """Moves the reference towards the model, every `ref_model_sync_steps` updates."""

    def __init__(self, kept: KeptWeights) -> None:
        self._kept = kept

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.global_step:
            raise UserError(
                "sync_ref_model=True: checkpoints do not have the reference, which has moved; begin the training anew"
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self._kept.mix(args.ref_model_mixup_alpha)


class _WithReference(Columns):
    """The rows of a dataset with columns of the reference's log-probabilities (N, C)."""

    def __init__(self, dataset: Any, log_probs: torch.Tensor, names: Sequence[str]) -> None:
        self._dataset, self._log_probs, self._names = dataset, log_probs, names

    def __len__(self) -> int:
        return len(self._dataset)

    def _row(self, index: int) -> dict[str, Any]:
        return {**self._dataset[index], **dict(zip(self._names, self._log_probs[index].tolist(), strict=True))}

    @property
    def lengths(self) -> list[int]:
        """The lengths of the examples, for length bucketing."""
        return list(self._dataset.lengths)
