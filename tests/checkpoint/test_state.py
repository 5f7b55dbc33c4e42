"""Resuming: equal to the last bit, on any number of stages, and only from complete checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSeq2SeqLM, TrainerCallback

from hf_gpipe import Pipeline
from hf_gpipe.checkpoint import directory, save
from hf_gpipe.checkpoint.directory import (
    check_shared,
    checkpoint_path,
    checkpoints,
    last_checkpoint,
    rotate,
    tidy,
)
from hf_gpipe.checkpoint.save import written_whole
from hf_gpipe.checkpoint.state import FOLDER, STATE_FILE, DataPosition, RunState, load_state, read_state
from hf_gpipe.errors import CheckpointError
from hf_gpipe.job.world import World
from hf_gpipe.training.loss_scaling import LossScaler
from tests.checkpoint.test_digests import make_old
from tests.gloo import run_gloo
from tests.oracle import padded_batch, tiny_config
from tests.training.toy import Recorder, Rows, StopAt, Stream, trainer, weights


class CrashError(Exception):
    """Replaces the end of a process."""


class CrashAt(TrainerCallback):
    """Ends the training in the middle of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise CrashError


def random_noise(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A collator that uses torch's generator, like one for masking."""
    ids = torch.tensor([row["input_ids"][:2] for row in rows])
    return {"input_ids": torch.where(torch.rand(ids.shape) < 0.3, 2, ids), "labels": ids}


ALONE = World.current()
SAVE = {"save_strategy": "steps", "save_steps": 2, "max_steps": 9, "dropout": 0.2}
START = RunState(position=DataPosition(epoch=0, mini_batches=0), pipeline_step=0, data={})


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"gradient_accumulation_steps": 2, "optim": "adafactor", "lr_scheduler_type": "cosine"},
        {"train_sampling_strategy": "group_by_length", "data_collator": random_noise, "optim": "sgd"},
        {"train_dataset": Stream(10), "data_collator": random_noise, "optim": "adagrad"},
        {"save_strategy": "epoch", "train_dataset": Rows(12), "optim": "rmsprop"},
    ],
)
def test_a_run_that_was_interrupted_ends_with_the_same_weights(values: dict[str, Any], tmp_path: Path) -> None:
    settings = SAVE | {"max_steps": 6} | values
    whole, resumed = Recorder(), Recorder()
    uninterrupted = trainer(tmp_path / "whole", callbacks=[whole], **settings)
    uninterrupted.train()
    with pytest.raises(CrashError):
        trainer(tmp_path / "run", callbacks=[CrashAt(5)], **settings).train()
    again = trainer(tmp_path / "run", callbacks=[resumed], **settings)
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert 2 <= len(resumed.losses) <= 3
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(weights(again)[name], tensor), name
    kept = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").open()] for run in ("whole", "run")]
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in kept]
    assert losses[0] == losses[1], "no line is lost, none is there twice"
    finished = trainer(tmp_path / "run", **settings)
    assert finished.train(resume_from_checkpoint=True).global_step == 6


def test_state_of_one_split_loads_on_another(tmp_path: Path) -> None:
    """The model is tied, and the parameters move between stages."""
    settings = SAVE | {"save_steps": 2, "max_steps": 5}
    whole = trainer(tmp_path / "whole", num_stages=3, **settings)
    whole.train()
    with pytest.raises(CrashError):
        trainer(tmp_path / "run", num_stages=3, callbacks=[CrashAt(3)], **settings).train()
    for num_stages in (1, 2, 5):
        made = trainer(tmp_path / f"k{num_stages}", num_stages=num_stages, **settings)
        made.train(resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")
        for name, tensor in weights(whole).items():
            torch.testing.assert_close(weights(made)[name], tensor, rtol=0, atol=1e-5, msg=name)


def _resume_on_two(folder: str) -> dict[str, torch.Tensor]:
    made = trainer(Path(folder), num_stages=4, **SAVE | {"max_steps": 5})
    made.train(resume_from_checkpoint=True)
    return weights(made)


def test_state_of_one_process_loads_in_two(tmp_path: Path) -> None:
    settings = SAVE | {"max_steps": 5}
    whole = trainer(tmp_path / "whole", num_stages=4, **settings)
    whole.train()
    with pytest.raises(CrashError):
        trainer(tmp_path / "run", num_stages=4, callbacks=[CrashAt(3)], **settings).train()
    first, second = run_gloo(_resume_on_two, 2, str(tmp_path / "run"))
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-6, msg=name)
        assert torch.equal(first[name], second[name])


def test_a_checkpoint_holds_no_pickle_and_is_in_hub_format(tmp_path: Path) -> None:
    trainer(tmp_path, **SAVE).train()
    checkpoint = last_checkpoint(tmp_path, ALONE)
    assert checkpoint == tmp_path / "checkpoint-9"
    assert {path.suffix for path in checkpoint.rglob("*") if path.is_file()} == {".json", ".safetensors"}
    AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    slots: set[str] = set()
    for file in (checkpoint / FOLDER).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            slots |= set(tensors.keys())
    names = {key.rpartition("/")[0] for key in slots}
    assert slots == {f"{name}/{slot}" for name in names for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert "model.shared.weight" in names


# ---------------------------------------------------------------------- what does not fit


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    trainer(folder, **SAVE).train()
    return folder / "checkpoint-8"


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run" / trained.name))


def test_another_place_in_the_data_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    settings = SAVE | {"max_steps": 12}
    by_length = {"train_sampling_strategy": "group_by_length"}
    for values in ({"seed": 1}, {"train_dataset": Rows(50)}, {"per_device_train_batch_size": 8} | by_length):
        with pytest.raises(CheckpointError, match="place in the data"):
            trainer(tmp_path, **settings | values).train(resume_from_checkpoint=checkpoint)
    made = trainer(tmp_path, ignore_data_skip=True, **settings | {"per_device_train_batch_size": 8})
    assert made.train(resume_from_checkpoint=checkpoint).global_step == 12


class _Noted(Rows):
    """Notes which rows are read."""

    def __init__(self) -> None:
        super().__init__(24)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("values", "repeated", "steps"),
    [
        ({"per_device_train_batch_size": 8}, 0, 2 + 2 + 3),
        ({"per_device_train_batch_size": 24}, 8, 2 + 1 + 1),
        ({"per_device_train_batch_size": 3}, 2, 2 + 6 + 8),
        ({"gradient_accumulation_steps": 2}, 0, 2 + 2 + 3),
        ({"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}, 0, 2 + 2 + 3),
    ],
)
def test_steps_of_another_size_go_on_with_the_rows_that_are_left(
    values: dict[str, Any], repeated: int, steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an error. Two of six mini-batches of 4 rows were trained on in the first epoch."""
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 1} | {
        name: value for name, value in values.items() if name == "train_sampling_strategy"
    }
    first = _Noted()
    trainer(tmp_path, train_dataset=first, callbacks=[StopAt(2)], **SAVE | settings).train()
    trained, first.read[:] = first.read[:8], []
    made = trainer(tmp_path, train_dataset=first, **SAVE | settings | values)
    made.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    # The longest rows of a dataset are read before the training.
    seen = first.read[-(24 - 8 + repeated + 24) :]
    assert sorted([*trained[: 8 - repeated], *seen[: 16 + repeated]]) == list(range(24))
    assert sorted(seen[16 + repeated :]) == list(range(24))
    assert made.state.global_step == made.state.max_steps == steps
    assert made.get_learning_rates() == [0.0, 0.0]
    (name, value), *_ = [entry for entry in values.items() if entry[0] != "train_sampling_strategy"]
    assert caplog.text.count(f"{name}={value} in place of") == 1
    assert made.state.train_batch_size == made.args.per_device_train_batch_size
    again = trainer(tmp_path, **SAVE | settings | values)
    again.train(resume_from_checkpoint=tmp_path / f"checkpoint-{steps - 1}")
    assert again.state.global_step == steps
    for name, tensor in weights(made).items():
        assert torch.equal(weights(again)[name], tensor), name


def test_state_of_another_optimizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="AdamW and the optimizer is SGD"):
        trainer(tmp_path, **SAVE | {"optim": "sgd"}).train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("damage", ["state", "format", "optimizer", "cut", "weights"])
def test_a_damaged_checkpoint_is_told(damage: str, checkpoint: Path, tmp_path: Path) -> None:
    state, file = checkpoint / FOLDER / STATE_FILE, checkpoint / FOLDER / "optimizer-00002-of-00002.safetensors"
    if damage == "state":
        state.write_text("{")
    if damage == "format":
        state.write_text(state.read_text().replace('"format": 1', '"format": 99'))
    if damage == "optimizer":
        file.unlink()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    if damage == "weights":
        (checkpoint / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-8"):
        trainer(tmp_path, **SAVE).train(resume_from_checkpoint=checkpoint)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere; give the path"):
        trainer(tmp_path, **SAVE).train(resume_from_checkpoint=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no training can resume"):
        read_state(tmp_path)
    # The first start of a script that resumes where it can.
    trainer(tmp_path, save_only_model=True, **SAVE).train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path)
    assert last_checkpoint(tmp_path, ALONE) is None


def test_values_without_a_json_form_are_refused(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("llama"), 1)
    parameters = dict(pipe.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    optimizer.param_groups[0]["callback"] = print
    with pytest.raises(CheckpointError, match="an optimizer's option is a builtin"):
        pipe.weights.writer().add_state(parameters, optimizer, None, START)


def test_state_round_trip_is_exact(tmp_path: Path) -> None:
    """State that is a tensor, a Python number or empty; options that are tuples."""
    pipe = Pipeline(tiny_config("marian"), 2, 2)
    parameters = dict(pipe.named_parameters())

    def make() -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters.values(), lr=0.1, betas=(0.8, 0.7), amsgrad=True)

    optimizer = make()
    pipe.train_step(padded_batch(tiny_config("marian")))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=10)
    optimizer.step()
    scheduler.step()
    first = next(iter(parameters.values()))
    optimizer.state[first]["scalar"] = 0.1
    run = RunState(
        position=DataPosition(epoch=1, mini_batches=2, place={"state": {"a": [1, None]}, "done": 1}),
        pipeline_step=3,
        data={"b": 0.1},
        evaluation_is_due=True,
        num_micro_batches=4,
        loss_scale=LossScaler(0.5).state_dict(),
        has_digests=True,
    )
    writer = pipe.weights.writer()
    writer.begin(tmp_path, has_model=False)
    writer.add_state(parameters, optimizer, scheduler, run)
    writer.write()
    assert read_state(tmp_path).run == run
    other = make()
    other_scheduler = torch.optim.lr_scheduler.OneCycleLR(other, 0.9, total_steps=20)
    load_state(tmp_path, parameters, other, other_scheduler)
    assert other.param_groups[0]["betas"] == optimizer.param_groups[0]["betas"]
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert other.state[first]["scalar"] == 0.1
    for parameter, slots in optimizer.state.items():
        assert other.state[parameter].keys() == slots.keys()
        for slot, value in slots.items():
            assert torch.equal(torch.as_tensor(other.state[parameter][slot]), torch.as_tensor(value))


def test_progress_of_older_versions_is_read(checkpoint: Path) -> None:
    file = checkpoint / FOLDER / STATE_FILE
    content = json.loads(file.read_text())
    assert RunState(**content["progress"]) == read_state(checkpoint).run
    for name in ("has_digests", "evaluation_is_due", "num_micro_batches", "loss_scale"):
        del content["progress"][name]
    file.write_text(json.dumps(content))
    saved = read_state(checkpoint)
    assert not saved.run.has_digests
    assert saved.run.position.mini_batches > 0
    assert (saved.run.evaluation_is_due, saved.run.num_micro_batches, saved.run.loss_scale) == (False, None, None)
    for name in ("position", "pipeline_step", "data"):
        damaged = {key: value for key, value in content["progress"].items() if key != name}
        file.write_text(json.dumps(content | {"progress": damaged}))
        with pytest.raises(CheckpointError, match=f"'{name}' is missing in progress"):
            read_state(checkpoint)


@pytest.mark.parametrize(("name", "value"), [("scale", 0.0), ("growth_interval", -1)])
def test_a_scale_that_divides_nothing_is_found(name: str, value: float | None, checkpoint: Path) -> None:
    """A scale of 0 was read, and the first step divided by it."""
    file = checkpoint / FOLDER / STATE_FILE
    content = json.loads(file.read_text())
    content["progress"]["loss_scale"] = LossScaler().state_dict() | {name: value}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"damaged: progress\.loss_scale\.{name} is .*, expected"):
        read_state(checkpoint)


# ---------------------------------------------------------------------- directories


def make_checkpoints(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        (folder / f"checkpoint-{step}" / FOLDER).mkdir(parents=True)
        (folder / f"checkpoint-{step}" / FOLDER / STATE_FILE).touch()
    return [folder / f"checkpoint-{step}" for step in steps]


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    made = make_checkpoints(tmp_path, 2, 10, 9, 30)
    (tmp_path / "checkpoint-final").mkdir()
    two, ten, nine, thirty = made
    assert checkpoints(tmp_path) == [two, nine, ten, thirty], "the order is that of numbers, not of names"
    rotate(tmp_path, None)
    assert len(checkpoints(tmp_path)) == 4
    rotate(tmp_path, 3)
    assert checkpoints(tmp_path) == [nine, ten, thirty]
    rotate(tmp_path, 2, keep=[nine])
    assert checkpoints(tmp_path) == [nine, thirty]
    rotate(tmp_path, 1, keep=[nine])
    assert checkpoints(tmp_path) == [nine, thirty]
    rotate(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-30", "checkpoint-final"] or len(
        list(tmp_path.iterdir())
    ) == 2


def test_an_unfinished_checkpoint_has_no_name(tmp_path: Path) -> None:
    world = World.current()
    final = tmp_path / "checkpoint-5"

    def crash() -> None:
        with written_whole(final, world) as directory:
            (directory / "weights").touch()
            raise CrashError

    with pytest.raises(CrashError):
        crash()
    assert checkpoints(tmp_path) == []
    with written_whole(final, world) as directory:
        assert list(directory.iterdir()) == []
        (directory / "new").touch()
    assert [path.name for path in checkpoint_path(tmp_path, 5).iterdir()] == ["new"]
    with written_whole(final, world) as directory:
        (directory / "newer").touch()
    assert [path.name for path in checkpoint_path(tmp_path, 5).iterdir()] == ["newer"]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    for name in (".checkpoint-4.tmp", ".checkpoint-2.gone-0a1b2c3d", ".checkpoint-6.old-0a1b2c3d", ".other", "run"):
        (tmp_path / name).mkdir()
    make_checkpoints(tmp_path, 3)
    (tmp_path / ".checkpoint-3.old-0a1b2c3d").mkdir()
    tidy(tmp_path)
    # checkpoint-6 had been moved aside for a new one that never came.
    assert sorted(os.listdir(tmp_path)) == [".other", "checkpoint-3", "checkpoint-6", "run"]
    tidy(tmp_path / "nowhere")


def test_a_checkpoint_that_was_being_replaced_is_resumed_from(tmp_path: Path) -> None:
    """The training looked for a checkpoint before it renamed the one that was moved aside."""
    trainer(tmp_path, **SAVE).train()
    (tmp_path / "checkpoint-9").rename(tmp_path / ".checkpoint-9.old-0a1b2c3d")
    recorder = Recorder()
    made = trainer(tmp_path, callbacks=[recorder], **SAVE)
    assert made.train(resume_from_checkpoint=True).global_step == 9
    assert recorder.losses == []


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match="cannot write"),
        written_whole(tmp_path / "file" / "checkpoint-1", World.current()),
    ):
        pass


def test_weights_are_replaced_in_place(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("marian"), 2, seed=1)
    pipe.save_pretrained(tmp_path)
    other = Pipeline(tiny_config("marian"), 3, seed=2)
    before = dict(other.named_parameters())
    other.load_pretrained(tmp_path)
    for name, parameter in pipe.named_parameters():
        assert torch.equal(dict(other.named_parameters())[name], parameter)
        assert dict(other.named_parameters())[name] is before[name]
    with pytest.raises(CheckpointError):
        Pipeline(tiny_config("marian", d_model=32), 1).load_pretrained(tmp_path)


def test_weights_are_replaced_without_a_second_copy_of_them(tmp_path: Path) -> None:
    """A second stage was loaded and copied: at the end of a training that loads its best model, twice the memory."""

    class Made(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cpu" and not result._is_view():
                self.num_bytes += result.untyped_storage().nbytes() if func is torch.ops.aten.clone.default else 0
            return result

    pipe = Pipeline(tiny_config("marian"), 2, seed=1)
    pipe.save_pretrained(tmp_path)
    with Made() as made:
        pipe.load_pretrained(tmp_path)
    assert made.num_bytes < sum(p.numel() * p.element_size() for p in pipe.parameters()) / 4


# ---------------------------------------------------------------------- several processes


def _save_with_a_full_disk(folder: str, broken_process: int, by_limit: bool) -> str:
    made = trainer(Path(folder), num_stages=3, **SAVE | {"max_steps": 4})
    if made.world.rank == broken_process and by_limit:
        made.add_callback(_LimitFiles())
    elif made.world.rank == broken_process:
        original, calls = save.save_file, 0

        def fails_the_second_time(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            original(*args, **kwargs)
            if calls > 2 * len(made.world.local_stages):  # a file of weights and one of state for each
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        save.save_file = fails_the_second_time
    with pytest.raises(CheckpointError) as caught:
        made.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(caught.value)


class _LimitFiles(TrainerCallback):
    """After the first checkpoint, one process cannot write files of more than a few bytes."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("broken_process", "by_limit"), [(0, False), (1, True)])
def test_a_full_disk_on_one_process_is_told_on_all(broken_process: int, by_limit: bool, tmp_path: Path) -> None:
    """The error was raised on one process, and the others waited for its part of the checkpoint."""
    messages = run_gloo(_save_with_a_full_disk, 2, str(tmp_path), broken_process, by_limit)
    assert messages[0] == messages[1]
    assert f"process {broken_process} cannot write" in messages[0]
    assert ("File too large" if by_limit else "No space left on device") in messages[0]
    assert [path.name for path in tmp_path.glob("*checkpoint*")] == ["checkpoint-2"], "nothing half written is left"
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-2")
    assert trainer(tmp_path, num_stages=3, **SAVE).train(resume_from_checkpoint=True).global_step == 9


def _see_each_other(folder: str) -> str:
    rank = World.current().rank
    os.makedirs(f"{folder}/{rank}", exist_ok=True)
    os.chdir(f"{folder}/{rank}")
    check_shared(Path(folder) / "common", World.current())
    directory._APPEARS_SECONDS = 0.2
    with pytest.raises(CheckpointError) as caught:
        trainer(Path("out"), **SAVE).train()
    return str(caught.value)


def test_a_directory_that_processes_do_not_share_is_told(tmp_path: Path) -> None:
    """A relative path, in processes that were started in different places; two machines' own disks look the same."""
    messages = run_gloo(_see_each_other, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert re.search(r"process 0 \(on .*/0/out\) does not see what process 1 \(on .*/1/out\) writes", messages[0])
    assert list((tmp_path / "common").iterdir()) == list((tmp_path / "0" / "out").iterdir()) == []


# ---------------------------------------------------------------------- checkpoints of unknown origin


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: [], "expected a valid dictionary"),
        (lambda state: state | {"progress": []}, r"progress is \[\] \(a list\), expected"),
        (lambda state: state | {"progress": {}}, "'position' is missing in progress"),
        (lambda state: state | {"optimizer": None}, r"optimizer is nothing \(null\)"),
        (lambda state: with_optimizer(state, files="abc"), r"optimizer.files is 'abc' \(a string\)"),
        (lambda state: with_optimizer(state, files=["../../weights.safetensors"]), "which is not a file of"),
        (lambda state: with_optimizer(state, files=[7]), r"optimizer.files\[0\] is 7"),
        (lambda state: with_optimizer(state, groups=[1, 2]), r"optimizer.groups\[0\] is 1"),
        (lambda state: with_optimizer(state, values={"a": 1}), "optimizer.values.a is 1"),
        (lambda state: state | {"scheduler": {"step": 1}}, "has no 'step'"),
        (lambda state: state | {"scheduler": {"lr_lambdas": 1}}, r"scheduler.lr_lambdas is 1 .*, expected a list"),
        (lambda state: state | {"scheduler": {"base_lrs": ["1"]}}, r"scheduler.base_lrs\[0\] is '1'"),
        (
            lambda state: state | {"scheduler": {"base_lrs": [1.0] * 9}},
            r"scheduler\.base_lrs has 9 entries, expected 2, one",
        ),
        (lambda state: with_group(state, lr="fast"), r"optimizer.groups\[0\].lr is 'fast' .*, expected a number"),
        (lambda state: with_group(state, lr=math.nan), r"optimizer.groups\[0\].lr is nan"),
        (
            lambda state: with_group(state, eps=None),
            r"optimizer.groups\[0\].eps is nothing \(null\), expected a number",
        ),
        (lambda state: with_group(state, amsgrad=True), r"optimizer.groups\[0\].amsgrad is true"),
        (lambda state: with_group(state, betas=[0.9, {}]), r"optimizer.groups\[0\].betas\[1\] is {}"),
        (lambda state: with_group(state, betas="ab"), r"optimizer.groups\[0\].betas is 'ab'"),
    ],
)
def test_a_state_that_was_tampered_with_is_told(change: Any, message: str, damaged: Path, tmp_path: Path) -> None:
    file = damaged / FOLDER / STATE_FILE
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer(tmp_path, **SAVE).train(resume_from_checkpoint=damaged)
    assert "CheckpointError" not in str(caught.value), "no message is quoted in another"


def with_group(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    first, *others = state["optimizer"]["groups"]
    return with_optimizer(state, groups=[first | values, *others])


def with_optimizer(state: dict[str, Any], **values: Any) -> dict[str, Any]:
    return state | {"optimizer": state["optimizer"] | values}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with the checkpoints 8 and 9."""
    folder = tmp_path_factory.mktemp("whole")
    trainer(folder, **SAVE | {"save_total_limit": 2}).train()
    return folder


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A checkpoint without digests that a test may damage."""
    checkpoint = Path(shutil.copytree(whole / "checkpoint-8", tmp_path / "checkpoint-8"))
    make_old(checkpoint)
    return checkpoint


def test_a_training_goes_on_from_the_newest_checkpoint_that_is_whole(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for damage in ("weights", "shard", "optimizer", "state", "cut"):
        folder = Path(shutil.copytree(whole, tmp_path / damage))
        newest = folder / "checkpoint-9"
        assert last_checkpoint(folder, ALONE) == newest
        files = {
            "weights": newest / "model.safetensors.index.json",
            "shard": newest / "model-00002-of-00002.safetensors",
            "optimizer": newest / FOLDER / "optimizer-00001-of-00002.safetensors",
            "state": newest / FOLDER / STATE_FILE,
            "cut": newest / "model-00001-of-00002.safetensors",
        }
        if damage == "cut":
            files[damage].write_bytes(files[damage].read_bytes()[:-8])
        else:
            files[damage].unlink()
        assert last_checkpoint(folder, ALONE) == folder / "checkpoint-8", damage
        assert f"{files[damage]} is " in caplog.text
        assert "the older checkpoint-8 is used" in caplog.text
        # A newer directory that is no whole checkpoint does not push out the last whole one.
        caplog.clear()
        rotate(folder, 1)
        assert checkpoints(folder) == [folder / "checkpoint-8", newest]
        assert not caplog.text


# ---------------------------------------------------------------------- restaged


def test_stages_and_schedule_change_on_the_way(tmp_path: Path) -> None:
    """Two stages, then three with another schedule, then one: the weights of a run that kept its two."""
    # The gradient of a key's bias is nothing but rounding, which differs between the schedules. This
    # epsilon is above it, so Adam does not scale the rounding up to whole updates.
    settings = SAVE | {"max_steps": 6, "num_micro_batches": 4, "adam_epsilon": 1e-6}
    whole = trainer(tmp_path / "whole", num_stages=2, schedule="gpipe", **settings)
    whole.train()
    legs = [(2, "gpipe", 2), (3, "1f1b", 4), (1, "gpipe", 6)]
    for num_stages, schedule, last in legs:
        stages = {"num_stages": num_stages, "schedule": schedule}
        made = trainer(tmp_path / "run", callbacks=[StopAt(last)], **stages, **settings)
        assert made.train(resume_from_checkpoint=True).global_step == last
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(made)[name], tensor, rtol=0, atol=1e-5, msg=name)
