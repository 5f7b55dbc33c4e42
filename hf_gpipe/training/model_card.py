"""The card of a saved model, README.md, as transformers' Trainer writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from hf_gpipe.checkpoint.save import replace_file
from hf_gpipe.libraries.transformers_trainer import TrainingSummary

logger = transformers.logging.get_logger(__name__)

CARD = "README.md"


def write_card(trainer: Any, directory: Path, kept: dict[str, Any]) -> None:
    """Write the card of a trainer's model, with its own tags; given tags are added to those of an existing card.

    `kept` is the arguments of `TrainingSummary.from_trainer`.
    """
    pipe, path = trainer.pipe, directory / CARD
    base = pipe.adapter.config.name_or_path
    tags = kept.get("tags")
    more = list(getattr(pipe.model, "model_tags", None) or [])
    if tags is not None and path.exists():
        more += ModelCard.load(path, ignore_metadata_errors=True).data.tags or []
    if more:
        tags = [tags] if isinstance(tags, str) else list(tags or [])
        kept["tags"] = list(dict.fromkeys([*tags, *more]))
    summary: Any = TrainingSummary.from_trainer(trainer, **kept)
    summary.finetuned_from = summary.finetuned_from or (None if os.path.isdir(base) else base) or None
    # Trainer counts every process as a replica, which a stage is not.
    for name in ("distributed_type", "num_devices", "total_train_batch_size", "total_eval_batch_size"):
        summary.hyperparameters.pop(name, None)
    if (size := trainer.args.size).rows_of_step not in (None, size.rows):
        summary.hyperparameters["total_train_batch_size"] = size.rows_of_step
    summary.hyperparameters |= pipe.config.in_short
    replace_file(path, summary.to_model_card())
    if pipe.adapter.peft is not None:
        card = ModelCard.load(path)
        card.data.library_name = "peft"
        card.data.base_model = card.data.base_model or base or None
        card.save(path)


def add_card(trainer: Any, directory: Path) -> None:
    """Write the card of a saved model, unless there is one. What goes wrong is a warning: the model is saved."""
    if (directory / CARD).exists() or not isinstance(trainer.pipe.adapter.reference, PreTrainedModel):
        return
    try:
        # Without a name of the base model, transformers asks the Hub for nothing.
        write_card(trainer, directory, {"model_name": directory.absolute().name, "finetuned_from": ""})
    except Exception as error:  # the library reads the dataset and the history, which may be of any kind
        logger.warning(f"{directory} has no model card: {type(error).__name__}: {error}")
