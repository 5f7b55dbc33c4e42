"""The validation loss per character of the references, by which models with other vocabularies can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import EvalPrediction

from hf_gpipe.adapters import IGNORED_LABEL

NAME = "nll_per_character"


@dataclass(frozen=True)
class PerCharacter:
    """`compute_metrics` of a trainer whose arguments have include_for_metrics=["loss"].

    Attributes:
        num_characters: of all references.
    """

    num_characters: int

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        """The negative log-likelihood of all references, divided by their characters; natural logarithm."""
        num_tokens = (prediction.label_ids != IGNORED_LABEL).sum(axis=1)
        return {NAME: float((prediction.losses * num_tokens).sum() / max(self.num_characters, 1))}


def without_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """`preprocess_logits_for_metrics` that keeps one number of each row, for this metric needs the losses alone."""
    return logits[:, 0, 0]
