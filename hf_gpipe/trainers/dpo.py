"""`PipelineDPOTrainer`: TRL's DPOTrainer, over a pipeline. The loss is in losses/preference.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_gpipe.data.examples.preferences import PreferenceCollator, PreferenceExamples
from hf_gpipe.errors import UserError
from hf_gpipe.losses.preference import PreferenceLoss
from hf_gpipe.settings.losses import PreferencesSection
from hf_gpipe.trainers.reference import ReferenceArguments, ReferenceTrainer
from hf_gpipe.training.arguments import argument, key_of


@dataclass
class PipelineDPOConfig(ReferenceArguments):
    """Arguments of `PipelineDPOTrainer`: those of `PipelineTrainer`, and TRL's DPOConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each. `max_length` is the number of tokens
    to which a prompt with its answer is cut.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    loss_type: str = key_of(PreferencesSection, "loss_type")
    label_smoothing: float = key_of(PreferencesSection, "label_smoothing")
    simpo_gamma: float | None = key_of(PreferencesSection, "simpo_gamma")
    cpo_alpha: float | None = key_of(PreferencesSection, "cpo_alpha")
    reference_free: bool = key_of(PreferencesSection, "reference_free")
    precompute_ref_batch_size: int | None = argument(
        None, "Pairs of a mini-batch of that pass; None: those of training or evaluation."
    )
    _loss = PreferenceLoss

    def check(self) -> None:
        given: Any = self.loss_type  # TRL's is a list
        if isinstance(given, list):
            if len(given) != 1:
                raise UserError(f"loss_type={given!r}: a sum of losses is not supported; name one")
            (self.loss_type,) = given
        super().check()

    @property
    def loss_text(self) -> str:
        return f"{super().loss_text}{' with reference_free=True' * self.reference_free}"


class PipelineDPOTrainer(ReferenceTrainer):
    """Trains on preferences, pairs of answers, with the interface of TRL's DPOTrainer (arXiv 2305.18290).

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: a decoder-only model as for `PipelineTrainer`; or a Pipeline made with `args.make_loss()` as its loss.
        ref_model: the reference, in any of these forms; None: the model before its training.
        args: the arguments; None: all defaults.
        data_collator: makes a mini-batch of rows; None: `PreferenceCollator`.
        train_dataset: map-style: rows that `PreferenceExamples` accepts, or its examples.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; None: the model's own, where the model is a Hub id or directory.
        compute_metrics, callbacks, optimizers: as for `PipelineTrainer`.
        quantization_config, peft_config: as for `Pipeline`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _of_reference = ("ref_chosen_logps", "ref_rejected_logps")
    _arguments, _class_of_examples = PipelineDPOConfig, PreferenceExamples
    args: PipelineDPOConfig

    def _collator(self) -> PreferenceCollator:
        return PreferenceCollator(self._padding)

    def _batch_size_of_reference(self, batch_size: int) -> int:
        return self.args.precompute_ref_batch_size or batch_size
