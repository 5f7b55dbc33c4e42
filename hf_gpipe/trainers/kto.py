"""`PipelineKTOTrainer`: TRL's KTOTrainer, over a pipeline. The loss is in losses/kto.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_gpipe.data.examples.kto import KTOCollator, KTOExamples
from hf_gpipe.errors import UserError
from hf_gpipe.losses.kto import KTOLoss, mismatched_of, rows_of
from hf_gpipe.losses.loss import LogProbs
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.settings.losses import KTOSection
from hf_gpipe.trainers.reference import ReferenceArguments, ReferenceTrainer
from hf_gpipe.training.arguments import argument, key_of
from hf_gpipe.training.loader import Batch


@dataclass
class PipelineKTOConfig(ReferenceArguments):
    """Arguments of `PipelineKTOTrainer`: those of `PipelineTrainer`, and TRL's KTOConfig's by their names.

    `max_length` is the number of tokens to which a prompt with its answer is cut.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    loss_type: str = key_of(KTOSection, "loss_type")
    desirable_weight: float = key_of(KTOSection, "desirable_weight")
    undesirable_weight: float = key_of(KTOSection, "undesirable_weight")
    train_sampling_strategy: str = argument("sequential", "sequential, random or group_by_length.")
    _loss = KTOLoss

    def check(self) -> None:
        super().check()
        if self.make_loss().reads_mismatches and self.per_device_train_batch_size < 2:
            raise UserError(
                "per_device_train_batch_size=1: loss_type='kto' reads prompts with the answers of other prompts of the "
                "mini-batch; use at least 2"
            )


class PipelineKTOTrainer(ReferenceTrainer):
    """Trains on single answers, each wanted or not, with the interface of TRL's KTOTrainer (arXiv 2402.01306).

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        ref_model: the reference, in any of these forms; None: the model before its training.
        args: the arguments; None: all defaults.
        data_collator: makes a mini-batch of rows; None: `KTOCollator`.
        train_dataset, eval_dataset: map-style: rows that `KTOExamples` accepts, or its examples.
        processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config: as for
            `PipelineDPOTrainer`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _of_reference = ("ref_logps", "ref_KL_logps")
    _arguments, _class_of_examples = PipelineKTOConfig, KTOExamples
    args: PipelineKTOConfig

    def _collator(self) -> KTOCollator:
        return KTOCollator(self._padding, self.args.max_length, self.args.make_loss().reads_mismatches)

    def _precompute(self, reference: Pipeline) -> None:
        # Which answers are mismatched depends on the mini-batch.
        if self.args.make_loss().reads_mismatches and self.args.train_sampling_strategy != "sequential":
            raise UserError(
                f"train_sampling_strategy={self.args.train_sampling_strategy!r}: the reference's log-probabilities are "
                "computed once, for the mini-batches of the rows in their order; use 'sequential', or new PEFT "
                "adapters, with which they are computed in each step"
            )
        super()._precompute(reference)

    def _log_probs_of(self, log_probs: LogProbs, batch: Batch) -> torch.Tensor:
        own, mismatched = log_probs(rows_of(batch)), mismatched_of(batch)
        return torch.stack([own, log_probs(mismatched) if mismatched else torch.zeros_like(own)], dim=1)

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        metrics = super().metrics_of_loss(is_training=is_training)
        if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics
