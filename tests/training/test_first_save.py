"""What would let the first checkpoint fail is found before the first step, or saved as Trainer saves it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.trainer_callback import ExportableState

from hf_gpipe import Pipeline
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.training import checkpoints
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, StopAt, Stream, trainer, weights

SAVE: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "family": "llama"}


class Keeper(TrainerCallback, ExportableState):
    """Keeps what has no form in JSON."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": {1, 2}}}


class Words:
    """A tokenizer that cannot be saved."""

    pad_token_id = 0

    def save_pretrained(self, folder: Path) -> None:
        raise NotImplementedError("these words have no file")


def with_own_schedule(model: Any) -> tuple[Any, Any]:
    optimizer = Adafactor(model.parameters(), lr=None)
    return optimizer, AdafactorSchedule(optimizer)


def test_adafactor_with_its_own_schedule_is_saved_and_resumed(tmp_path: Path) -> None:
    """Its learning rate is a tensor, and the run died at its first checkpoint; Trainer saves it."""
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    rows = CausalRows(16)
    common: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "save_strategy": "steps",
        "save_steps": 2,
    }
    found = []
    for callbacks in ([StopAt(2)], []):
        pipe = Pipeline(copy.deepcopy(plain), 2, 2, "gpipe", "stage", partition="count", device="cpu")
        optimizers = with_own_schedule(pipe)
        run = trainer(
            tmp_path,
            family="llama",
            model=pipe,
            train_dataset=rows,
            callbacks=callbacks,
            optimizers=optimizers,
            **common,
        )
        run.train(resume_from_checkpoint=not callbacks)
        found.append(weights(run))
    args = TrainingArguments(output_dir=str(tmp_path / "plain"), use_cpu=True, disable_tqdm=True, **common)
    collate = PairCollator(pad_token_id=0)
    Trainer(plain, args, collate, train_dataset=rows, optimizers=with_own_schedule(plain)).train()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[1][name], parameter.detach(), rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"generation_config": GenerationConfig(temperature=0.5)}, "GenerationConfig is invalid: - `temperature`"),
        ({"callbacks": [Keeper()]}, "set is not JSON serializable"),
        ({"processing_class": Words()}, "NotImplementedError: these words have no file"),
    ],
)
def test_what_has_no_file_is_told_before_the_first_step(
    values: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run trained until its first checkpoint, where it died with an error of the library."""
    with pytest.raises(UserError, match=message):
        run(tmp_path, **values, **SAVE).train()
    assert not list(tmp_path.glob(".checkpoint*"))
    told: list[str] = []
    monkeypatch.setattr(checkpoints.logger, "warning", told.append)
    made = run(tmp_path, **values, **SAVE | {"save_strategy": "no", "max_steps": 1})
    made.train()
    assert made.state.global_step == 1
    assert len(told) == 1
    assert told[0].startswith("the trained model could not be saved: ")


def run(folder: Path, **values: Any) -> Any:
    processing_class = values.pop("processing_class", None)
    made = trainer(folder, **values)
    made.processing_class = processing_class
    return made


class Placed(Stream):
    """A stream whose place has no form in JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_what_the_first_step_makes_is_checked_after_it(tmp_path: Path) -> None:
    """A state of the optimizer, or the place of a stream, that cannot be saved was found at the first checkpoint."""

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = {1}

    pipe = Pipeline(tiny_config("llama"), 2, 2, "gpipe", "stage", partition="count", device="cpu")
    optimizer = Noting(pipe.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for values, message in (
        ({"model": pipe, "optimizers": (optimizer, schedule)}, "optimizer state 'seen' is a set"),
        ({"train_dataset": Placed(), "family": "marian"}, "progress is a Tensor"),
    ):
        made = trainer(tmp_path, **SAVE | values)
        with pytest.raises(UserError, match=message):
            made.train()
        assert made.state.global_step == 1


def test_metrics_of_any_kind_of_number_are_logged(tmp_path: Path) -> None:
    """A tensor that a script logged was Python's TypeError, in a callback."""
    made = trainer(tmp_path, family="llama")
    made.log({"share": torch.tensor(0.25), "counts": torch.tensor([1, 2])})
    assert made.state.log_history[-1] == {"share": 0.25, "counts": [1, 2], "epoch": 0, "step": 0}
    with pytest.raises(UserError, match=r"log: the value of 'kinds' has no form in JSON.*give a number"):
        made.log({"kinds": {1, 2}})
