"""`ExamplesTrainer`: what the trainers of TRL's interface share. They make examples of rows before the training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import ProcessorMixin

from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import UserError
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.planner.workload import Workload
from hf_gpipe.training.base import example_of
from hf_gpipe.training.loader import Batch, Collate, MiniBatches
from hf_gpipe.training.trainer import PipelineTrainer


class ExamplesTrainer(PipelineTrainer, ABC):
    """A trainer of a decoder-only model that makes the examples of rows itself; its subclasses explain the arguments.

    The examples are made in the main process alone; the datasets of the others are None.
    """

    @property
    def _tokenizer(self) -> Any:
        """The tokenizer, which may be that of a processor; None: there is none."""
        given = self.processing_class
        return given.tokenizer if isinstance(given, ProcessorMixin) else given

    @abstractmethod
    def _examples(self, dataset: Any, *, is_training: bool = False) -> Any:
        """The examples of a dataset to train or to evaluate on, which may be examples already; None for None."""

    @abstractmethod
    def _collator(self) -> Collate:
        """Makes mini-batches, where no collator was given."""

    def _completed(self, dataset: Any) -> Any:
        """The examples to evaluate on with all that the loss reads; every process calls it."""
        return dataset

    def _prepare_data(self, model: Any) -> None:
        if self.processing_class is None and isinstance(model, str):
            trusts = getattr(self.args, "trust_remote_code", False)
            self.processing_class = read_tokenizer(model, trust_remote_code=trusts)
        datasets: dict[str, Any] = {}

        def prepare() -> None:
            datasets["train"] = self._examples(self.train_dataset, is_training=True)
            datasets["eval"] = each(self.eval_dataset, self._examples)
            if self.data_collator is None and self._tokenizer is None:
                raise UserError("processing_class is None; give the tokenizer, whose padding token fills shorter rows")

        self.world.from_main(prepare, takes_long=True)
        self.train_dataset, self.eval_dataset = datasets.get("train"), datasets.get("eval")

    def _take_pipeline(self) -> None:
        config = self.pipe.adapter.config
        if config.is_encoder_decoder:
            raise UserError(f"{config.model_type} is an encoder-decoder; give a decoder-only model")
        if self.data_collator is None:
            self.data_collator = self._collator()

    def _example(self, spec: ModelSpec) -> Batch | Workload | None:
        return example_of(self.train_dataset, self.args)

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        examples: list[Any] = []
        self.world.from_main(lambda: examples.append(self._examples(dataset)), takes_long=True)
        return super()._evaluated(self._completed(examples[0] if examples else None), generation, required)

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return super()._eval_batches(self._examples(dataset))


def each(datasets: Any, function: Callable[[Any], Any]) -> Any:
    """The result of a function for a dataset, or for each of a dict of several."""
    if isinstance(datasets, Mapping):
        return {name: function(dataset) for name, dataset in datasets.items()}
    return function(datasets)
