"""`PipelineDPOTrainer`: TRL's DPOTrainer, over a pipeline.

A pair of answers is two neighbouring rows of a micro-batch, and the loss reads rows (training/preference_loss.py).
Stages, tables and the training loop are those of any other training. The log-probabilities of the reference are entries
of the mini-batches. With new PEFT adapters the pipeline computes them in each step, with the adapters turned off;
otherwise they are computed once, before the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.data.preferences import PreferenceCollator, PreferenceExamples
from hf_gpipe.data.progress import progress
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.runtime.device_choice import world_for
from hf_gpipe.schedule import is_table_file
from hf_gpipe.training.arguments import PipelineTrainingArguments, argument
from hf_gpipe.training.base import join_with, pipeline_of
from hf_gpipe.training.loader import Batch, MiniBatches
from hf_gpipe.training.pools import has_index
from hf_gpipe.training.preference_loss import METRICS, PreferenceLoss
from hf_gpipe.training.trainer import PipelineTrainer


@dataclass
class PipelineDPOConfig(PipelineTrainingArguments):
    """Arguments of `PipelineDPOTrainer`: those of `PipelineTrainer`, and TRL's DPOConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each.

    Raises:
        UserError: an argument that a pipeline cannot honour.
    """

    learning_rate: float = argument(1e-6, "Peak learning rate.")
    logging_steps: float = argument(10, "Updates between two lines of metrics.")
    beta: float = argument(0.1, "How far the model may go from the reference; larger: less far.")
    loss_type: str = argument(
        "sigmoid", "sigmoid, robust, hinge, ipo or sigmoid_norm; without a reference cpo, simpo or orpo."
    )
    label_smoothing: float = argument(
        0.0, "Probability that the two answers of a pair are exchanged; sigmoid, robust, cpo and simpo."
    )
    simpo_gamma: float | None = argument(None, "The margin that simpo wants between the two answers; None: 0.5.")
    cpo_alpha: float | None = argument(
        None, "Weight of the cross-entropy of the chosen answers, for cpo and simpo; None: 1 and 0."
    )
    reference_free: bool = argument(False, "Whether the reference is left out.")
    precompute_ref_log_probs: bool = argument(
        False,
        "Whether the reference's log-probabilities are computed once, before the training. They are in any "
        "case, unless the model gets new PEFT adapters.",
    )
    precompute_ref_batch_size: int | None = argument(
        None, "Pairs of a mini-batch of that pass; None: those of training or evaluation."
    )
    max_length: int | None = argument(1024, "Tokens to which a prompt with its answer is cut; None: all of them.")
    disable_dropout: bool = argument(True, "Whether the model has no dropout in training.")

    def check(self) -> None:
        """Raise UserError for a value that a pipeline cannot honour."""
        super().check()
        given: Any = self.loss_type  # TRL's is a list
        if isinstance(given, list):
            if len(given) != 1:
                raise UserError(f"loss_type={given!r}: a sum of losses is not supported; name one")
            (self.loss_type,) = given
        if self.batch_tokens is not None or self.packing:
            name = "packing" if self.packing else "batch_tokens"
            raise UserError(f"{name}={getattr(self, name)!r}: mini-batches are made of pairs; leave it out")
        if self.label_smoothing_factor:
            raise UserError(
                f"label_smoothing_factor={self.label_smoothing_factor!r} is of the cross-entropy; use label_smoothing"
            )
        if self.make_loss().reference_free and self.precompute_ref_log_probs:
            raise UserError(
                f"precompute_ref_log_probs=True: loss_type={self.loss_type!r}"
                f"{' with reference_free=True' * self.reference_free} reads no reference; leave it out"
            )

    def make_loss(self) -> PreferenceLoss:
        """The loss that these arguments ask for."""
        return PreferenceLoss(
            self.beta,
            self.loss_type,
            self.label_smoothing,
            reference_free=self.reference_free,
            simpo_gamma=self.simpo_gamma,
            cpo_alpha=self.cpo_alpha,
        )


class PipelineDPOTrainer(PipelineTrainer):
    """Trains on preferences by pipeline parallelism, with the interface of TRL's DPOTrainer.

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        ref_model: the reference, in any of these forms; None: the model before its training.
        args: the arguments; None: all defaults.
        data_collator: rows to a mini-batch; None: `PreferenceCollator`.
        train_dataset: map-style: rows that `PreferenceExamples` takes, or its examples.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; None: the model's own, where the model is a Hub id or directory.
        compute_metrics: as for `PipelineTrainer`.
        callbacks: as for `PipelineTrainer`.
        optimizers: as for `PipelineTrainer`.
        quantization_config: as for `Pipeline`.
        peft_config: as for `Pipeline`.

    Raises:
        UserError: what cannot be honoured, by name.
    """

    _collated_columns = ("prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps")

    args: PipelineDPOConfig

    def __init__(
        self,
        model: Pipeline | ModelSource,
        ref_model: ModelSource | None = None,
        args: PipelineDPOConfig | None = None,
        data_collator: Callable[[list[Any]], Batch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LRScheduler | None] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        args = args if args is not None else PipelineDPOConfig()
        if not isinstance(args, PipelineDPOConfig):
            raise UserError(f"args is a {type(args).__name__}; PipelineDPOTrainer needs a PipelineDPOConfig")
        args.check()
        if ref_model is not None and args.make_loss().reference_free:
            raise UserError(
                f"ref_model is given, and loss_type={args.loss_type!r}"
                f"{' with reference_free=True' * args.reference_free} reads no reference; leave it out"
            )
        join_with(args)
        if processing_class is None and isinstance(model, str):
            processing_class = read_tokenizer(model)
        self._tokenizer, self._max_length = processing_class, args.max_length
        world = model.world if isinstance(model, Pipeline) else world_for(args.config)
        datasets: dict[str, Any] = {}

        def prepare() -> None:
            datasets["train"] = self._examples(train_dataset)
            datasets["eval"] = each(eval_dataset, self._examples)
            if data_collator is None and processing_class is None:
                raise UserError("processing_class is None; give the tokenizer, whose padding token fills shorter rows")

        world.from_reader(prepare, takes_long=True)
        pipe = pipeline_of(
            model,
            args,
            lambda: _example(datasets.get("train"), args),
            loss=None if isinstance(model, Pipeline) else args.make_loss(),
            quantization_config=quantization_config,
            world=world,
            peft_config=peft_config,
        )
        if pipe.loss != (asked := args.make_loss()):
            raise UserError(
                f"the given Pipeline has the loss {pipe.loss}, and the arguments ask for {asked}; make it with "
                "loss=args.make_loss(), or give the model"
            )
        self._preferences = pipe.loss
        if pipe.adapter.config.is_encoder_decoder:
            raise UserError(f"{pipe.adapter.config.model_type} has an encoder; preferences need a decoder-only model")
        if args.disable_dropout:
            for stage in pipe.models.values():
                for module in stage.model.modules():
                    if isinstance(module, nn.Dropout):
                        module.p = 0.0
        if data_collator is None:
            data_collator = (
                PreferenceCollator.for_tokenizer(processing_class) if processing_class else PreferenceCollator(0)
            )
        super().__init__(
            pipe,
            args,
            data_collator,
            datasets.get("train"),
            datasets.get("eval"),
            processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._precomputes = not self._preferences.reference_free and (
            args.precompute_ref_log_probs or ref_model is not None or not pipe.has_new_adapters
        )
        self._has_other_reference = ref_model is not None
        if self._precomputes:
            reference = pipe
            if ref_model is not None:
                config = pipe.config.replaced(partition="count")
                if is_table_file(config.schedule):  # it only runs forwards
                    config = replace(config, schedule="gpipe", recompute="stage")
                reference = Pipeline(ref_model, config=config, autocast=args.autocast)
            self._precompute(reference)

    # ------------------------------------------------------------------ the data

    def _examples(self, dataset: Any) -> Any:
        """The examples of a dataset, which are known by their columns; None for None."""
        if dataset is None:
            return None
        if not has_index(dataset):
            raise DataError("preferences need a map-style dataset; take a part of the stream, by list(...) say")
        if isinstance(dataset, PreferenceExamples | _WithReference) or (len(dataset) and "prompt_ids" in dataset[0]):
            return dataset
        if self._tokenizer is None:
            raise UserError("processing_class is None; give the tokenizer, or a dataset of PreferenceExamples")
        return PreferenceExamples(dataset, self._tokenizer, max_length=self._max_length)

    def _precompute(self, reference: Pipeline) -> None:
        """Add the reference's log-probabilities to the rows of all datasets. Every process calls it."""
        args = self.args
        self.train_dataset = self._with_reference(reference, self.train_dataset, args.per_device_train_batch_size)
        names = self.world.from_reader(
            lambda: list(self.eval_dataset) if isinstance(self.eval_dataset, Mapping) else None
        )
        given = self.eval_dataset
        if names is not None:
            given = {name: given[name] if isinstance(given, Mapping) else None for name in names}
        size = args.per_device_eval_batch_size
        self.eval_dataset = each(given, lambda dataset: self._with_reference(reference, dataset, size))

    def _with_reference(self, reference: Pipeline, dataset: Any, batch_size: int) -> Any:
        """A dataset whose rows have the reference's log-probabilities; None in processes that do not read data."""
        is_missing = self.world.from_reader(
            lambda: bool(dataset is not None and len(dataset) and "ref_chosen_logps" not in dataset[0])
        )
        if not is_missing:
            return dataset
        source, num_batches = None, None
        if self.world.is_reader:
            batches = MiniBatches(dataset, self.data_collator, self.args.precompute_ref_batch_size or batch_size)
            num_batches = len(batches)
            source = ([batch] for batch in batches)
        log_probs, has_new_adapters = [], reference is self.pipe and reference.has_new_adapters
        with self.job.during("computing the reference's log-probabilities"), reference.ties.holding_values():
            stream: Iterable[Sequence[Batch]] = shared_stream(source, self.world)
            if self.world.is_reader:
                stream = progress(stream, "reference log-probabilities", "mini-batches", num_batches)
            for (batch,) in stream:
                log_probs.append(reference.log_probs(batch, with_adapters=not has_new_adapters))
        return _WithReference(dataset, torch.cat(log_probs).view(-1, 2)) if self.world.is_reader else None

    def _evaluated(self, dataset: Any, generation: Mapping[str, Any], required: str) -> Iterable[Batch] | None:
        examples: list[Any] = []
        self.world.from_reader(lambda: examples.append(self._examples(dataset)), takes_long=True)
        dataset = examples[0] if examples else None
        if self._precomputes:
            has_reference = self.world.from_reader(
                lambda: bool(dataset is None or not len(dataset) or "ref_chosen_logps" in dataset[0])
            )
            is_gone = self._has_other_reference or (self.state.global_step and not self.pipe.has_new_adapters)
            if is_gone and not has_reference:
                raise UserError("the reference is not in memory any more; give this dataset to the constructor")
            dataset = self._with_reference(self.pipe, dataset, self.args.per_device_eval_batch_size)
        return super()._evaluated(dataset, generation, required)

    # ------------------------------------------------------------------ metrics

    def _metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """The means over the pairs since the last call, of all processes. Every process calls it."""
        *sums, num_pairs = self.world.all_reduce(self._preferences.take(is_training=is_training)).tolist()
        return {name: value / num_pairs for name, value in zip(METRICS, sums, strict=True)} if num_pairs else {}


class _WithReference(Dataset[dict[str, Any]]):
    """The rows of a dataset with the reference's log-probabilities (N, 2) of their chosen and rejected answers."""

    def __init__(self, dataset: Any, log_probs: torch.Tensor) -> None:
        self._dataset, self._log_probs = dataset, log_probs

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, rejected = self._log_probs[index].tolist()
        return {**self._dataset[index], "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    @property
    def lengths(self) -> list[int]:
        """Of the examples, for length bucketing."""
        return list(self._dataset.lengths)


def each(datasets: Any, function: Callable[[Any], Any]) -> Any:
    """The result of a function for a dataset, or for each of a dict of several."""
    if isinstance(datasets, Mapping):
        return {name: function(dataset) for name, dataset in datasets.items()}
    return function(datasets)


def _example(dataset: Any, args: PipelineDPOConfig) -> Workload | None:
    """The shape of the longest mini-batch to come, for the planner."""
    if dataset is None or not hasattr(dataset, "lengths"):
        return None
    longest = max(dataset.lengths)
    return Workload(2 * args.per_device_train_batch_size, longest, longest)
