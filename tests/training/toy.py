"""A tiny translation task for the trainer's tests: rows of token ids, and the callbacks that watch a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.data import PairCollator
from tests.oracle import VOCABULARY, tiny_config

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Rows whose labels repeat the source; their lengths differ."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
        self.rows = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": [*self.rows[index], 1]}


class CausalRows(Rows):
    """Rows of a decoder-only model: the labels are the ids."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": list(self.rows[index])}


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """The same rows, without length or index."""

    def __init__(self, count: int = 24) -> None:
        self._rows = Rows(count)

    def __iter__(self) -> Any:
        return (self._rows[index] for index in range(len(self._rows)))


class Recorder(TrainerCallback):
    """Notes the name of every event, and what was logged."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            return lambda *args, **kwargs: self._note(name, kwargs.get("logs"))
        return super().__getattribute__(name)

    def _note(self, name: str, logs: dict[str, Any] | None) -> None:
        self.events.append(name)
        if logs is not None:
            self.logs.append(dict(logs))

    @property
    def losses(self) -> list[float]:
        return [logs["loss"] for logs in self.logs if "loss" in logs]


def arguments(folder: Path, **values: Any) -> PipelineTrainingArguments:
    defaults: dict[str, Any] = {
        "num_stages": 2,
        "num_micro_batches": 2,
        "schedule": "gpipe",
        "recompute": "stage",
        "partition": "count",
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": False,
        "use_cpu": True,
    }
    return PipelineTrainingArguments(output_dir=str(folder), **defaults | values)


def trainer(folder: Path, *, family: str = "marian", dropout: float = 0.1, **values: Any) -> PipelineTrainer:
    """A trainer of a tiny model; keywords of the trainer's constructor are taken out, the rest are arguments."""
    names = (
        *("callbacks", "eval_dataset", "train_dataset", "compute_metrics", "optimizers", "model", "data_collator"),
        "preprocess_logits_for_metrics",
    )
    own = {name: values.pop(name) for name in names if name in values}
    own.setdefault("model", tiny_config(family, dropout=dropout))
    own.setdefault("train_dataset", CausalRows() if family == "llama" else Rows())
    own.setdefault("data_collator", PairCollator(pad_token_id=0))
    return PipelineTrainer(args=arguments(folder, **values), **own)


def weights(made: PipelineTrainer) -> dict[str, torch.Tensor]:
    """The parameters of all processes, by name."""
    mine = {name: parameter.detach().clone() for name, parameter in made.pipe.named_parameters()}
    return {name: tensor for part in made.world.gather_objects(mine) for name, tensor in part.items()}  # type: ignore[attr-defined]
