"""`PipelineTrainer` on image classifiers and on chains of one's own, beside transformers' Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import EvalPrediction, Trainer, TrainingArguments

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.planner.report import report
from tests.image_families import EXACT, classifier
from tests.training.toy import Recorder, arguments


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Images, each with a bright quarter that its class names, and a column that no model reads."""

    def __init__(self, count: int = 12, size: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (count,), generator=generator).tolist()
        self.pixels = torch.randn(count, 3, size, size, generator=generator, dtype=torch.float64)
        for pixels, label in zip(self.pixels, self.labels, strict=True):
            pixels[:, : size // 2, label * (size // 4) :] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[index], "label": self.labels[index], "name": f"{index}.png"}


class Own(nn.Module):
    """A chain that takes the columns of `Images`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU())
        self.body, self.head = nn.Linear(256, 8), nn.Linear(8, 3)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.stem(pixel_values).flatten(1)).relu())
        return logits


def metrics(prediction: EvalPrediction) -> dict[str, float]:
    classes = prediction.predictions.argmax(-1)
    return {"accuracy": float((classes == prediction.label_ids).mean()), "pixels": float(prediction.inputs.sum())}


OF_BOTH: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "include_for_metrics": ["inputs"], "seed": 3}
OF_BOTH["train_sampling_strategy"] = "sequential"


@pytest.mark.parametrize(("family", "precision"), [("ResNet", ""), ("ViT", ""), ("ResNet", "bf16")])
def test_a_training_is_that_of_transformers(family: str, precision: str, tmp_path: Path) -> None:
    """One micro-batch is the whole mini-batch, by whose statistics a BatchNorm then normalises in both."""
    model = classifier(family, EXACT[family])
    given: dict[str, Any] = {**OF_BOTH}
    if precision:
        model, given = model.float(), {**given, precision: True}
    rel, held_out, others = (1e-3 if precision else 1e-6), Images(5, seed=1), Images(7, seed=2)
    for one in (rows := Images(), held_out, others):
        one.pixels = one.pixels.to(model.dtype)
    logs = Recorder()
    plain_args: dict[str, Any] = {
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "use_cpu": True,
    }
    plain_args |= {"save_strategy": "no", "report_to": []}
    common: dict[str, Any] = {"train_dataset": rows, "eval_dataset": held_out, "compute_metrics": metrics}
    plain = Trainer(
        copy.deepcopy(model),
        TrainingArguments(
            str(tmp_path / "plain"),
            per_device_train_batch_size=4,
            **plain_args,
            **given,
        ),
        callbacks=[expected := Recorder()],
        **common,
    )
    plain.train()
    args = arguments(tmp_path / "own", num_micro_batches=1, schedule="1f1b", recompute="none", **given)
    trainer = PipelineTrainer(model, args, callbacks=[logs], **common)
    trainer.train()
    assert len(trainer.pipe.partition) == 2
    np.testing.assert_allclose(logs.losses, expected.losses, rtol=rel)
    for one, other in zip(logs.logs, expected.logs, strict=True):
        for name in {"eval_loss", "eval_accuracy", "eval_pixels", "grad_norm"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=rel), name
    assert trainer.state.total_flos == plain.state.total_flos
    found = trainer.predict(others)
    predicted = plain.predict(others)
    np.testing.assert_allclose(found.predictions, predicted.predictions, rtol=10 * rel, atol=rel / 100)
    assert (found.label_ids == predicted.label_ids).all()
    assert "rows_per_second" in trainer.state.log_history[0]


@pytest.mark.parametrize("make", [Own, lambda: classifier("ResNet", EXACT["ResNet"])])
def test_a_run_goes_on_with_other_stages(make: Any, tmp_path: Path) -> None:
    def run(folder: str, num_stages: int, **values: Any) -> PipelineTrainer:
        values |= {"recompute": "block", "lr_scheduler_type": "constant"}
        torch.manual_seed(0)
        args = arguments(tmp_path / folder, num_stages=num_stages, **values)
        trainer = PipelineTrainer(make().double(), args, train_dataset=Images())
        trainer.train(resume_from_checkpoint=bool(values.get("save_steps")))
        return trainer

    whole = run("whole", 2)
    run("parts", 2, save_strategy="steps", save_steps=3, max_steps=3)
    resumed = run("parts", 3, save_strategy="steps", save_steps=3)
    expected = {**dict(whole.model.named_parameters()), **dict(whole.model.named_buffers())}
    for name, tensor in {**dict(resumed.model.named_parameters()), **dict(resumed.model.named_buffers())}.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12), name
    copied = copy.deepcopy(resumed.model).train()
    before = [buffer.clone() for buffer in copied.buffers()]
    copied(Images().pixels)
    assert not any(torch.equal(*pair) for pair in zip(copied.buffers(), before, strict=True))


def test_a_plan_from_the_first_row(tmp_path: Path) -> None:
    auto = dict.fromkeys(("num_micro_batches", "schedule", "recompute", "partition"), "auto")
    trainer = PipelineTrainer(Own().double(), arguments(tmp_path, **auto), train_dataset=Images())
    assert "num_micro_batches" in str(trainer.pipe.planned)
    plan = trainer.pipe.plan()
    assert "4 rows of pixel_values (3, 32, 32), as" in report(plan)
    assert plan.costs.total.count == sum(parameter.numel() for parameter in Own().parameters())


def test_what_a_chain_does_not_take(tmp_path: Path) -> None:
    for values in ({"batch_tokens": 9}, {"neftune_noise_alpha": 5.0}, {"train_sampling_strategy": "group_by_length"}):
        with pytest.raises(UserError, match=f"{next(iter(values))}.*: Own is no Hugging Face model that reads text"):
            PipelineTrainer(Own().double(), arguments(tmp_path, **values), train_dataset=Images())
    with pytest.raises(UserError, match="predict_with_generate=True: Own is no Hugging Face model that reads text"):
        PipelineTrainer(Own().double(), arguments(tmp_path, predict_with_generate=True), train_dataset=Images())
    with pytest.raises(DataError, match=r"columns .*pixel_values.*, and none that the model takes; name them as"):
        PipelineTrainer(nn.Sequential(nn.Flatten(), nn.Linear(3072, 3)), arguments(tmp_path), train_dataset=Images())
    with pytest.raises(UserError, match="give example="):
        PipelineTrainer(Own(), arguments(tmp_path), train_dataset=(row for row in Images()))
    pipe = Pipeline(Own(), 2, 1, example={"pixel_values": torch.zeros(2, 3, 32, 32), "labels": torch.zeros(2).long()})
    with pytest.raises(UserError, match="Own is no Hugging Face model that reads text"):
        pipe.model.generate(torch.zeros(1, 1))
