"""The losses of embeddings, and how hidden states are pooled to them. Names are those of sentence-transformers.

A unit is an example: an anchor, then its positive and perhaps negatives, or two texts with a score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.embedders import is_causal
from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.losses import EmbeddingsSection
from hf_gpipe.settings.section import check_by

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


@dataclass(frozen=True)
class EmbeddingLoss(NotingLoss):
    """The loss of examples, each of which is `texts` rows of a micro-batch: the mean over examples.

    Args:
        loss_type: "multiple_negatives": -log softmax(scale * cos(anchor, .)) at the anchor's own positive, among the
            positives and negatives of all examples of the mini-batch (InfoNCE, arXiv 1705.00652 and 1807.03748);
            "triplet": max(0, d(anchor, positive) - d(anchor, negative) + margin) (arXiv 1503.03832); "cosine": the
            square of cos(first, second) - score (arXiv 1908.10084).
        pooling: "mean", "cls" or "lasttoken", as of `pooled`; "auto": "mean". "cls" of a decoder-only model is an error
            of `Pipeline`.
        texts: rows of an example: 2, or more with negatives; 3 of a triplet; None: 2, or 3 of a triplet.
        scale: of "multiple_negatives", the factor of cosines, the inverse of a temperature.
        margin: of "triplet".
        distance: of "triplet", "euclidean" or "cosine" (1 - cos).
        matryoshka_dims: the loss is the sum over these sizes, for each of which embeddings are cut to their first
            entries and normalised (arXiv 2205.13147); none: the whole embedding alone.
        matryoshka_weights: factors of the losses of these sizes; none: 1 each.
        normalizes: whether embeddings are divided by their length, as by a Normalize of sentence-transformers.

    Raises:
        UserError: a value that is not allowed.
    """

    loss_type: str = EmbeddingsSection().loss_type
    pooling: str = EmbeddingsSection().pooling
    texts: int = None  # type: ignore[assignment]  # until it is made
    scale: float = field(default=EmbeddingsSection().scale, kw_only=True)
    margin: float = field(default=EmbeddingsSection().margin, kw_only=True)
    distance: str = field(default=EmbeddingsSection().distance, kw_only=True)
    matryoshka_dims: tuple[int, ...] = field(default=(), kw_only=True)
    matryoshka_weights: tuple[float, ...] = field(default=(), kw_only=True)
    normalizes: bool = field(default=False, kw_only=True)

    metrics, section = ("accuracy",), EmbeddingsSection
    reads = Reads.HIDDEN
    adds_auxiliary = False
    rows_per_unit: int = field(init=False, repr=False)
    compares_units: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        section: EmbeddingsSection = check_by(EmbeddingsSection, self)
        if self.pooling == "auto":
            object.__setattr__(self, "pooling", "mean")
        object.__setattr__(self, "normalizes", bool(self.normalizes))
        for name in ("matryoshka_dims", "matryoshka_weights"):
            object.__setattr__(self, name, tuple(getattr(section, name) or ()))
        for name in ("texts", "rows_per_unit"):
            object.__setattr__(self, name, section.num_texts)
        object.__setattr__(self, "compares_units", self.loss_type == "multiple_negatives")
        least, most = {"triplet": (3, 3), "cosine": (2, 2)}.get(self.loss_type, (2, math.inf))
        if not least <= self.texts <= most:
            expected = f"{least}" if least == most else f"{least} or more"
            raise UserError(f"texts={self.texts}: an example of loss_type={self.loss_type!r} has {expected} texts")
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        if weights and len(weights) != len(dims):
            raise UserError(f"matryoshka_weights={weights}: expected one for each of matryoshka_dims={dims}")

    def check_model(self, adapter: Adapter) -> None:
        if self.pooling == "cls" and is_causal(adapter.reference):
            raise UserError(
                f"pooling='cls' takes the first token of a text, and in {type(adapter.reference).__name__}, a "
                "decoder-only model, that token sees no other, so texts that begin alike would have the same "
                "embedding; set pooling to 'mean' or 'lasttoken'"
            )

    def of_units(self, read: LossInputs) -> torch.Tensor:
        """The loss of each example, (B / texts,), from hidden states (B, T, D), and scores as labels (B,)."""
        if self.compares_units:
            return super().of_units(read)
        return self.compare(self.embed(read), read.inputs["labels"])

    def embed(self, read: LossInputs) -> torch.Tensor:
        rows = pooled(read.hidden, read.inputs.get("attention_mask"), self.pooling)
        return F.normalize(rows, dim=1) if self.normalizes else rows

    def compare(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.matryoshka_dims:
            return self._of_size(rows, labels)
        if max(self.matryoshka_dims) > rows.shape[1]:
            raise UserError(f"matryoshka_dims={self.matryoshka_dims}: the embeddings have {rows.shape[1]} entries")
        weights = self.matryoshka_weights or (1.0,) * len(self.matryoshka_dims)
        sizes = zip(self.matryoshka_dims, weights, strict=True)
        losses = [weight * self._of_size(F.normalize(rows[:, :size], dim=1), labels) for size, weight in sizes]
        return torch.stack(losses).sum(dim=0)

    def _of_size(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        anchor, positive, *negatives = rows.view(-1, self.texts, rows.shape[1]).unbind(dim=1)
        if self.loss_type == "cosine":
            return (F.cosine_similarity(anchor, positive) - labels.view(-1, 2)[:, 0].to(rows)) ** 2
        if self.loss_type == "triplet":
            distance = _DISTANCES[self.distance]
            near, far = distance(anchor, positive), distance(anchor, negatives[0])
            self._note((near < far).double())
            return F.relu(near - far + self.margin)
        candidates = F.normalize(torch.cat([positive, *negatives]), dim=1)
        scores = self.scale * F.normalize(anchor, dim=1) @ candidates.t()
        own = torch.arange(len(anchor), device=rows.device)
        self._note((scores.argmax(dim=1) == own).double())
        return F.cross_entropy(scores, own, reduction="none")
