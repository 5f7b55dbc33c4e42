"""Decoder-only models that classify tokens: transformers' AutoModelForTokenClassification.

Their labels are the classes of the tokens themselves, -100 where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.auto_classes import TOKEN_CLASSIFICATION
from hf_gpipe.adapters.base import Inputs, Tensors
from hf_gpipe.adapters.classifiers import check_range
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.errors import UnsupportedModelError, UserError


class TokenClassifier(DecoderOnly):
    """Embedding, blocks, norm, and a head that gives the logits of a few classes at each token."""

    task_type = "TOKEN_CLS"

    def built(self) -> PreTrainedModel:
        """The model without the dropout before its head, which transformers adds where the configuration names none."""
        model = super().built()
        for module in model.children():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    def targets(self, inputs: Tensors) -> torch.Tensor:
        return inputs["labels"]

    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        raise UserError(f"packing is not supported for a {type(self.reference).__name__}; use a collator that pads")

    def check_ids(self, inputs: Inputs) -> None:
        super().check_ids(inputs)
        check_range(inputs["labels"], self.config.num_labels, "set num_labels")


def check_token_classifier(config: PreTrainedConfig, model_class: str) -> None:
    """Raise UnsupportedModelError where a class that classifies tokens cannot be split."""
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{config.model_type}: {model_class} cannot be split")
    if (dropout := getattr(config, "classifier_dropout", None)) not in (None, 0):
        raise UnsupportedModelError(
            f"{config.model_type}: classifier_dropout is {dropout}, and dropout before the head of tokens is not "
            "supported; set it to 0 in the model's configuration"
        )


def as_token_classifier(config: PreTrainedConfig, labels: Sequence[str]) -> dict[str, Any]:
    """The fields by which a language model's configuration becomes that of a classifier of tokens.

    Raises UnsupportedModelError where transformers has no such class of the family.
    """
    return TOKEN_CLASSIFICATION.fields(config, labels)
