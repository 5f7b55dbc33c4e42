"""A tiny translation task for the trainer's tests: rows of token ids, and the callbacks that watch a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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


#: Arguments of a pipeline of two stages, in which nothing is recomputed.
TWO_STAGES: dict[str, Any] = {
    "num_stages": 2,
    "num_micro_batches": 3,
    "schedule": "1f1b",
    "recompute": "none",
    "partition": "count",
}


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


class StopAt(TrainerCallback):
    """Ends a run after this step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._step


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
        *("preprocess_logits_for_metrics", "model_init"),
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


def trained_alike(ours: Any, theirs: Any, recorders: Sequence[Recorder], names: Sequence[str]) -> None:
    """Train both from the weights of TRL's `theirs`: 30 losses, the named metrics and all weights are within 1e-5.

    Where `ours` has rows for it, both are evaluated at the end, and so are those numbers. The recorders are callbacks
    of the one and the other.
    """
    mine, others = (
        {name.removeprefix("base_model.model."): p for name, p in one.named_parameters() if p.requires_grad}
        for one in (ours.pipe, theirs.model)
    )
    assert mine.keys() == others.keys()
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(others[name])
    start = {name: parameter.detach().clone() for name, parameter in others.items()}
    for one in (ours, theirs):
        one.train()
        if ours.eval_dataset is not None:
            one.evaluate()
    for prefix, count in (("", 30), *([("eval_", 1)] if ours.eval_dataset is not None else ())):
        wanted = [f"{prefix}{name}" for name in ("loss", *names)]
        found, expected = ([one for one in each.logs if wanted[0] in one] for each in recorders)
        assert len(found) == len(expected) == count
        for log, other in zip(found, expected, strict=True):
            for name in wanted:
                assert (name in log) == (name in other), name
                assert log.get(name, 0) == pytest.approx(other.get(name, 0), abs=1e-5, rel=0), name
    assert recorders[1].losses[0] != recorders[1].losses[-1]
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter, others[name], rtol=0, atol=1e-5, msg=name)
    assert max(float((others[name].detach() - start[name]).abs().max()) for name in mine) > 1e-3
