"""Preferences: a chosen and a rejected answer of each prompt, as TRL's DPOTrainer learns them.

DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7) makes chosen answers more likely than rejected ones, beside a
reference, the model before its training. CPO, SimPO and ORPO need none. Names are those of TRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.answers import AnsweredRows
from hf_gpipe.data.chats import preference_of
from hf_gpipe.data.collate import ExampleCollator
from hf_gpipe.data.rows import Read
from hf_gpipe.errors import check_choice
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, log_probs_of
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import LogProbs, LossInputs, Reads, TokenLoss
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.losses.preference import LOSSES, PER_TOKEN, Pairs
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.settings.losses import SORTING, WITHOUT_REFERENCE, PreferenceOptions, PreferencesSection
from hf_gpipe.settings.section import keys_of
from hf_gpipe.trainers.arguments import ReferenceArguments
from hf_gpipe.trainers.reference import ReferenceTrainer
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.loader import Batch

METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


class PreferenceLoss(NotingLoss):
    """The loss of pairs of a chosen row and the rejected row after it.

    The scores of the two answers are the log-ratios log p(y|x) - log p_ref(y|x), or functions of them if
    `f_divergence_type` is another divergence (f-DPO, arXiv 2309.16240). m is their difference, s the sigmoid, and e is
    `label_smoothing`. Without a reference log p_ref is 0.

    Args:
        options: those of `PreferenceOptions`.
        loss_type: "sigmoid": -(1 - e) log s(beta m) - e log s(-beta m), which is DPO for e = 0 and conservative DPO
            otherwise; "robust": the same with + e, divided by 1 - 2 e (arXiv 2403.00409); "hinge": max(0, 1 - beta m)
            (arXiv 2305.10425); "ipo": (m - 1 / (2 beta)) ** 2 with scores per token (arXiv 2310.12036);
            "sigmoid_norm": -log s(beta m) with scores per token; "exo_pair": the divergence KL of (q, 1 - q) with
            q = s(beta m) from (1 - e, e) (arXiv 2402.00856, equation 16); "discopop": -log s(beta m) (1 - w) +
            exp(-beta m) w with w = s(beta m / discopop_tau) (arXiv 2406.08414, equation 5); "sft": the cross-entropy of
            the chosen answer. With the log-ratios c and r of the two answers, times beta: "nca_pair": -log s(c)
            - (log s(-c) + log s(-r)) / 2 (arXiv 2402.05369); "bco_pair": -log s(c) - log s(-r) (arXiv 2404.04656);
            "sppo_hard": ((c - 1/2) ** 2 + (r + 1/2) ** 2) / beta ** 2 (arXiv 2405.00675); "apo_zero":
            1 - s(c) + s(r), and "apo_down": s(c) + 1 - s(c - r) (arXiv 2408.06266). "aot" and "aot_unpaired": that
            of "sigmoid" of the differences of sorted values (arXiv 2406.05882). "aot" sorts the differences of
            log p over the pairs of the mini-batch, and those of log p_ref; "aot_unpaired" the log-ratios of the chosen
            answers, and those of the rejected ones.
            Without a reference: "cpo": that of "sigmoid" (arXiv 2401.08417); "simpo": that of "sigmoid" of
            m - simpo_gamma / beta, per token (arXiv 2405.14734); "orpo": -beta log s(the logarithm of the
            ratio of the odds p / (1 - p)), per token, with the cross-entropy of the chosen answer (arXiv 2403.07691,
            equation 6).
        ld_alpha: log p of an answer is the sum over as many tokens as both answers have, and this part of the sum over
            the others (LD-DPO, arXiv 2409.06411).
        use_weighting: the loss of a pair is multiplied by exp(w(chosen) + w(rejected)), through which no gradient
            flows: w is the mean over an answer's tokens of log p - log sum p ** 2, where the sum is over the vocabulary
            (WPO, arXiv 2406.11827, equation 2).
    """

    options = PreferenceOptions()
    metrics = METRICS
    rows_per_unit = 2

    def __init__(self, *options: Any, **by_name: Any) -> None:
        super().__init__(*options, **by_name)
        given = self.options
        self.needs_reference = given.needs_reference
        self.reads = Reads.ROWS | Reads.LOGITS if given.use_weighting else Reads.ROWS
        self.compares_units = not {*SORTING}.isdisjoint(given.loss_types)

    def num_forwards(self, *, has_reference: bool) -> int:
        """Count the second forward of the reference too, on the tokens that both answers have."""
        is_cut = self.needs_reference and self.options.ld_alpha is not None
        return super().num_forwards(has_reference=has_reference) + int(is_cut and has_reference)

    def row_tokens(self, targets: torch.Tensor) -> torch.Tensor:
        """The answer's tokens in chosen rows, 0 in rejected ones."""
        return TokenLoss.units(targets).sum(dim=1) * self.row_units(targets)

    def with_passes(
        self, batch: Mapping[str, torch.Tensor], model: LogProbs, reference: LogProbs
    ) -> Mapping[str, torch.Tensor]:
        return super().with_passes(batch, model, partial(self.reference_of, reference))

    def reference_of(self, log_probs: LogProbs, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows' log p_ref (N,) as the loss reads them, from a function that gives them by all tokens."""
        if (alpha := self.options.ld_alpha) is None:
            return log_probs(batch)
        labels = batch["labels"]
        cut = {**batch, "labels": labels.masked_fill(~_is_shared(labels), IGNORED_LABEL)}
        return alpha * log_probs(batch) + (1 - alpha) * log_probs(cut)

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each pair, (B / 2,); with a reference the inputs have "ref_logps" (B,)."""
        if self.compares_units:
            return super().unit_losses(read)
        return self.compare(self.embed(read), read.inputs["labels"])

    def embed(self, read: LossInputs) -> torch.Tensor:
        """The tensors of `Pairs`, and the weight of each row: (B, 5)."""
        labels, log_probs = read.inputs["labels"], read.log_probs
        # A mean over tokens, and not over pairs.
        cross_entropy = -log_probs * (read.num_units / read.num_tokens)
        is_target = F.pad(labels[:, 1:] != IGNORED_LABEL, (0, 1))
        if (alpha := self.options.ld_alpha) is not None:
            is_cut = is_target & ~F.pad(_is_shared(labels)[:, 1:], (0, 1))
            log_probs = -(read.token_losses * (1 - (1 - alpha) * is_cut.to(log_probs))).sum(dim=1)
        reference = read.inputs["ref_logps"] if self.needs_reference else torch.zeros_like(log_probs)
        lengths, weights = (labels != IGNORED_LABEL).sum(dim=1).clamp(min=1), torch.ones_like(log_probs)
        if self.options.use_weighting:
            logits = read.logits.detach().to(torch.promote_types(read.logits.dtype, torch.float32))
            of_squares = (2 * logits).logsumexp(dim=-1) - 2 * logits.logsumexp(dim=-1)
            aligned = (-read.token_losses.detach() - of_squares) * is_target
            weights = (aligned.sum(dim=1) / is_target.sum(dim=1).clamp(min=1)).exp()
        return torch.stack(
            [own.to(log_probs) for own in (log_probs, reference, lengths, cross_entropy, weights)], dim=1
        )

    def compare(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each pair, (N / 2,), from `embed`."""
        given = self.options
        log_probs, reference, lengths, cross_entropy, weights = rows.view(-1, 2, rows.shape[1]).unbind(dim=2)
        pairs = Pairs(log_probs, reference, lengths, cross_entropy, given)
        noted, ratios = pairs.log_probs, pairs.ratios
        if given.loss_type in WITHOUT_REFERENCE and given.loss_type in PER_TOKEN:  # as are TRL's metrics
            noted = ratios = pairs.log_probs / pairs.lengths
        chosen, rejected = (given.beta * ratios.detach().double()).unbind(dim=1)
        self._note(chosen, rejected, (chosen > rejected).double(), chosen - rejected, *noted.unbind(dim=1))
        factors = given.loss_weights or (1.0,) * len(given.loss_types)
        losses = [factor * LOSSES[name](pairs) for name, factor in zip(given.loss_types, factors, strict=True)]
        return torch.stack(losses).sum(dim=0) * weights.prod(dim=1)


def _is_shared(labels: torch.Tensor) -> torch.Tensor:
    """Which labels (N, T) of pairs of answers are among as many targets as both answers have."""
    is_target = F.pad(labels[:, 1:] != IGNORED_LABEL, (1, 0))
    place = is_target.cumsum(dim=1)
    shared = place[:, -1].view(-1, 2).amin(dim=1).repeat_interleave(2)
    return is_target & (place <= shared[:, None])


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
    truncation_mode: str = argument("keep_start", "The end of a prompt with its answer that is kept: keep_start alone.")
    # A type that a command line can have.
    loss_type: list[str] = field(
        default_factory=lambda: list(PreferencesSection().loss_types),
        metadata={"help": keys_of(PreferencesSection)["loss_type"].text},
    )
    _loss, section = PreferenceLoss, PreferencesSection

    def check(self) -> None:
        check_choice("truncation_mode", self.truncation_mode, ("keep_start",))
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
        train_dataset: rows that `PreferenceExamples` accepts, or its examples. It may be iterable.
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

    def _log_probs_of(self, log_probs: LogProbs, batch: Batch) -> torch.Tensor:
        return super()._log_probs_of(partial(self.args.make_loss().reference_of, log_probs), batch)

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
