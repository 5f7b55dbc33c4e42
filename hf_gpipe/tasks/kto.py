"""Answers that are wanted or not, each by itself (KTO), as TRL's KTOTrainer learns them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_gpipe.data.answers import AnsweredRows
from hf_gpipe.data.chats import conversation_of, preference_of
from hf_gpipe.data.collate import ExampleCollator
from hf_gpipe.data.prepared import in_blocks
from hf_gpipe.data.rows import ReadRow
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.from_recipe.held_out import HeldOut, HeldOutReport, log_probs_of
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import LogProbs, LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.recipe import Recipe
from hf_gpipe.settings.losses import KTOOptions, KTOSection
from hf_gpipe.trainers.arguments import ReferenceArguments
from hf_gpipe.trainers.reference import ReferenceTrainer
from hf_gpipe.training.arguments import argument
from hf_gpipe.training.loader import Batch

_MISMATCHED = "KL_"
#: Pairs whose answers are put in order at a time, as many as the library `datasets` has in a batch.
_PAIRS = 1000


class KTOLoss(NotingLoss):
    """The loss of each row, which is desirable or not (Kahneman-Tversky optimization, arXiv 2402.01306, equation 7).

    With the log-ratio r = log p(y|x) - log p_ref(y|x) of a row, the loss of a desirable one is 1 - s(beta (r - z)), and
    that of another one 1 - s(beta (z - r)). The number z, through which no gradient flows, is the mean of r over the
    mini-batch's prompts with answers of other prompts, at least 0: two forwards before the step give it.

    Without such a comparison, "apo_zero_unpaired", z is 0 (arXiv 2408.06266). The options are those of `KTOOptions`.
    """

    options = KTOOptions()
    metrics = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl")
    reads = Reads.ROWS
    needs_reference, entries = True, ("desirable", "kl")

    @property
    def reads_mismatches(self) -> bool:
        """Whether it reads prompts with answers of other prompts."""
        return self.options.loss_type == "kto"

    def num_forwards(self, *, has_reference: bool) -> int:
        """Count the forwards of mismatched rows too, by the model and by the reference."""
        mismatched = (1 + has_reference) * self.reads_mismatches
        return super().num_forwards(has_reference=has_reference) + mismatched

    def with_passes(
        self, batch: Mapping[str, torch.Tensor], model: LogProbs, reference: LogProbs
    ) -> Mapping[str, torch.Tensor]:
        """The mini-batch of `KTOCollator`, with "ref_logps" and "kl", the number z of each row, (N,).

        Raises DataError where it has no "desirable", or no mismatched rows and the loss needs them.
        """
        needed = {"desirable", *([f"{_MISMATCHED}labels"] if self.reads_mismatches else [])}
        if missing := needed - batch.keys():
            raise DataError(f"the batch has no {min(missing)!r}, which KTO reads; use KTOCollator")
        passed, desirable = super().with_passes(rows_of(batch), model, reference), batch["desirable"]
        z = torch.zeros((), dtype=torch.float64)
        if self.reads_mismatches:
            rows = mismatched_of(batch)
            before = batch["ref_KL_logps"].cpu() if "ref_KL_logps" in batch else reference(rows)
            z = (model(rows) - before).mean().clamp(min=0)
        return {**passed, "desirable": desirable, "kl": z.expand(len(desirable))}

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each row, (B,); the inputs have "ref_logps", "desirable" and "kl", (B,) each."""
        inputs, is_desirable = read.inputs, read.inputs["desirable"]
        ratios = read.log_probs - inputs["ref_logps"].to(read.log_probs)
        z = inputs["kl"].to(ratios)
        rewards = self.options.beta * ratios.detach()
        among = (*(is_desirable, ~is_desirable) * 2, torch.ones_like(is_desirable))
        values = zip((rewards, rewards, read.log_probs, read.log_probs, z), among, strict=True)
        self._note(*(value * is_counted for value, is_counted in values), counts=among)
        sign = is_desirable.to(ratios) * 2 - 1
        weights = torch.where(is_desirable, self.options.desirable_weight, self.options.undesirable_weight).to(ratios)
        return weights * torch.sigmoid(-sign * self.options.beta * (ratios - z))


def mismatched_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of a mini-batch of which each prompt has the answer of another one."""
    return {name.removeprefix(_MISMATCHED): tensor for name, tensor in batch.items() if name.startswith(_MISMATCHED)}


def rows_of(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other rows, without what only the loss reads."""
    own = ("desirable", "ref_KL_logps")
    return {name: tensor for name, tensor in batch.items() if not name.startswith(_MISMATCHED) and name not in own}


def judged_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's "prompt" and "completion" as `conversation_of` reads them, with its "label", or a pair of answers.

    Args:
        where: the row's name in messages.
        row: has `prompt`, `completion` and `label`, true where the completion is wanted; or it is a pair, as
            `preference_of` reads it.

    Raises:
        DataError: as `conversation_of` or `preference_of`, or a label of another form; names the row and the column.
    """
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return preference_of(where, row)
    label = row.get("label")
    # True and False are 1 and 0; a label of another type, as 1.0 or "1", may be a score.
    if not isinstance(label, int) or label not in (0, 1):
        raise DataError(
            f"{where}: 'label' is {label!r}; it must be true or 1 where the completion is wanted, else false or 0"
        )
    read = conversation_of(where, {name: value for name, value in row.items() if name != "messages"})
    return read | {"label": bool(label)}


def _unpaired(read: Sequence[ReadRow]) -> Iterator[ReadRow]:
    """Rows of single answers in place of pairs: all chosen answers, then the rejected ones, as TRL orders them."""
    rows = [one.row if '"chosen"' in one.text else {} for one in read]
    for answer, label in (("chosen", True), ("rejected", False)):
        for own, row in zip(read, rows, strict=True):
            if answer in row:
                others = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
                single = {**others, "completion": row[answer], "label": label}
                yield ReadRow(own.where, json.dumps(single, ensure_ascii=False))
            elif label:
                yield own


class KTOExamples(AnsweredRows):
    """A dataset of {"prompt_ids": [...], "completion_ids": [...], "label": [1 or 0]}, 1 for a wanted completion.

    The ids are those of TRL's KTOTrainer with the same arguments. The result is kept in the cache of `datasets`.

    Args:
        rows: as `judged_of` reads them, or the split of a corpus that it has read. The answers of a pair are two rows.
            As in TRL, the chosen answers of each 1,000 pairs come before the rejected ones.
        tokenizer, max_length: as for `AnsweredRows`.

    Raises:
        DataError: a row of another form or that the template refuses, a tokenizer without a template, or no example.
    """

    _name, columns = "kto", ("prompt_ids", "completion_ids", "label")
    read = staticmethod(judged_of)
    _cuts_answers = False

    def _read_all(self, rows: Iterable[ReadRow | Mapping[str, Any]]) -> list[ReadRow]:
        read = super()._read_all(rows)
        return [row for block in in_blocks(read, _PAIRS) for row in _unpaired(block)]

    def encode(self, read: ReadRow) -> tuple[Sequence[int] | Sequence[float], ...] | None:
        ids = super().encode(read)
        return None if ids is None else (*ids, [int(read.row["label"])])

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each example in a mini-batch, for length bucketing."""
        return [min(length, self._max_length or length) for length in super().lengths]


@dataclass(frozen=True)
class KTOCollator(ExampleCollator):
    """Mini-batches of {"prompt_ids", "completion_ids", "label"}, as `ExampleCollator` makes them.

    With mismatches also KL_input_ids, KL_attention_mask and KL_labels (N, T'): each prompt with the completion of the
    row before it, and the first with the last. Where the rows have "ref_logps", and "ref_KL_logps", those too (N,), in
    float64.
    """

    has_mismatches: bool = True

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        own = [{name: row[name] for name in KTOExamples.columns} for row in rows]
        batch = super().__call__(own)
        if self.has_mismatches:
            shifted = [own[-1], *own[:-1]]
            pairs = [(row["prompt_ids"], other["completion_ids"]) for row, other in zip(own, shifted, strict=True)]
            batch |= {f"{_MISMATCHED}{name}": of for name, of in self.of_answers(pairs, self.max_length).items()}
        for name in PipelineKTOTrainer._other_columns:
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] for row in rows], dtype=torch.float64)
        return batch


@dataclass
class PipelineKTOConfig(ReferenceArguments):
    """Arguments of `PipelineKTOTrainer`: those of `PipelineTrainer`, and TRL's KTOConfig's by their names.

    `max_length` is the number of tokens to which a prompt with its answer is cut.

    Raises:
        UserError: an argument that a pipeline does not support.
    """

    train_sampling_strategy: str = argument("sequential", "sequential, random or group_by_length.")
    _loss, section = KTOLoss, KTOSection

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
        train_dataset, eval_dataset: rows that `KTOExamples` accepts, or its examples; iterable as for
            `PipelineDPOTrainer`.
        processing_class, compute_metrics, callbacks, optimizers, quantization_config, peft_config: as for
            `PipelineDPOTrainer`.

    Raises:
        UserError: an argument that is not supported, by its name.
    """

    _other_columns = ("ref_logps", "ref_KL_logps")
    _arguments, examples = PipelineKTOConfig, KTOExamples
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


class _Judged(Task):
    items, evaluating, trainer = "answers", "comparing the answers", PipelineKTOTrainer

    def measure(self, recipe: Recipe, pipe: Pipeline, held_out: HeldOut, processor: Any) -> HeldOutReport:
        """The mean log-probabilities of answers that are wanted and of the others."""
        _, batches = held_out.mini_batches(pipe, KTOCollator(0, has_mismatches=False))
        judged = [(log_probs, batch["desirable"]) for log_probs, batch in log_probs_of(pipe, batches)]
        log_probs, is_wanted = (torch.cat(parts) for parts in zip(*judged, strict=True))
        kinds = {"chosen": log_probs[is_wanted], "rejected": log_probs[~is_wanted]}
        means = {f"logps_{name}": float(own.mean()) for name, own in kinds.items() if len(own)}
        values = {"num_rows": len(log_probs), **means}
        return HeldOutReport("kto", values, ("answers", f"{len(log_probs)} answers"))


TASK = _Judged()
