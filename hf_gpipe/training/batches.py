"""The mini-batches that a trainer makes of a dataset, and the shape of one for the planner."""

from __future__ import annotations

import inspect
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError
from hf_gpipe.model.opening import chain_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.training.base import example_of
from hf_gpipe.training.loader import LABEL_COLUMNS, Batch, MiniBatches
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.steps import data_seed
from hf_gpipe.training.trainer_interface import TrainerInterface


def batches_of(
    trainer: TrainerInterface, dataset: Any, size: BatchSize, order: str = "sequential", read: set[str] | None = None
) -> MiniBatches:
    """The mini-batches of a dataset; `read`: the columns that the model reads, before there is a pipeline."""
    args, columns = trainer.args, None
    if args.remove_unused_columns:
        if read is None:
            adapter = trainer.pipe.adapter
            read = {*inspect.signature(adapter.reference.forward).parameters, *adapter.loss_keys}
        columns = read | LABEL_COLUMNS | {*trainer._collated_columns}
        if getattr(trainer.data_collator, "padding_free", False):
            # TRL's collator reads the lengths of packed documents from it.
            columns.add("seq_lengths")
    names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")
    options = {name: getattr(args, f"dataloader_{name}") for name in names}
    return MiniBatches(
        dataset,
        trainer.data_collator,
        size,
        order,
        seed=data_seed(args),
        columns=columns,
        length_column=args.length_column_name,
        workers=options if options["num_workers"] else None,
    )


def required(dataset: Any, problem: str) -> Any:
    """The dataset. Raises UserError with the text `problem` where it is None."""
    if dataset is None:
        raise UserError(problem)
    return dataset


def example_of_training(trainer: TrainerInterface, spec: ModelSpec) -> Batch | Workload | None:
    """A mini-batch, or its shape; from the first training row for a model that reads no tokens."""
    dataset, chain = trainer.train_dataset, chain_of(spec)
    if chain is None:
        return example_of(dataset, trainer.args)
    if not has_index(dataset) or not len(dataset):
        return None
    read = {*inspect.signature(chain.forward).parameters, *Adapter.loss_keys}
    row = next(iter(batches_of(trainer, dataset, BatchSize(1), read=read)))
    return Workload.of_entries(tensors_of(row)).of_rows(trainer.args.per_device_train_batch_size)
