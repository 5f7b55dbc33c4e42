"""The model card, README.md, that transformers' Trainer drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.modelcard import TrainingSummary


def write_model_card(trainer: Any, path: Path, **entries: Any) -> None:
    """Write the card of a trainer's model.

    Args:
        trainer: the `PipelineTrainer` whose arguments, log and datasets the card tells of.
        path: of the file; the tags of one that is there are kept.
        entries: of `TrainingSummary.from_trainer`: language, license, tags, finetuned_from ...
    """
    if path.exists():
        before = ModelCard.load(path, ignore_metadata_errors=True).data.tags
        tags = entries.get("tags")
        if before and tags is not None:
            tags = [tags] if isinstance(tags, str) else list(tags)
            entries["tags"] = [*tags, *(tag for tag in before if tag not in tags)]
    summary = TrainingSummary.from_trainer(trainer, **entries)
    # Trainer counts every process as a replica, which a stage is not.
    hyperparameters, args, pipe = summary.hyperparameters, trainer.args, trainer.pipe
    for name in ("distributed_type", "num_devices", "total_train_batch_size", "total_eval_batch_size"):
        hyperparameters.pop(name, None)
    if args.rows_of_update not in (None, args.per_device_train_batch_size):
        hyperparameters["total_train_batch_size"] = args.rows_of_update
    hyperparameters |= pipe.config.in_short
    path.write_text(summary.to_model_card(), encoding="utf-8")
    if pipe.adapter.peft is not None:
        card = ModelCard.load(path)
        card.data.library_name = "peft"
        card.data.base_model = card.data.base_model or pipe.model.config.name_or_path or None
        card.save(path)
