"""The datasets of a trainer, the mini-batches that it makes of them, and the shape of one for the planner."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hf_gpipe.adapters import Adapter
from hf_gpipe.errors import UserError, listed
from hf_gpipe.model.opening import chain_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.planner.workload import Workload
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.runtime.batches import tensors_of
from hf_gpipe.training.base import example_of
from hf_gpipe.training.loader import LABEL_COLUMNS, Batch, MiniBatches
from hf_gpipe.training.own_loader import OwnLoader, batches_of_loader
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


#: What is said where a method has no dataset to read.
_REQUIRED = {
    "train": "training requires a train_dataset",
    "eval": "evaluation requires an eval_dataset",
    "test": "prediction requires a test_dataset",
}


def required(part: str, dataset: Any) -> Any:
    """The dataset of a part: "train", "eval" or "test". Raises UserError where it is None."""
    if dataset is None:
        raise UserError(_REQUIRED[part])
    return dataset


def named(trainer: TrainerInterface, dataset: Any) -> Any:
    """A dataset to evaluate, which may be given by its name. Raises UserError where none has that name."""
    if not isinstance(dataset, str):
        return dataset
    known = trainer.eval_dataset if isinstance(trainer.eval_dataset, Mapping) else {}
    if dataset not in known:
        names = f"its names are {listed(list(known))}" if known else "the trainer's is no dict of several"
        raise UserError(f"eval_dataset={dataset!r}: no dataset has that name, {names}; give one of them, or rows")
    return known[dataset]


def by_name(trainer: TrainerInterface, given: Any) -> Any:
    """The dataset to evaluate; a dict by name where the main process has several, with None in other processes."""
    found: list[Any] = []

    def find() -> list[str] | None:
        found.append(named(trainer, given))
        return list(found[0]) if isinstance(found[0], Mapping) else None

    names = trainer.world.from_main(find)
    if isinstance(given, str):
        given = found[0] if found else None
    if names is None:
        return given
    return {name: given[name] if isinstance(given, Mapping) else None for name in names}


def loaded(trainer: TrainerInterface, part: str, *dataset: Any) -> MiniBatches | OwnLoader | None:
    """The mini-batches of `get_train_dataloader`, or of that of another part; the main process alone calls it.

    None in the other processes, which call this function too. Raises UserError where there is no dataset.
    """
    method, loaders = f"get_{part}_dataloader", []

    def load() -> None:
        if dataset and not trainer.overrides(method):
            required(part, dataset[0])
        loaders.append(getattr(trainer, method)(*dataset))

    trainer.world.from_main(load, takes_long=True)
    return batches_of_loader(loaders[0], method, data_seed(trainer.args)) if loaders else None


def example_of_training(trainer: TrainerInterface, spec: ModelSpec) -> Batch | Workload | None:
    """A mini-batch, or its shape; from the first training row for a model that reads no tokens."""
    dataset, chain = trainer.train_dataset, chain_of(spec)
    if chain is None:
        return example_of(dataset, trainer.args)
    if not has_index(dataset) or not len(dataset):
        return None
    read = {*inspect.signature(chain.forward).parameters, *Adapter.loss_keys}
    row = next(iter(batches_of(trainer, dataset, BatchSize(1), read=read)))
    return Workload.from_entries(tensors_of(row)).with_rows(trainer.args.per_device_train_batch_size)
