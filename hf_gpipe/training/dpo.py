"""`PipelineDPOTrainer`: TRL's DPOTrainer, over a pipeline.

The loss reads rows (training/preference_loss.py), and the log-probabilities of the reference are entries of the
mini-batches. With new PEFT adapters the pipeline computes them in each step, with the adapters turned off;
otherwise they are computed once, before the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase, TrainerCallback

from hf_gpipe.data.preferences import PreferenceCollator, PreferenceExamples
from hf_gpipe.data.progress import progress
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.runtime.batches import shared_stream
from hf_gpipe.schedule import is_table_file
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.loader import Batch, MiniBatches
from hf_gpipe.training.pairs import PairArguments, PairTrainer, each
from hf_gpipe.training.preference_loss import PreferenceLoss


@dataclass
class PipelineDPOConfig(PairArguments):
    """Arguments of `PipelineDPOTrainer`: those of `PipelineTrainer`, and TRL's DPOConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each. `max_length` is the number of tokens
    to which a prompt with its answer is cut.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-6, "Peak learning rate.")
    beta: float = argument(0.1, "How far the model may go from the reference; larger: less far.")
    loss_type: str = argument(
        "sigmoid",
        "sigmoid, robust, hinge, ipo, sigmoid_norm, nca_pair, bco_pair, sppo_hard, apo_zero or apo_down; without a "
        "reference cpo, simpo or orpo.",
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

    def check(self) -> None:
        """Raise UserError for a value that a pipeline does not support."""
        given: Any = self.loss_type  # TRL's is a list
        if isinstance(given, list):
            if len(given) != 1:
                raise UserError(f"loss_type={given!r}: a sum of losses is not supported; name one")
            (self.loss_type,) = given
        super().check()
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


class PipelineDPOTrainer(PairTrainer):
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
        UserError: an argument that is not supported, by its name.
    """

    _collated_columns = ("prompt_ids", "chosen_ids", "rejected_ids", "ref_chosen_logps", "ref_rejected_logps")
    _arguments, _class_of_examples = PipelineDPOConfig, PreferenceExamples
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
        if ref_model is not None and isinstance(args, PipelineDPOConfig) and args.make_loss().reference_free:
            raise UserError(
                f"ref_model is given, and loss_type={args.loss_type!r}"
                f"{' with reference_free=True' * args.reference_free} reads no reference; leave it out"
            )
        super().__init__(
            *(model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks),
            *(optimizers, quantization_config, peft_config),
        )
        pipe, args = self.pipe, self.args
        self._precomputes = pipe.loss.needs_reference and (
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

    def _collator(self, pipe: Pipeline) -> PreferenceCollator:
        return PreferenceCollator.for_tokenizer(self._tokenizer) if self._tokenizer else PreferenceCollator(0)

    def _examples(self, dataset: Any) -> Any:
        return dataset if isinstance(dataset, _WithReference) else super()._examples(dataset)

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

    def _completed(self, dataset: Any) -> Any:
        if not self._precomputes:
            return dataset
        has_reference = self.world.from_reader(
            lambda: bool(dataset is None or not len(dataset) or "ref_chosen_logps" in dataset[0])
        )
        is_gone = self._has_other_reference or (self.state.global_step and not self.pipe.has_new_adapters)
        if is_gone and not has_reference:
            raise UserError("the reference is not in memory any more; give this dataset to the constructor")
        return self._with_reference(self.pipe, dataset, self.args.per_device_eval_batch_size)


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
