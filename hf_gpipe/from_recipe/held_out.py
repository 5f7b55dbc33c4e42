"""How well a model does on held-out rows: the loss of text, the accuracy of classes, and that of preferences.

Every process calls the functions here, with the same arguments, and gets the same report. The rows are made in the main
process alone. Logits are not clipped and labels not smoothed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F
from transformers import EvalPrediction, PreTrainedTokenizerBase, default_data_collator

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.data.collate import PairCollator, tokens_of
from hf_gpipe.data.examples.embeddings import EmbeddingCollator
from hf_gpipe.data.examples.kto import KTOCollator
from hf_gpipe.data.examples.labelled import LabelCollator
from hf_gpipe.data.examples.preferences import PreferenceCollator
from hf_gpipe.data.examples.prompts import PromptCollator
from hf_gpipe.data.examples.rewards import RewardCollator
from hf_gpipe.from_recipe.checkable import checked_by
from hf_gpipe.losses.embedding import EmbeddingLoss
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.generating import completions_of
from hf_gpipe.training.loader import Batch, Collate
from hf_gpipe.training.predicting import from_last_stage, predict, shared_batches


@dataclass(frozen=True)
class HeldOutReport:
    """The measurements on held-out rows.

    Attributes:
        task: its name in metrics.json.
        values: the metrics, by name.
        rows: what the rows are, and how many of them, or of their tokens.
        words: the metrics, on one line for people.
    """

    task: str
    values: Mapping[str, float]
    rows: tuple[str, str]
    words: str
    #: Only a translation has some.
    translations: ClassVar[tuple[()]] = ()

    def to_dict(self) -> dict[str, Any]:
        """The metrics with the name of the task, ready for JSON."""
        return {"task": self.task, **self.values}

    def text(self, split: str) -> str:
        """The report for people."""
        what, count = self.rows
        return f"Quality on held-out {what} ({split} split, {count})\n\n{self.words}"


@dataclass
class HeldOut:
    """Rows that a model is measured on. Every process has them and calls `mini_batches`; the main process makes them.

    Attributes:
        make: makes the rows, a map-style dataset, in the main process.
        batch_size: rows at a time.
        max_rows: how many rows to take, the first ones; None: all.
        rows: in the main process, once they are made.
    """

    make: Callable[[], Any]
    batch_size: int
    max_rows: int | None = None
    rows: Any = None

    def mini_batches(self, pipe: Pipeline, collate: Collate) -> tuple[int, Iterator[Batch]]:
        """The number of rows to take, and their mini-batches. On every process it raises the DataError of the rows."""

        def prepare() -> int:
            self.rows = self.make()
            return min(len(self.rows), self.max_rows or len(self.rows))

        num_rows = pipe.world.from_main(prepare, takes_long=True)
        starts = range(0, num_rows, self.batch_size)
        # Read in the main process alone.
        return num_rows, (
            collate([self.rows[index] for index in range(start, min(start + self.batch_size, num_rows))])
            for start in starts
        )


Evaluate = Callable[[Pipeline, HeldOut], HeldOutReport]
"""(the model, the rows) -> the report."""


def evaluate_text(pipe: Pipeline, held_out: HeldOut, collate: Collate | None = None) -> HeldOutReport:
    """The loss per target token, each counting alike, and its exponential; rows are {"input_ids", "labels"}.

    Of a block of text all tokens but the first are targets, of a conversation those that are learnt.
    """
    # The mask leaves padding out, so any token serves as padding.
    num_rows, batches = held_out.mini_batches(pipe, collate or PairCollator(0))
    nll, num_tokens = 0.0, 0
    for log_probs, batch in _log_probs(pipe, batches):
        nll -= float(log_probs.sum())
        num_tokens += int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
    return text_report(num_rows, num_tokens, nll / max(num_tokens, 1))


def text_report(num_rows: int, num_tokens: int, loss: float) -> HeldOutReport:
    """The report of a loss per token, natural logarithm; the perplexity is infinite beyond float."""
    perplexity = math.inf if loss > 700 else math.exp(loss)
    values = {"num_rows": num_rows, "num_tokens": num_tokens, "loss": loss, "perplexity": perplexity}
    words = f"loss {loss:.4f}, perplexity {perplexity:.2f}"
    return HeldOutReport("language modelling", values, ("text", f"{num_tokens} tokens"), words)


def evaluate_classes(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """The negative log-likelihood of the right class per text, and how often the most likely class is the right one.

    The rows are those of `LabelledExamples`.
    """
    values, words = _classes(pipe, held_out, LabelCollator.for_config(pipe.adapter.config))
    return HeldOutReport("classification", values, ("texts", f"{values['num_rows']} texts"), words)


def evaluate_images(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """The report of `evaluate_classes`, with the share of rows whose class is among the five most likely ones."""
    values, words = _classes(pipe, held_out, default_data_collator, top=5)
    return HeldOutReport("image classification", values, ("images", f"{values['num_rows']} images"), words)


def _classes(pipe: Pipeline, held_out: HeldOut, collate: Collate, top: int = 1) -> tuple[dict[str, float], str]:
    """The metrics of classes, and these in words; `top` is how many of the most likely ones are looked at too."""
    num_rows, batches = held_out.mini_batches(pipe, collate)

    def are_right(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return np.argsort(-logits, axis=-1, kind="stable")[:, :top] == labels[:, None]

    nll, is_right = _of_logits(pipe, batches, are_right)
    shares, loss = (is_right.sum(axis=0).cumsum() / num_rows).tolist(), nll / num_rows
    values = {"num_rows": num_rows, "accuracy": shares[0], "loss": loss}
    words = f"accuracy {shares[0]:.1%}, loss {loss:.4f}"
    if top > 1:
        values[f"top_{top}_accuracy"] = shares[-1]
        words = f"{words}, among the {top} most likely {shares[-1]:.1%}"
    return values, words


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a trainer, for logits (N, C) and labels (N,)."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def evaluate_preferences(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """How often the chosen answer is more likely than the rejected one, without a reference; and the mean
    log-probabilities of both. The rows are the pairs of `PreferenceExamples`."""
    # The mask leaves padding out, so any token serves as padding.
    _, batches = held_out.mini_batches(pipe, PreferenceCollator(0))
    log_probs = torch.cat([own for own, _ in _log_probs(pipe, batches)]).view(-1, 2)
    chosen, rejected = log_probs.unbind(dim=1)
    share = float((chosen > rejected).double().mean())
    means = float(chosen.mean()), float(rejected.mean())
    values = {"num_pairs": len(chosen), "accuracy": share, "logps_chosen": means[0], "logps_rejected": means[1]}
    words = (
        f"the chosen answer is the more likely one in {share:.1%}; log-probabilities: chosen {means[0]:.2f}, rejected "
        f"{means[1]:.2f}"
    )
    return HeldOutReport("preferences", values, ("preferences", f"{len(chosen)} pairs"), words)


def evaluate_judged(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """The mean log-probabilities of answers that are wanted and of the others; rows are of `KTOExamples`."""
    _, batches = held_out.mini_batches(pipe, KTOCollator(0, has_mismatches=False))
    judged = [(log_probs, batch["desirable"]) for log_probs, batch in _log_probs(pipe, batches)]
    log_probs, is_wanted = (torch.cat(parts) for parts in zip(*judged, strict=True))
    kinds = {"chosen": log_probs[is_wanted], "rejected": log_probs[~is_wanted]}
    means = {f"logps_{name}": float(own.mean()) for name, own in kinds.items() if len(own)}
    words = ", ".join(f"{name.removeprefix('logps_')} {mean:.2f}" for name, mean in means.items())
    values = {"num_rows": len(log_probs), **means}
    return HeldOutReport("kto", values, ("answers", f"{len(log_probs)} answers"), f"log-probabilities: {words}")


def _of_logits(
    pipe: Pipeline, batches: Iterator[Batch], measure: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, np.ndarray]:
    """The negative log-likelihood of all rows, and what `measure` makes of the logits and labels of each mini-batch.

    Every process gets them, those of all mini-batches in one array; the last stage's leader has the logits.
    """
    nll, parts = 0.0, []
    for predicted in predict(pipe, batches, with_logits=True):
        nll += float(predicted.evaluation.row_nll.sum())
        if predicted.logits is not None:
            parts.append(measure(predicted.logits, predicted.batch["labels"].numpy()))
    return nll, from_last_stage(pipe, np.concatenate(parts) if parts else None)


def _log_probs(pipe: Pipeline, batches: Iterator[Batch]) -> Iterator[tuple[torch.Tensor, Batch]]:
    """The log-probabilities of the rows of each mini-batch, and the mini-batch, in every process."""
    with pipe.ties.holding_values():
        for batch in shared_batches(batches, pipe.world):
            yield pipe.log_probs(batch), batch


def evaluate_rewards(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """How often the chosen answer has the larger reward, and the mean difference; rows are of `RewardExamples`."""
    collate = RewardCollator(pipe.adapter.config.get_text_config().pad_token_id)
    num_pairs, batches = held_out.mini_batches(pipe, collate)
    _, scores = _of_logits(pipe, batches, lambda logits, labels: logits.reshape(-1, 2).astype(np.float64))
    chosen, rejected = scores.T
    share, margin = float((chosen > rejected).mean()), float((chosen - rejected).mean())
    values = {"num_pairs": num_pairs, "accuracy": share, "margin": margin}
    words = f"the chosen answer has the larger reward in {share:.1%}; mean difference {margin:.3f}"
    return HeldOutReport("rewards", values, ("preferences", f"{num_pairs} pairs"), words)


def evaluate_embeddings(pipe: Pipeline, held_out: HeldOut) -> HeldOutReport:
    """How cosines of embeddings agree with what belongs together; the rows are those of `EmbeddingExamples`.

    With scores it is Spearman's correlation of cosine and score, NaN where all of either are equal. Otherwise it is how
    often an anchor's own positive is the nearest among those of all examples, and the mean of 1 / its rank. Another
    text that is as near counts as nearer, so a model that gives all texts the same embedding is never right.
    """
    loss = pipe.loss
    assert isinstance(loss, EmbeddingLoss)
    # The mask leaves padding out, so any token serves as padding.
    _, batches = held_out.mini_batches(pipe, EmbeddingCollator(0, loss.texts))
    vectors, scores = [], []
    texts: list[tuple[int, ...]] = []
    with pipe.ties.holding_values():
        for batch in shared_batches(batches, pipe.world):
            vectors.append(F.normalize(pipe.embed(batch), dim=1))
            scores.append(batch["labels"][:: loss.texts])
            texts += map(tuple, tokens_of(batch)[1 :: loss.texts])
    anchor, positive, *_ = torch.cat(vectors).view(-1, loss.texts, vectors[0].shape[1]).unbind(dim=1)
    score, number = torch.cat(scores).double(), len(anchor)
    values: dict[str, float] = {"num_examples": number}
    if loss.loss_type == "cosine":
        # Rounding alone makes no difference of cosines.
        ranks = torch.stack([_ranks((anchor * positive).sum(1).round(decimals=12)), _ranks(score)])
        values["spearman"] = math.nan
        words = "Spearman's correlation is not known: all cosines or all scores are equal"
        if (ranks != ranks[:, :1]).any(dim=1).all():
            values["spearman"] = float(torch.corrcoef(ranks)[0, 1])
            words = f"Spearman's correlation of cosine and score {values['spearman']:.4f}"
    else:
        numbers = {text: number for number, text in enumerate(texts)}
        text = torch.tensor([numbers[own] for own in texts])
        blocks = zip(anchor.split(1024), (anchor * positive).sum(1).split(1024), text.split(1024), strict=True)
        # A comparison with NaN is false, so a text whose cosine is NaN counts as nearer.
        is_further = (
            (some @ positive.t() < own[:, None] - 1e-12) | (of_own[:, None] == text) for some, own, of_own in blocks
        )
        ranks = 1 + torch.cat([(~block).sum(1) for block in is_further]).double()
        values |= {"accuracy": float((ranks == 1).double().mean()), "mean_reciprocal_rank": float((1 / ranks).mean())}
        words = (
            f"an anchor's own text is the nearest of {number} in {values['accuracy']:.1%}, mean reciprocal rank "
            f"{values['mean_reciprocal_rank']:.4f}"
        )
    return HeldOutReport("embeddings", values, ("examples", f"{number} examples"), words)


def evaluate_completions(
    pipe: Pipeline,
    held_out: HeldOut,
    tokenizer: PreTrainedTokenizerBase | None,
    reward: str,
    max_completion_length: int,
) -> HeldOutReport:
    """The mean of a checkable reward over the most likely completions of held-out prompts, and how many have 1."""
    world = pipe.world
    end = world.from_main(lambda: None if tokenizer is None else tokenizer.eos_token_id)
    number, batches = held_out.mini_batches(pipe, PromptCollator(end or 0))
    rewards: list[float] = []
    for batch in shared_batches(batches, world):
        tokens = completions_of(pipe, batch, end, max_completion_length, do_sample=False)

        def of_batch(batch: Batch = batch, completions: torch.Tensor = tokens) -> list[float]:
            assert tokenizer is not None, "the main process has the tokenizer"
            answers = [held_out.rows.rows[row]["answer"] for row in batch["row"].tolist()]
            return checked_by(reward)(tokenizer.batch_decode(completions, skip_special_tokens=True), answers)

        rewards += world.from_main(of_batch)
    mean, share = sum(rewards) / number, sum(value == 1 for value in rewards) / number
    values = {"num_prompts": number, "reward": mean, "share_right": share}
    return HeldOutReport("prompts", values, ("prompts", f"{number} prompts"), f"reward {mean:.3f}, right {share:.1%}")


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """The rank of each of several numbers, (N,) in float64; equal numbers have their mean rank."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[inverse]
