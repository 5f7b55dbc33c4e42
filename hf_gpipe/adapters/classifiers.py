"""Models that classify or score rows: transformers' AutoModelForSequenceClassification.

The logits (B, C) of a decoder-only model are read at the last token of each row that is not padding. The model's own
forward finds that token by the id of the padding token. An encoder pools its hidden states in the modules of its head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters.auto_classes import HEADLESS, SEQUENCE_CLASSIFICATION
from hf_gpipe.adapters.base import IGNORED_LABEL, Inputs, Tensors
from hf_gpipe.adapters.decoder_only import DecoderOnly
from hf_gpipe.errors import DataError, UnsupportedModelError, UserError
from hf_gpipe.libraries.transformers import MODEL_FOR_MASKED_LM_MAPPING

#: The problem_type of one class for each row, whose loss is the cross-entropy.
ONE_CLASS = "single_label_classification"


class RowModel(DecoderOnly):
    """A model whose labels (B, ...) belong to rows, and not to tokens."""

    labels_rows = True

    def prepare(self, micro_batch: Tensors) -> dict[str, torch.Tensor]:
        inputs = dict(micro_batch)
        labels = {name: inputs.pop(name) for name in ("labels",) if name in inputs}
        return super().prepare(inputs) | labels

    def _is_used(self, inputs: Tensors) -> torch.Tensor:
        return inputs["attention_mask"].bool()

    def targets(self, inputs: Tensors) -> torch.Tensor:
        """Zeros (B, 1), which count the rows."""
        ids = self.main_input(inputs)
        return torch.zeros(len(ids), 1, dtype=torch.long, device=ids.device)

    def packed(self, documents: Sequence[Tensors], *, is_compiled: bool = False) -> dict[str, torch.Tensor]:
        raise UserError(
            f"{type(self.reference).__name__} makes one output of each row, and packed rows are one; leave packing "
            "out, and use a collator that pads"
        )


class Classifier(RowModel):
    """Embedding, blocks, perhaps a norm, and a head that gives logits (B, C) of rows."""

    is_classifier, task_type = True, "SEQ_CLS"

    @property
    def compared_class(self) -> type[PreTrainedModel] | None:
        return next(iter(HEADLESS.of_family(self.config)))

    def no_targets(self, batch: Tensors, *, reads_logits: bool) -> torch.Tensor:
        return no_labels(len(self.main_input(batch)), self.config)

    def targets(self, inputs: Tensors) -> torch.Tensor:
        """The class of each row, (B, 1); for another problem_type zeros."""
        return inputs["labels"][:, None] if problem_of(self.config) == ONE_CLASS else super().targets(inputs)

    def check_ids(self, inputs: Inputs) -> None:
        super().check_ids({name: ids for name, ids in inputs.items() if name != "labels"})
        check_labels(inputs["labels"], self.config)


class LastTokenClassifier(Classifier):
    """A decoder-only model, whose logits are read at the last token of each row."""

    compared_class = None

    def _is_used(self, inputs: Tensors) -> torch.Tensor:
        # The model looks for the last token by its id, whatever the mask says.
        is_token = self.main_input(inputs) != self.config.get_text_config().pad_token_id
        return super()._is_used(inputs) | is_token


def as_classifier(
    config: PreTrainedConfig, labels: Sequence[str], pad_token_id: int | None, problem_type: str | None = None
) -> dict[str, Any]:
    """The fields by which a language model's configuration becomes that of a classifier.

    Args:
        config: the configuration of the language model, or of a classifier of its family.
        labels: the names of the classes.
        pad_token_id: the padding token's id, for a configuration without it; the model finds a row's last token by it.
        problem_type: as in transformers.

    Returns:
        Values for `read_config`; the fields of a configuration inside of another are a mapping.

    Raises:
        UnsupportedModelError: transformers has no such class of the family.
    """
    fields = SEQUENCE_CLASSIFICATION.fields(config, labels)
    text = config.get_text_config()
    of_text = {"pad_token_id": pad_token_id if text.pad_token_id is None else text.pad_token_id}
    if text is not config:
        of_text = {next(name for name in config.sub_configs if getattr(config, name, None) is text): of_text}
    return {**fields, "problem_type": problem_type, **of_text}


def change(config: PreTrainedConfig, values: Mapping[str, Any]) -> None:
    """Set fields of a configuration in place. A mapping sets the fields of a configuration inside of it."""
    for name, value in values.items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            change(inner, value)
        else:
            setattr(config, name, value)


def kind_of_classifier(config: PreTrainedConfig, model_class: str) -> type[Classifier]:
    """The adapter of a class that classifies rows.

    Raises UnsupportedModelError where it cannot be split, or lacks its padding token.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model_type}: {model_class} cannot be split; among the classes of "
            "AutoModelForSequenceClassification those of encoders and of decoder-only models can"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return Classifier
    if config.get_text_config().pad_token_id is None:
        raise UnsupportedModelError(
            f"{config.model_type}: {model_class} finds the last token of a row by pad_token_id, and the "
            "configuration has none; give it the tokenizer's: from_pretrained(..., pad_token_id=...)"
        )
    return LastTokenClassifier


def problem_of(config: PreTrainedConfig) -> str:
    """The configuration's problem_type, or the one that transformers takes for labels of type integer."""
    given: str | None = config.problem_type
    return given or ("regression" if config.num_labels == 1 else ONE_CLASS)


def no_labels(num_rows: int, config: PreTrainedConfig) -> torch.Tensor:
    """Labels of rows that have none, which fit the configuration's problem_type and num_labels."""
    if problem_of(config) == ONE_CLASS:
        return torch.full((num_rows,), IGNORED_LABEL)
    return torch.zeros(num_rows, config.num_labels)


def check_labels(labels: torch.Tensor, config: PreTrainedConfig) -> None:
    """Raise DataError where labels, on the CPU, do not fit the configuration's problem_type and num_labels."""
    count, problem = config.num_labels, problem_of(config)
    given = f"labels have the shape {tuple(labels.shape)} and the type {labels.dtype}"
    if problem != ONE_CLASS:
        if labels.numel() != len(labels) * count or not labels.is_floating_point():
            raise DataError(f"{given}; for {problem} they are floats, {count} for each row (num_labels)")
    elif labels.dim() != 1 or labels.is_floating_point():
        raise DataError(
            f"{given}; for {problem} they are integers (B,); for several classes of a row set problem_type to "
            "'multi_label_classification' in the model's configuration, for numbers to 'regression'"
        )
    else:
        check_range(labels, count, "set num_labels")


def check_range(labels: torch.Tensor, num_classes: int, remedy: str) -> None:
    """Raise DataError for a label that is no class."""
    if len(wrong := labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= num_classes))]):
        raise DataError(
            f"labels has {int(wrong[0])}, and the model has {num_classes} classes, from 0; {remedy}, or correct it "
            f"({IGNORED_LABEL} is left out of the loss)"
        )
