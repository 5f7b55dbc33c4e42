"""`PipelineRewardTrainer`: TRL's RewardTrainer, over a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_gpipe.adapters.auto_classes import SEQUENCE_CLASSIFICATION
from hf_gpipe.adapters.classifiers import as_classifier
from hf_gpipe.data.examples.rewards import RewardCollator, RewardExamples
from hf_gpipe.errors import UserError
from hf_gpipe.losses.reward import RewardLoss
from hf_gpipe.settings.losses import RewardsSection
from hf_gpipe.trainers.model_arguments import ModelArguments
from hf_gpipe.trainers.own_loss import OwnLossArguments, OwnLossTrainer, as_class
from hf_gpipe.training.arguments import argument, key_of
from hf_gpipe.training.base import align_special_tokens


@dataclass
class PipelineRewardConfig(ModelArguments, OwnLossArguments):
    """Arguments of `PipelineRewardTrainer`: those of `PipelineTrainer`, and TRL's RewardConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each. Pairs with more than `max_length`
    tokens in a row are left out.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-4, "Peak learning rate.")
    center_rewards_coefficient: float | None = key_of(RewardsSection, "center_rewards_coefficient")
    _loss = RewardLoss


class PipelineRewardTrainer(OwnLossTrainer):
    """Trains a reward model on pairs by pipeline parallelism, with the interface of TRL's RewardTrainer.

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: the Hub id or directory of a decoder-only model, which gets a new head with one label unless it has
            one, or of PEFT adapters; its configuration; a model in memory of AutoModelForSequenceClassification with
            `num_labels=1`; or a Pipeline made with `args.make_loss()` as its loss.
        data_collator: rows to a mini-batch; None: `RewardCollator`.
        train_dataset, eval_dataset: rows that `RewardExamples` takes, or its examples.
        args, processing_class, compute_metrics, callbacks, optimizers, quantization_config: as for
            `PipelineDPOTrainer`.
        peft_config: as for `Pipeline`; new adapters on a new head need `task_type="SEQ_CLS"`, which trains the head.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _arguments, _class_of_examples = PipelineRewardConfig, RewardExamples
    args: PipelineRewardConfig

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        padding = None if self._tokenizer is None else self._padding

        def fields_of(config: PreTrainedConfig, is_saved: bool) -> dict[str, Any]:
            is_ready = is_saved and SEQUENCE_CLASSIFICATION.named_by(config) is not None
            return {} if is_ready else as_classifier(config, ["LABEL_0"], padding)

        source, own = as_class(model, fields_of, trust_remote_code=self.args.trusts_model)
        return source, self.args.model_options(model, own.get("config_overrides"))

    def _take_pipeline(self) -> None:
        super()._take_pipeline()
        adapter = self.pipe.adapter
        if not adapter.is_classifier or adapter.config.num_labels != 1:
            raise UserError(
                f"the model is a {type(adapter.reference).__name__} with num_labels={adapter.config.num_labels}, and a "
                "reward model gives one number for a row; give a model of AutoModelForSequenceClassification with "
                "num_labels=1, or the path of one or of a language model"
            )
        head = f"{adapter.layers[-1].name}."
        if adapter.may_lack_head and adapter.peft and not any(name.startswith(head) for name in adapter.peft.trained):
            raise UserError(
                f"peft_config: the head {head[:-1]!r} is new, and these adapters would not train it; set "
                "task_type='SEQ_CLS'"
            )

    def _collator(self) -> RewardCollator:
        align_special_tokens(self.pipe, self._tokenizer)  # as TRL does: the model finds the last token by the padding
        return RewardCollator(self.pipe.adapter.config.get_text_config().pad_token_id)
