"""The losses of embeddings, those of sentence-transformers, and several of them for several datasets.

A unit is an example: an anchor, then its positive and perhaps negatives, or two texts with a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.embedders import is_causal
from hf_gpipe.errors import UserError, listed
from hf_gpipe.losses.loss import LOSS_NUMBER, LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import EmbeddingOptions
from hf_gpipe.settings.mode import AUTO

_DISTANCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    # Of equal rows the derivative is 0.
    "euclidean": lambda x, y: torch.linalg.vector_norm(x - y, dim=1),
    "cosine": lambda x, y: 1 - F.cosine_similarity(x, y),
}


def pooled(hidden: torch.Tensor, mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """The embedding of each row, (B, D), in float32 at least.

    Args:
        hidden: the last hidden states, (B, T, D).
        mask: 1 at the tokens of a row and 0 at padding, (B, T); None: there is no padding.
        pooling: "mean" of the tokens, "cls": the first column, or "lasttoken".
    """
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if pooling == "cls":
        return hidden[:, 0]
    mask = hidden.new_ones(hidden.shape[:2]) if mask is None else mask.as_subclass(torch.Tensor).to(hidden.dtype)
    if pooling == "mean":
        return (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1e-9)
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


class _Options(EmbeddingOptions):
    """Those of a recipe, and what files of sentence-transformers say."""

    normalizes: bool | None = None
    """Whether embeddings are divided by their length; null: as files of sentence-transformers say, or not."""


class EmbeddingLoss(NotingLoss):
    """The loss of examples, each of which is `texts` rows of a micro-batch: the mean over examples.

    Args:
        options: those of `EmbeddingOptions`, and `normalizes`.
        loss_type: "multiple_negatives": -log softmax(scale * cos(anchor, .)) at the anchor's own positive, among the
            positives and negatives of all examples of the mini-batch (InfoNCE, arXiv 1705.00652 and 1807.03748);
            "triplet": max(0, d(anchor, positive) - d(anchor, negative) + margin) (arXiv 1503.03832); "cosine": the
            square of cos(first, second) - score (arXiv 1908.10084); "cosent": log(1 + sum exp(scale * (cos_i - cos_j)))
            over all two examples i and j of the mini-batch of which j has the higher score.
        matryoshka_dims: embeddings are cut to their first entries, and normalised (arXiv 2205.13147).
    """

    options = _Options()
    metrics = ("accuracy",)
    reads = Reads.HIDDEN
    adds_auxiliary = False

    def __init__(self, *options: Any, **by_name: Any) -> None:
        super().__init__(*options, **by_name)
        given = self.options
        #: What a model and its rows decide.
        self._open = {"pooling": given.pooling == AUTO, "normalizes": given.normalizes is None}
        self._open |= {"texts": given.texts is None and given.loss_type == "multiple_negatives"}
        self.options = given.replace(
            pooling="mean" if given.pooling == AUTO else given.pooling,
            texts=given.num_texts,
            matryoshka_dims=given.matryoshka_dims or (),
            matryoshka_weights=given.matryoshka_weights or (),
            normalizes=bool(given.normalizes),
        )
        self.rows_per_unit, self.compares_units = given.num_texts, given.loss_type in ("multiple_negatives", "cosent")
        self.needs_score = given.loss_type in ("cosine", "cosent")
        least, most = {"triplet": (3, 3), "multiple_negatives": (2, math.inf)}.get(given.loss_type, (2, 2))
        if not least <= given.num_texts <= most:
            expected = f"{least}" if least == most else f"{least} or more"
            raise UserError(
                f"texts={given.num_texts}: an example of loss_type={given.loss_type!r} has {expected} texts"
            )
        dims, weights = self.options.matryoshka_dims, self.options.matryoshka_weights
        if weights and len(weights) != len(dims or ()):
            raise UserError(f"matryoshka_weights={weights}: expected one for each of matryoshka_dims={dims}")

    def decided(self, **options: Any) -> EmbeddingLoss:
        """The loss with the pooling, the normalisation and the number of texts of a model and its rows, where it leaves
        these open.

        Raises UserError where the rows have another number of texts than the loss.
        """
        texts = options.get("texts", self.rows_per_unit)
        if not self._open["texts"] and texts != self.rows_per_unit:
            raise UserError(
                f"the rows have {texts} texts, and a row of loss_type={self.options.loss_type!r} has "
                f"{self.rows_per_unit}; give other rows or another loss, or set texts to {texts}"
            )
        return self.replace(**{name: value for name, value in options.items() if self._open[name]})

    def check_model(self, adapter: Adapter) -> None:
        if self.options.pooling == "cls" and is_causal(adapter.reference):
            raise UserError(
                f"pooling='cls' takes the first token of a text, and in {type(adapter.reference).__name__}, a "
                "decoder-only model, that token sees no other, so texts that begin alike would have the same "
                "embedding; set pooling to 'mean' or 'lasttoken'"
            )

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each example, (B / texts,), from hidden states (B, T, D), and scores as labels (B,)."""
        if self.compares_units:
            return super().unit_losses(read)
        return self.compare(self.embed(read), read.inputs["labels"])

    def embed(self, read: LossInputs) -> torch.Tensor:
        rows = pooled(read.hidden, read.inputs.get("attention_mask"), self.options.pooling)
        return F.normalize(rows, dim=1) if self.options.normalizes else rows

    def compare(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not (dims := self.options.matryoshka_dims):
            return self._of_size(rows, labels)
        if max(dims) > rows.shape[1]:
            raise UserError(f"matryoshka_dims={dims}: the embeddings have {rows.shape[1]} entries")
        sizes = zip(dims, self.options.matryoshka_weights or (1.0,) * len(dims), strict=True)
        losses = [weight * self._of_size(F.normalize(rows[:, :size], dim=1), labels) for size, weight in sizes]
        return torch.stack(losses).sum(dim=0)

    def _of_size(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        anchor, positive, *negatives = rows.view(-1, self.rows_per_unit, rows.shape[1]).unbind(dim=1)
        if self.needs_score:
            cosines, scores = F.cosine_similarity(anchor, positive), labels.view(-1, 2)[:, 0].to(rows)
            if self.options.loss_type == "cosine":
                return (cosines - scores) ** 2
            differences = self.options.scale * (cosines[:, None] - cosines)
            wrong = differences.masked_fill(scores[:, None] >= scores, -math.inf)
            # It is one number, and so the mean over examples is.
            return F.pad(wrong.flatten(), (1, 0)).logsumexp(dim=0).expand(len(anchor))
        if self.options.loss_type == "triplet":
            distance = _DISTANCES[self.options.distance]
            near, far = distance(anchor, positive), distance(anchor, negatives[0])
            self._note((near < far).double())
            return F.relu(near - far + self.options.margin)
        candidates = F.normalize(torch.cat([positive, *negatives]), dim=1)
        scores = self.options.scale * F.normalize(anchor, dim=1) @ candidates.t()
        own = torch.arange(len(anchor), device=rows.device)
        self._note((scores.argmax(dim=1) == own).double())
        return F.cross_entropy(scores, own, reduction="none")


class EmbeddingLosses(EmbeddingLoss):
    """The losses of several datasets: a mini-batch names its own by its number, the entry loss_number.

    Its options, and the loss of a mini-batch without a number, are those of the loss of most texts.
    """

    entries = (LOSS_NUMBER,)

    def __init__(self, losses: Sequence[EmbeddingLoss]) -> None:
        if len(ways := {(loss.options.pooling, loss.options.normalizes): None for loss in losses}) > 1:
            raise UserError(
                f"the losses have the pooling and normalisation {listed(list(map(repr, ways)))}, and a model has one; "
                "give all losses the same"
            )
        self.losses = tuple(losses)
        self.widest = max(losses, key=lambda loss: loss.rows_per_unit)
        super().__init__(**vars(self.widest.options))
        self.compares_units = any(loss.compares_units for loss in losses)

    def dataset_loss(self, batch: Mapping[str, torch.Tensor]) -> EmbeddingLoss:
        return self.losses[int(batch[LOSS_NUMBER][0])] if LOSS_NUMBER in batch else self.widest

    def check_model(self, adapter: Adapter) -> None:
        for loss in self.losses:
            loss.check_model(adapter)

    def take(self, *, is_training: bool) -> torch.Tensor:
        return torch.stack([loss.take(is_training=is_training) for loss in self.losses]).sum(dim=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingLosses) and self.losses == other.losses

    def __hash__(self) -> int:
        return hash(self.losses)

    def __repr__(self) -> str:
        return listed(list(map(repr, self.losses)))
