"""Training with PipeDream's schedules: windows, updates stage by stage, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.errors import RecipeError, UserError
from hf_gpipe.recipe import load_recipe
from tests.gloo import run_gloo
from tests.oracle import tiny_config
from tests.test_asynchronous import CASES, check
from tests.training.toy import CausalRows, Recorder, trainer, weights

STEPS, RATE, MAX_NORM = 10, 1e-2, 0.5
CONFIG = tiny_config("llama", tied=False, dropout=0.1)


def make(folder: Path, **values: Any) -> PipelineTrainer:
    common: dict[str, Any] = {
        "model": CONFIG,
        "train_dataset": CausalRows(24),
        "train_sampling_strategy": "sequential",
        "num_stages": 3,
        "num_micro_batches": 1,
        "schedule": "pipedream",
        "max_steps": STEPS,
        "learning_rate": RATE,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "logging_steps": 4,
        "save_strategy": "steps",
        "save_steps": 6,
    }
    return trainer(folder, family="llama", **common | values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PipelineTrainer, Recorder, Path]:
    folder, recorder = tmp_path_factory.mktemp("trained"), _Windows()
    made = make(folder, callbacks=[recorder])
    recorder.pipe = made.pipe
    made.train()
    return made, recorder, folder


class _Windows(TrainerCallback):
    """Notes the steps of each window and the logs."""

    pipe: Pipeline

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.logs: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.pipe.window is not None
        self.sizes[self.pipe.step] = self.pipe.window.num_steps

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_every_stage_has_the_rates_and_the_clipping_of_its_own_steps(
    trained: tuple[PipelineTrainer, _Windows, Path],
) -> None:
    made, recorder, _ = trained
    # Logs at 4 and 8, a checkpoint at 6, where the first epoch ends too.
    assert recorder.sizes == {4: 4, 6: 2, 8: 2, 10: 2}
    pipe = Pipeline(CONFIG, 3, 1, "pipedream", seed=made.args.seed)
    loader = made.train_batches()
    assert loader is not None
    batches = [batch for epoch in range(2) for batch in loader.epoch(epoch)]
    optimizers = {stage: torch.optim.AdamW(model.parameters.values()) for stage, model in pipe.models.items()}
    losses = []
    for first, last in [(0, 4), (4, 6), (6, 8), (8, 10)]:

        def update(stage: int, step: int, norm: torch.Tensor, first: int = first) -> None:
            pipe.clip_stage_grad_norm_(stage, MAX_NORM, norm)
            (group,) = optimizers[stage].param_groups
            group |= {"lr": RATE * (STEPS - first - step) / STEPS, "weight_decay": 0.0}
            optimizers[stage].step()

        losses += pipe.train_window([[batch] for batch in batches[first:last]], update)[:, 0].tolist()
    found = weights(made)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-6, msg=name)
    logged = [logs for logs in recorder.logs if "loss" in logs]
    assert [logs["loss"] for logs in logged] == pytest.approx([sum(losses[:4]) / 4, sum(losses[4:8]) / 4], abs=1e-5)
    # 0, 1 and 2 updates late once a window is filled: of 4 and of 2 steps.
    assert [logged[0][f"staleness_stage_{stage}"] for stage in range(3)] == [5 / 4, 3 / 4, 0]
    assert [logged[1][f"staleness_stage_{stage}"] for stage in range(3)] == [1 / 2, 1 / 2, 0]
    assert logged[0]["stash_bytes"] > logged[1]["stash_bytes"] > 0
    assert logged[0]["learning_rate"] == pytest.approx(RATE * 7 / STEPS)


def _train_and_check(folder: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Only the main process has data. Two windows besides: with one stage in each process, and with two."""
    recorder = _Windows()
    made = make(Path(folder), callbacks=[recorder])
    recorder.pipe = made.pipe
    if not made.world.is_main:
        made.train_dataset = None
    made.train()
    for case in (CASES[1], CASES[7]):
        check(*case)
    return weights(made), recorder.logs


def test_two_processes_do_the_same(trained: tuple[PipelineTrainer, _Windows, Path], tmp_path: Path) -> None:
    made, recorder, _ = trained
    expected = weights(made)
    for found, logs in run_gloo(_train_and_check, 2, str(tmp_path)):
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-6, msg=name)
        for ours, theirs in zip(logs, recorder.logs, strict=True):
            assert ours.keys() == theirs.keys()
            for name in {"loss", "grad_norm", "staleness_stage_0", "learning_rate"} & theirs.keys():
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_a_run_resumes_from_a_window_s_end_bit_for_bit(
    trained: tuple[PipelineTrainer, _Windows, Path], tmp_path: Path
) -> None:
    made, _, folder = trained
    expected = weights(made)
    again = make(tmp_path)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    for name, parameter in weights(again).items():
        assert torch.equal(parameter, expected[name]), name
    other = make(tmp_path, num_stages=2, num_micro_batches=2, schedule="pipedream_2bw")
    other.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    assert other.state.global_step == STEPS


class _Updated(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


class _Another(torch.optim.SGD):
    """Not known to treat each parameter alone."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"on_nonfinite_loss": "skip"}, "on_nonfinite_loss is skip and the schedule is 'pipedream'"),
        ({"callbacks": [_Updated]}, "the callback _Updated has on_optimizer_step"),
        ({"fp16": True}, "fp16 is true and the schedule is 'pipedream'"),
    ],
)
def test_what_needs_all_stages_before_an_update_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, **values).train()


def test_an_optimizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    pipe = Pipeline(CONFIG, 2, 1, "pipedream")
    optimizer = _Another(pipe.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(UserError, match=r"the schedule is 'pipedream' and the optimizer is .*_Another"):
        make(tmp_path, model=pipe, num_stages=2, optimizers=(optimizer, scheduler)).train()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.fp16=true", "training.fp16 is true and pipeline.schedule is pipedream"),
        ("training.on_nonfinite_loss=skip", "training.on_nonfinite_loss is skip and pipeline.schedule is pipedream"),
    ],
)
def test_a_recipe_that_asks_for_it_is_refused_before_anything_starts(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(Path("recipes/quickstart.yaml"), ["pipeline.schedule=pipedream", override])
