"""Reward models of pairs of answers (Bradley-Terry), as TRL's RewardTrainer trains them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_gpipe.adapters.auto_classes import SEQUENCE_CLASSIFICATION
from hf_gpipe.adapters.classifiers import as_classifier
from hf_gpipe.data.answers import AnsweredRows
from hf_gpipe.data.chats import preference_of
from hf_gpipe.data.collate import ExampleCollator
from hf_gpipe.data.rows import ReadRow
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import RewardOptions, RewardsSection
from hf_gpipe.trainers.arguments import ModelArguments, TaskArguments
from hf_gpipe.trainers.trainer import TaskTrainer, as_class
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.base import align_special_tokens
from hf_gpipe.training.loader import Collate


class RewardLoss(NotingLoss):
    """-log s(r(chosen) - r(rejected) - m) of each pair, where r is the only logit of a row and m the pair's margin.

    The margin is the label of the chosen row (Bradley-Terry, as in InstructGPT, arXiv 2203.02155, equation 1, and with
    a margin in Llama 2, arXiv 2307.09288, equation 2).

    Args:
        center_rewards_coefficient: factor of (r(chosen) + r(rejected)) ** 2, which is added so that rewards have a mean
            near 0 (arXiv 2312.09244, appendix A); None: 0.

    Raises:
        UserError: it is below 0, or not finite.
    """

    options = RewardOptions()
    metrics = ("accuracy", "margin", "mean_reward")
    reads = Reads.LOGITS
    rows_per_unit = 2
    #: As in TRL, the loss is a function of the rewards alone.
    adds_auxiliary = False

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each pair, (B / 2,), from logits (B, 1) and labels (B,)."""
        logits = read.logits.to(torch.promote_types(read.logits.dtype, torch.float32))
        chosen, rejected = logits.view(-1, 2).unbind(dim=1)
        self._note((chosen > rejected).double(), chosen - rejected, (chosen + rejected) / 2)
        margin = read.inputs["labels"].view(-1, 2)[:, 0].to(chosen)
        losses = -F.logsigmoid(chosen - rejected - margin)
        if self.options.center_rewards_coefficient:
            losses = losses + self.options.center_rewards_coefficient * (chosen + rejected) ** 2
        return losses


def compared_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of preferences as `preference_of` reads it, where the prompt may be empty, with its "margin", if any.

    Raises:
        DataError: as `preference_of`, or a margin that is no finite number; names the row and the column.
    """
    pair, margin = preference_of(where, row, needs_prompt=False), row.get("margin")
    if margin is None:
        return pair
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"{where}: 'margin' is {margin!r}; it must be a number")
    return pair | {"margin": float(margin)}


class RewardExamples(AnsweredRows):
    """A dataset of {"chosen_ids": [...], "rejected_ids": [...], "margin": [m]}, where m is 0 if a row has none.

    The ids are those of TRL's RewardTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: preferences as `compared_of` reads them, or the split of a corpus that it has read.
        tokenizer: as for `AnsweredRows`.
        max_length: tokens of a prompt with its answer; pairs with a longer one are dropped, and `num_dropped` counts
            them. None: there is no limit.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, columns, _numbers = "rewards", ("chosen_ids", "rejected_ids", "margin"), ("margin",)
    _dropped = "they are longer"
    read = staticmethod(compared_of)

    def encode(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
        row = read.row
        wholes = self._answered(read.where, row)
        self._check_tokens(read.where, "an answer", *wholes)
        if self._max_length is not None and max(map(len, wholes)) > self._max_length:
            self.num_dropped += 1
            return None
        return *wholes, [row.get("margin", 0.0)]


#: TRL's older names of columns of ids.
_OLD_NAMES = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}


@dataclass
class PipelineRewardConfig(ModelArguments, TaskArguments):
    """Arguments of `PipelineRewardTrainer`: those of `PipelineTrainer`, and TRL's RewardConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each. Pairs with more than `max_length`
    tokens in a row are left out.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    learning_rate: float = argument(1e-4, "Peak learning rate.")
    _loss, section = RewardLoss, RewardsSection


class PipelineRewardTrainer(TaskTrainer):
    """Trains a reward model on pairs by pipeline parallelism, with the interface of TRL's RewardTrainer.

    Every process makes the same trainer and calls the same methods; only the main process reads data.

    Args:
        model: the Hub id or directory of a decoder-only model, which gets a new head with one label unless it has
            one, or of PEFT adapters; its configuration; a model in memory of AutoModelForSequenceClassification with
            `num_labels=1`; or a Pipeline made with `args.make_loss()` as its loss.
        data_collator: rows to a mini-batch; None: `ExampleCollator`.
        train_dataset, eval_dataset: rows that `RewardExamples` takes, or its examples.
        args, processing_class, compute_metrics, callbacks, optimizers, quantization_config: as for
            `PipelineDPOTrainer`.
        peft_config: as for `Pipeline`; new adapters on a new head need `task_type="SEQ_CLS"`, which trains the head.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _arguments, examples = PipelineRewardConfig, RewardExamples
    args: PipelineRewardConfig

    def _examples(self, dataset: Any, name: str | None = None, *, is_training: bool = False) -> Any:
        names = getattr(dataset, "column_names", None) or ()
        if {*_OLD_NAMES} <= {*names} and not {*_OLD_NAMES.values()} & {*names}:
            warnings.warn(
                f"the columns {' and '.join(map(repr, _OLD_NAMES))} have TRL's older names, which will not be "
                f"supported in v1; call them {' and '.join(map(repr, _OLD_NAMES.values()))}",
                FutureWarning,
                stacklevel=2,
            )
            dataset = dataset.rename_columns(_OLD_NAMES)
        return super()._examples(dataset, name, is_training=is_training)

    def _source(self, model: Any) -> tuple[Any, dict[str, Any]]:
        padding = None if self._tokenizer is None else self._padding
        if isinstance(model, nn.Module) and padding is not None:
            # As TRL does: the model finds the last token of a row by it, and many configurations have none.
            config: Any = model.config
            if config.get_text_config().pad_token_id is None:
                config.get_text_config().pad_token_id = padding

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
                f"reward models require `num_labels=1`, one number for a row, and the model is a "
                f"{type(adapter.reference).__name__} with num_labels={adapter.config.num_labels}; give a model of "
                "AutoModelForSequenceClassification with num_labels=1, or the path of one or of a language model"
            )
        head = f"{adapter.layers[-1].name}."
        if adapter.may_lack_head and adapter.peft and not any(name.startswith(head) for name in adapter.peft.trained):
            raise UserError(
                f"peft_config: the head {head[:-1]!r} is new, and these adapters would not train it; set "
                "task_type='SEQ_CLS'"
            )

    def _collator(self) -> Collate:
        align_special_tokens(self.pipe, self._tokenizer)  # as TRL does: the model finds the last token by the padding
        return self._reading(ExampleCollator.for_config(self.pipe.adapter.config))


class _Rewards(Task):
    items, rows_in_words = "preferences", "pairs of answers"
    evaluating, trainer, head = "scoring the answers", PipelineRewardTrainer, "score"


TASK = _Rewards()
