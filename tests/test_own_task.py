"""A task of your own is one file: a recipe names it, and trains and evaluates by it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

import hf_gpipe.tasks
from hf_gpipe import Pipeline
from hf_gpipe.data import ExampleCollator
from hf_gpipe.errors import DataError, RecipeError, UserError
from hf_gpipe.from_recipe import job
from hf_gpipe.job.job import Job
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.tasks.kto import KTOLoss
from tests.data.chat_templates import tokenizer
from tests.trainers.test_dpo import config

TASK = '''"""Answers that count by the weights of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_gpipe.data.encoded import EncodedRows
from hf_gpipe.data.fields import text_in
from hf_gpipe.data.rows import ReadRow
from hf_gpipe.errors import DataError
from hf_gpipe.from_recipe.tasks import Task
from hf_gpipe.losses.loss import LossInputs, Reads
from hf_gpipe.losses.noting import NotingLoss
from hf_gpipe.settings.section import Positive, Settings
from hf_gpipe.trainers.arguments import ModelArguments, TaskArguments
from hf_gpipe.trainers.trainer import TaskTrainer


def weighed_of(where: str, row: Mapping[str, Any]) -> dict[str, Any]:
    weight = row.get("weight")
    if not isinstance(weight, int | float):
        raise DataError(f"{where}: 'weight' is {weight!r}; it must be a number")
    return {**{name: text_in(row, name, where) for name in ("prompt", "completion")}, "weight": float(weight)}


class WeighedExamples(EncodedRows):
    _name, columns, _numbers = "weighed", ("prompt_ids", "completion_ids", "weight"), ("weight",)
    read = staticmethod(weighed_of)

    def encode(self, read: ReadRow) -> Any:
        prompt, answer = (self._tokenizer.encode(read.row[name]) for name in ("prompt", "completion"))
        return prompt, answer, [read.row["weight"]]


class WeighedOptions(Settings):
    """How answers count."""

    power: Positive = 1.0
    """Power of the weights."""


class WeighedLoss(NotingLoss):
    options = WeighedOptions()
    metrics, reads, entries = ("logps",), Reads.ROWS, ("weight",)

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        self._note(read.log_probs)
        return -(read.inputs["weight"].to(read.log_probs) ** self.options.power) * read.log_probs


@dataclass
class WeighedConfig(ModelArguments, TaskArguments):
    _loss = WeighedLoss


class WeighedTrainer(TaskTrainer):
    _arguments, examples = WeighedConfig, WeighedExamples


class _Weighed(Task):
    items, evaluating, trainer = "answers", "weighing the answers", WeighedTrainer


TASK = _Weighed()
'''
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{number} and {number}?", "completion": f"{2 * number}{' more' * (number % 3)}", "weight": 0.5 * number}
    for number in range(8)
]


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "weighed.py").write_text(TASK, encoding="utf-8")
    hf_gpipe.tasks.__path__.append(str(folder))
    try:
        yield import_module("hf_gpipe.tasks.weighed")
    finally:
        hf_gpipe.tasks.__path__.remove(str(folder))
        sys.modules.pop("hf_gpipe.tasks.weighed")


def plain_model() -> LlamaForCausalLM:
    made = config()
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    return LlamaForCausalLM(made).double().train()


def losses_of(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], power: float = 1.0) -> torch.Tensor:
    """-w log p(y|x) of each row, by a plain model."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    nll = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return batch["weight"].to(nll) ** power * nll.sum(1)


def test_its_loss_and_every_gradient_are_a_plain_loop_s(weighed: Any) -> None:
    assert TASK.count("\n") <= 80
    batch = ExampleCollator(0)(list(weighed.WeighedExamples(ROWS, tokenizer())))
    plain = plain_model()
    expected = losses_of(plain, batch, 2.0).mean()
    expected.backward()
    pipe = Pipeline(copy.deepcopy(plain), 2, 3, loss=weighed.WeighedLoss(power=2.0))
    assert float(pipe.train_step(batch)) == pytest.approx(expected.item(), abs=1e-10)
    for name, parameter in pipe.named_parameters():
        wanted = dict(plain.named_parameters())[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-10, msg=name)


def test_a_recipe_names_it(weighed: Any, tmp_path: Path) -> None:
    """The report of held-out rows is the loss with its metrics. The options of its loss could not be given."""
    plain_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    text = (
        f"model: {{path: {tmp_path / 'model'}, dtype: float64, attn_implementation: eager}}\n"
        f"data: {{kind: weighed, path: {rows}, validation_fraction: 0.0, test_fraction: 0.5}}\n"
        f"training: {{output_dir: {tmp_path / 'out'}, max_steps: 2, batch_size: 2, save_steps: null}}\n"
        "pipeline: {num_stages: 2, num_micro_batches: 2}\n"
        "weighed: {power: 2.0}\n"
    )
    recipe = parse_recipe(text)
    assert parse_recipe(recipe.to_yaml()) == recipe
    job.run(recipe, Job.current())
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    test = weighed.TASK.corpus(recipe).test
    batch = ExampleCollator(0)(list(weighed.WeighedExamples(test, tokenizer())))
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        expected, log_probs = losses_of(trained, batch, 2.0), -losses_of(trained, batch, 0.0)
    found = {name: metrics[name] for name in ("task", "num_rows", "loss", "logps")}
    assert found == {
        "task": "weighed",
        "num_rows": len(test),
        "loss": pytest.approx(float(expected.mean()), abs=1e-8),
        "logps": pytest.approx(float(log_probs.mean()), abs=1e-8),
    }
    rows.write_text(json.dumps({**ROWS[0], "weight": "much"}))
    with pytest.raises(DataError, match="line 1: 'weight' is 'much'; it must be a number"):
        job.run(recipe, Job.current())
    for kind, message in (
        ("weighed, max_number: 3", r"data.max_number is 3 .* and data.kind is weighed"),
        ("weigh", r"data.kind: found 'weigh' .*, expected 'cldr', "),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe(text.replace("weighed: {power: 2.0}", "").replace("kind: weighed", f"kind: {kind}"))
    for wrong, message in (
        ("weighed.power=0.0", r"weighed.power: found 0.0 \(a number\), expected a number above 0"),
        ("weighed.powers=1.0", r"weighed.powers is not a key of a recipe"),
    ):
        with pytest.raises(RecipeError, match=message):
            parse_recipe(text, [wrong])
    without = text.replace("weighed: {power: 2.0}", "")
    with pytest.raises(UserError, match=r"data.kind is distil, and the module hf_gpipe.tasks.distil has no TASK; name"):
        parse_recipe(without.replace("kind: weighed", "kind: distil"))


def test_its_trainer_has_the_arguments_of_its_loss(weighed: Any, tmp_path: Path) -> None:
    """An option of a loss was declared a second time for the arguments, and a third time for recipes."""
    known = weighed.WeighedConfig.__dataclass_fields__["power"]
    assert (known.default, known.metadata["help"]) == (1.0, "Power of the weights.")
    with pytest.raises(UserError, match=r"power: found -1.0 \(a number\), expected a number above 0"):
        weighed.WeighedConfig(output_dir=str(tmp_path), num_stages=2, power=-1.0, use_cpu=True)
    args = weighed.WeighedConfig(output_dir=str(tmp_path), num_stages=2, num_micro_batches=2, max_steps=1, power=2.0)
    args.per_device_train_batch_size, args.bf16, args.use_cpu = 4, False, True
    trainer = weighed.WeighedTrainer(plain_model(), args, train_dataset=ROWS, processing_class=tokenizer())
    assert trainer.pipe.loss == weighed.WeighedLoss(power=2.0)
    trainer.train()
    assert trainer.state.log_history[-1]["step"] == 1
    pipe = Pipeline(plain_model(), 2, 2, loss=weighed.WeighedLoss())
    # The core named the entries of every loss.
    of_any = {*Pipeline(plain_model(), 2, 2).adapter.loss_keys}
    assert {*pipe.adapter.loss_keys} - of_any == {"weight"}
    assert {*Pipeline(plain_model(), 2, 2, loss=KTOLoss()).adapter.loss_keys} - of_any == {"desirable", "kl"}
    with pytest.raises(UserError, match="the given Pipeline has the loss WeighedLoss"):
        weighed.WeighedTrainer(pipe, args, train_dataset=ROWS, processing_class=tokenizer())
