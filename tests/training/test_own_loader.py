"""A subclass's loaders are read: their mini-batches are those of the training, the evaluation and the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hf_gpipe import PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import DataError, UserError
from tests.gloo import run_gloo
from tests.oracle import tiny_config
from tests.training.toy import Rows, arguments, weights

COLLATE = PairCollator(pad_token_id=0)


class OwnTrainer(PipelineTrainer):
    """Reads loaders of torch: rows in order for an evaluation, shuffled by a generator of its own for a training."""

    def get_train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(Rows(10), batch_size=4, shuffle=True, generator=generator, collate_fn=COLLATE)
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(Rows(6), batch_size=4, collate_fn=COLLATE)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return DataLoader(test_dataset, batch_size=2, collate_fn=COLLATE)


def made(folder: Path | str, cls: type[PipelineTrainer] = OwnTrainer, **values: Any) -> PipelineTrainer:
    own = {name: values.pop(name) for name in ("train_dataset", "eval_dataset", "data_collator") if name in values}
    return cls(tiny_config("marian", dropout=0.1), arguments(Path(folder), **values), **own)


class Given(torch.utils.data.Dataset[Any]):
    """The rows that a plain loader gives in two epochs, for a trainer without a loader of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows: list[Any] = []
        for batch in DataLoader(Rows(10), batch_size=4, shuffle=True, generator=generator, collate_fn=list):
            self.rows.extend(batch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def test_an_own_loader_s_mini_batches_are_trained_evaluated_and_predicted(tmp_path: Path) -> None:
    """The commonest override of a Trainer was an error."""
    own = made(tmp_path / "own", max_steps=3, eval_strategy="epoch")
    own.train()
    options = {"train_sampling_strategy": "sequential", "data_collator": COLLATE, "train_dataset": Given()}
    plain = made(tmp_path / "plain", PipelineTrainer, max_steps=3, per_device_eval_batch_size=4, **options)
    plain.train()
    assert own.state.global_step == plain.state.global_step == 3
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(own)[name]), name
    expected = plain.evaluate(Rows(6))["eval_loss"]
    assert own.evaluate()["eval_loss"] == own.state.log_history[-1]["eval_loss"] == pytest.approx(expected)
    assert len(own.predict(Rows(5)).predictions) == 5


def _trained(folder: str, resumes: bool) -> dict[str, torch.Tensor]:
    one = made(folder, max_steps=8, save_strategy="steps", save_steps=4, save_only_model=False)
    one.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumes else None)
    return weights(one)


def test_a_training_with_an_own_loader_resumes_exactly_also_on_two_processes(tmp_path: Path) -> None:
    whole = _trained(str(tmp_path), False)
    resumed = _trained(str(tmp_path), True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for together in run_gloo(_trained, 2, str(tmp_path / "two"), False):
        for name, tensor in together.items():
            torch.testing.assert_close(tensor, whole[name])


class Endless:
    """An iterable of mini-batches without a length, whose epoch may be set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for start in range(3):
            yield COLLATE([Rows(12)[4 * start + (index + self.epoch) % 4] for index in range(4)])


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, UserError, "get_train_dataloader returned None; let it return a loader of mini-batches, such as a"),
        (3, UserError, "get_train_dataloader returned a int"),
        ([[1, 2]], DataError, "the data loader returned a list; a mini-batch is a dict of tensors"),
    ],
)
def test_what_is_no_loader_is_an_error(returned: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    class Mine(PipelineTrainer):
        def get_train_dataloader(self) -> Any:
            return returned

    with pytest.raises(error, match=message):
        made(tmp_path, Mine, max_steps=1).train()


def test_a_loader_without_a_length_needs_the_number_of_steps(tmp_path: Path) -> None:
    class Mine(PipelineTrainer):
        def get_train_dataloader(self) -> Any:
            return Endless()

    with pytest.raises(UserError, match="max_steps"):
        made(tmp_path, Mine, max_steps=-1).train()
    one = made(tmp_path, Mine, max_steps=5)
    one.train()
    assert one.state.global_step == 5


def _view(folder: str) -> dict[str, Any]:
    one = made(folder)
    view = one.accelerator
    assert view.unwrap_model(one.model) is one.model
    view.wait_for_everyone()
    gathered = view.gather({"loss": torch.tensor(float(view.process_index)), "rows": [torch.ones(2, 1)]})
    listed = view.gather_for_metrics([f"of {view.process_index}"], use_gather_object=True)
    with view.main_process_first():
        pass
    with pytest.raises(UserError, match="a Linear cannot be prepared"):
        view.prepare(torch.nn.Linear(1, 1))
    assert not hasattr(view, "backward")
    with pytest.raises(AttributeError, match="accelerator has no backward: the pipeline itself places"):
        view.backward(None)
    return {
        "loss": gathered["loss"].tolist(),
        "rows": tuple(gathered["rows"][0].shape),
        "listed": listed,
        "facts": (view.num_processes, view.process_index, view.is_main_process, view.is_local_main_process),
        "last": view.is_last_process,
        "device": str(view.device),
    }


def test_the_accelerator_is_a_view_of_the_processes(tmp_path: Path) -> None:
    """Scripts that ask `trainer.accelerator` for the main process, or gather over it, ended in an error."""
    alone = _view(str(tmp_path / "alone"))
    assert alone["loss"] == [0.0]
    assert alone["facts"] == (1, 0, True, True)
    first, second = run_gloo(_view, 2, str(tmp_path / "two"))
    assert first["loss"] == second["loss"] == [0.0, 1.0]
    assert first["rows"] == (4, 1)
    assert second["listed"] == ["of 0", "of 1"]
    assert second["facts"][:3] == (2, 1, False)
    assert (first["last"], second["last"], second["device"]) == (False, True, "cpu")
