"""Preferences: a chosen and a rejected answer of each prompt, as TRL's DPOTrainer learns them.

DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7) makes chosen answers more likely than rejected ones, beside a
reference, the model before its training. CPO, SimPO and ORPO need none. Names are those of TRL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.answers import AnsweredRows
from hf_gpipe.data.chats import preference_of
from hf_gpipe.data.collate import ExampleCollator
from hf_gpipe.data.rows import Read
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, log_probs_of
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import LossInputs, Reads, TokenLoss
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.settings.losses import WITHOUT_REFERENCE, PreferenceOptions, PreferencesSection
from hf_gpipe.trainers.arguments import ReferenceArguments
from hf_gpipe.trainers.reference import ReferenceTrainer
from hf_gpipe.training.arguments import argument

METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)
#: TRL's default.
_SIMPO_GAMMA = 0.5
#: The values of `loss_type` that read the mean log-probability of an answer's tokens, where others read the sum.
_PER_TOKEN = ("ipo", "sigmoid_norm", "simpo", "orpo")


class PreferenceLoss(NotingLoss):
    """The loss of pairs of a chosen row and the rejected row after it.

    m is the difference of the two log-ratios log p(y|x) - log p_ref(y|x), and e is `label_smoothing`. Without a
    reference, m is the difference of the two log-probabilities log p(y|x).

    Args:
        options: those of `PreferenceOptions`.
        loss_type: "sigmoid": -(1 - e) log s(beta m) - e log s(-beta m), which is DPO for e = 0 and conservative DPO
            otherwise; "robust": the same with + e, divided by 1 - 2 e (arXiv 2403.00409); "hinge": max(0, 1 - beta m)
            (arXiv 2305.10425); "ipo": (m - 1 / (2 beta)) ** 2 with log-ratios per token (arXiv 2310.12036);
            "sigmoid_norm": -log s(beta m) with log-ratios per token. With the log-ratios c and r of the two answers,
            times beta: "nca_pair": -log s(c) - (log s(-c) + log s(-r)) / 2 (arXiv 2402.05369); "bco_pair": -log s(c)
            - log s(-r) (arXiv 2404.04656); "sppo_hard": ((c - 1/2) ** 2 + (r + 1/2) ** 2) / beta ** 2 (arXiv
            2405.00675); "apo_zero": 1 - s(c) + s(r), and "apo_down": s(c) + 1 - s(c - r) (arXiv 2408.06266).
            Without a reference: "cpo": that of "sigmoid" (arXiv 2401.08417); "simpo": that of "sigmoid" of
            m - simpo_gamma / beta, per token (arXiv 2405.14734); "orpo": -beta log s(the logarithm of the
            ratio of the odds p / (1 - p)), per token, with the cross-entropy of the chosen answer (arXiv 2403.07691,
            equation 6).
    """

    options = PreferenceOptions()
    metrics = METRICS
    reads = Reads.ROWS
    rows_per_unit = 2

    def __init__(self, *options: Any, **by_name: Any) -> None:
        super().__init__(*options, **by_name)
        self.needs_reference = self.options.needs_reference

    @property
    def _weight_of_chosen(self) -> float:
        """The weight of the cross-entropy of the chosen answers."""
        given, loss_type = self.options.cpo_alpha, self.options.loss_type
        return float(loss_type in ("cpo", "orpo")) if given is None else given

    def row_tokens(self, targets: torch.Tensor) -> torch.Tensor:
        """The answer's tokens in chosen rows, 0 in rejected ones."""
        return TokenLoss.units(targets).sum(dim=1) * self.row_units(targets)

    def of_units(self, read: LossInputs) -> torch.Tensor:
        """The loss of each pair, (B / 2,); with a reference the inputs have "ref_logps" (B,)."""
        inputs, noted = read.inputs, read.log_probs.view(-1, 2)
        ratios = noted - inputs["ref_logps"].to(noted).view(-1, 2) if self.needs_reference else noted
        scores = ratios
        if self.options.loss_type in _PER_TOKEN:
            lengths = (inputs["labels"] != IGNORED_LABEL).sum(dim=1).clamp(min=1).view(-1, 2)
            scores = ratios / lengths
            if self.options.loss_type in WITHOUT_REFERENCE:  # TRL's metrics too are of a token there
                noted = ratios = scores
        chosen, rejected = (self.options.beta * ratios.detach().double()).unbind(dim=1)
        self._note(chosen, rejected, (chosen > rejected).double(), chosen - rejected, *noted.unbind(dim=1))
        losses = self._of_scores(*scores.unbind(dim=1))
        if weight := self._weight_of_chosen:
            # A mean over tokens, and not over pairs.
            losses = losses - weight * read.log_probs[::2] * (read.num_units / read.num_tokens)
        return losses

    def _of_scores(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """The loss of pairs (B / 2,) without the cross-entropy, from their log-ratios or log-probabilities."""
        margin, smoothing = chosen - rejected, self.options.label_smoothing
        if self.options.loss_type == "orpo":
            odds = [log_probs - torch.log(-torch.expm1(log_probs)) for log_probs in (chosen, rejected)]
            return -self.options.beta * F.logsigmoid(odds[0] - odds[1])
        if self.options.loss_type == "ipo":
            return (margin - 1 / (2 * self.options.beta)) ** 2
        scaled, c, r = self.options.beta * margin, self.options.beta * chosen, self.options.beta * rejected
        if self.options.loss_type == "nca_pair":
            return -F.logsigmoid(c) - (F.logsigmoid(-c) + F.logsigmoid(-r)) / 2
        if self.options.loss_type == "bco_pair":
            return -F.logsigmoid(c) - F.logsigmoid(-r)
        if self.options.loss_type == "sppo_hard":
            return ((c - 0.5) ** 2 + (r + 0.5) ** 2) / self.options.beta**2
        if self.options.loss_type == "apo_zero":
            return 1 - torch.sigmoid(c) + torch.sigmoid(r)
        if self.options.loss_type == "apo_down":
            return torch.sigmoid(c) + 1 - torch.sigmoid(scaled)
        if self.options.loss_type == "simpo":
            scaled = scaled - (_SIMPO_GAMMA if self.options.simpo_gamma is None else self.options.simpo_gamma)
        if self.options.loss_type == "hinge":
            return torch.relu(1 - scaled)
        if self.options.loss_type == "robust":
            losses = -(1 - smoothing) * F.logsigmoid(scaled) + smoothing * F.logsigmoid(-scaled)
            return losses / (1 - 2 * smoothing)
        return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)


class PreferenceExamples(AnsweredRows):
    """A dataset of {"prompt_ids": [...], "chosen_ids": [...], "rejected_ids": [...]}.

    The ids are those of TRL's DPOTrainer with the same arguments.

    Args:
        rows: preferences in any form that `preference_of` in data/chats.py describes: a list, a
            `datasets.Dataset`, or the split of a corpus.
        tokenizer, max_length: as for `AnsweredRows`; so are the errors.
    """

    _name, columns = "preferences", ("prompt_ids", "chosen_ids", "rejected_ids")
    read: Read = staticmethod(preference_of)


@dataclass(frozen=True)
class PreferenceCollator(ExampleCollator):
    """Mini-batches of the rows of `PreferenceExamples`: each chosen row is followed by its rejected one."""

    columns: tuple[str, ...] | None = field(
        default=(*PreferenceExamples.columns, "ref_chosen_logps", "ref_rejected_logps"), kw_only=True
    )


@dataclass
class PipelineDPOConfig(ReferenceArguments):
    """Arguments of `PipelineDPOTrainer`: those of `PipelineTrainer`, and TRL's DPOConfig's by their names.

    `per_device_train_batch_size` is the pairs of a mini-batch, of two rows each. `max_length` is the number of tokens
    to which a prompt with its answer is cut.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    precompute_ref_batch_size: int | None = argument(
        None, "Pairs of a mini-batch of that pass; None: those of training or evaluation."
    )
    _loss, section = PreferenceLoss, PreferencesSection

    def check(self) -> None:
        if isinstance(given := self.__dict__["loss_type"], list):  # as TRL's is
            if len(given) != 1:
                raise UserError(f"loss_type={given!r}: a sum of losses is not supported; name one")
            self.__dict__["loss_type"] = given[0]
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
        train_dataset: rows that `PreferenceExamples` accepts, or its examples. It may be iterable where the reference
            is computed in each step, or where the loss has none.
        eval_dataset: the same, or a dict of several by name.
        processing_class: the tokenizer; None: the tokenizer of the Hub id or directory that the model comes from.
        compute_metrics, callbacks, optimizers: as for `PipelineTrainer`.
        quantization_config, peft_config: as for `Pipeline`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _other_columns = ("ref_chosen_logps", "ref_rejected_logps")
    _arguments, examples = PipelineDPOConfig, PreferenceExamples
    args: PipelineDPOConfig

    def _batch_size_of_reference(self, batch_size: int) -> int:
        return self.args.precompute_ref_batch_size or batch_size


class _Preferences(Task):
    items, rows_in_words = "preferences", "pairs of answers"
    evaluating, trainer = "comparing the answers", PipelineDPOTrainer

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        """How often the chosen answer is more likely than the rejected one, without a reference; and the mean
        log-probabilities of both."""
        # The mask leaves padding out, so any token serves as padding.
        _, batches = held_out.mini_batches(pipe, PreferenceCollator(0))
        log_probs = torch.cat([own for own, _ in log_probs_of(pipe, batches)]).view(-1, 2)
        chosen, rejected = log_probs.unbind(dim=1)
        values = {
            "num_pairs": len(chosen),
            "accuracy": float((chosen > rejected).double().mean()),
            "logps_chosen": float(chosen.mean()),
            "logps_rejected": float(rejected.mean()),
        }
        return HeldOutReport("preferences", values, ("preferences", f"{len(chosen)} pairs"))


TASK = _Preferences()
