"""Trainers of TRL's tasks on iterable datasets: the numbers are those of the same rows in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from hf_gpipe import (
    PipelineDPOTrainer,
    PipelineEmbeddingConfig,
    PipelineEmbeddingTrainer,
    PipelineKTOConfig,
    PipelineKTOTrainer,
    PipelineRewardConfig,
    PipelineRewardTrainer,
    PipelineSFTTrainer,
)
from hf_gpipe.data import stream
from hf_gpipe.errors import DataError, UserError
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import plain_model
from tests.trainers import test_dpo, test_kto, test_sft
from tests.training.toy import weights

LORA: dict[str, Any] = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)}
_ARGUMENTS: dict[str, Any] = {
    **{"num_stages": 2, "num_micro_batches": 2, "schedule": "gpipe", "recompute": "none", "partition": "count"},
    **{"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd", "use_cpu": True},
    **{"logging_steps": 1, "save_strategy": "no", "report_to": "none"},
}


def _other(cls: Callable[..., Any]) -> Callable[..., Any]:
    return lambda folder, **values: cls(output_dir=str(folder), **_ARGUMENTS | values)


#: Task -> its trainer, the function that makes its arguments, rows, and options of the trainer.
TASKS: dict[str, tuple[Any, Callable[..., Any], Callable[[], list[dict[str, Any]]], dict[str, Any]]] = {
    "sft": (PipelineSFTTrainer, test_sft.arguments, test_sft.rows, {}),
    "messages": (PipelineSFTTrainer, test_sft.arguments, lambda: test_sft.rows("messages"), {}),
    "orpo": (
        PipelineDPOTrainer,
        lambda folder, **values: test_dpo.arguments(folder, loss_type="orpo", **values),
        test_dpo.rows,
        {},
    ),
    "dpo": (PipelineDPOTrainer, test_dpo.arguments, test_dpo.rows, LORA),
    "dpo of all weights": (PipelineDPOTrainer, test_dpo.arguments, test_dpo.rows, {}),
    "dpo beside another model": (
        PipelineDPOTrainer,
        test_dpo.arguments,
        test_dpo.rows,
        {"ref_model": plain_model(test_dpo.config(), seed=3)},
    ),
    "kto of all weights": (PipelineKTOTrainer, _other(PipelineKTOConfig), lambda: test_kto.rows(24), {}),
    "kto": (PipelineKTOTrainer, _other(PipelineKTOConfig), lambda: test_kto.rows(24), LORA),
    "reward": (PipelineRewardTrainer, _other(PipelineRewardConfig), test_dpo.rows, {}),
    "embeddings": (
        PipelineEmbeddingTrainer,
        _other(PipelineEmbeddingConfig),
        lambda: [{"anchor": row["prompt"], "positive": row["chosen"]} for row in test_dpo.rows()],
        {},
    ),
}


def made(task: str, folder: Path | str, as_stream: bool, **values: Any) -> Any:
    cls, arguments, rows, options = TASKS[task]
    dataset = Dataset.from_list(rows())
    values = {"train_sampling_strategy": "sequential", **values}
    processing = test_sft.chat_tokenizer() if task == "messages" else tokenizer()
    return cls(
        test_dpo.config(),
        args=arguments(Path(folder), **values),
        train_dataset=dataset.to_iterable_dataset() if as_stream else dataset,
        eval_dataset=dataset.select(range(5)).to_iterable_dataset() if as_stream else dataset.select(range(5)),
        processing_class=processing,
        **options,
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_trains_and_evaluates_as_its_rows_in_a_list(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterable dataset was an error for every task of TRL's, and later where all weights were trained beside a
    reference, whose log-probabilities must then be computed in each step."""
    monkeypatch.setattr(stream, "_BLOCK_ROWS", 5)
    listed, streamed = (made(task, tmp_path / str(kind), kind) for kind in (False, True))
    listed.train()
    streamed.train()
    for name, tensor in weights(listed).items():
        assert torch.equal(tensor, weights(streamed)[name]), name
    assert streamed.evaluate()["eval_loss"] == listed.evaluate()["eval_loss"]


def _trained(folder: str, resumes: bool) -> dict[str, torch.Tensor]:
    one = made("sft", folder, True, max_steps=9, save_strategy="steps", save_steps=4)
    one.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resumes else None)
    return weights(one)


def test_a_training_on_a_stream_resumes_exactly_also_on_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_BLOCK_ROWS", 5)
    whole, resumed = (_trained(str(tmp_path), resumes) for resumes in (False, True))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    for together in run_gloo(_trained, 2, str(tmp_path / "two"), False):
        for name, tensor in together.items():
            torch.testing.assert_close(tensor, whole[name])


class Numbers:
    """A stream of numbers without a state, which notes its epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_block_may_give_other_examples_than_it_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_BLOCK_ROWS", 4)
    firsts: list[bool] = []

    def encode(block: stream.Block) -> list[int]:
        firsts.append(block.is_first)
        return [number for number in block if number % 5 in (0, 1, 4) and not 4 <= number < 8]

    numbers = Numbers()
    examples = stream.encoded_stream(numbers, encode)
    examples.set_epoch(3)
    assert [*examples] == [*examples] == [0, 1, 9]
    assert (numbers.epoch, firsts) == (3, [True, *[False] * 5])
    assert not hasattr(examples, "state_dict")


def test_a_state_is_the_place_after_each_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of which no example, or more examples than rows, are left are among them."""
    monkeypatch.setattr(stream, "_BLOCK_ROWS", 3)
    rows = Dataset.from_list([{"number": number} for number in range(20)])

    def examples() -> Any:
        def encode(block: stream.Block) -> list[int]:
            return [row["number"] for row in block for _ in range(row["number"] % 3) if not 6 <= row["number"] < 9]

        return stream.encoded_stream(rows.to_iterable_dataset(), encode)

    whole = [*examples()]
    one = examples()
    reading, states = iter(one), [one.state_dict()]
    for _ in whole:
        next(reading)
        states.append(one.state_dict())
    for number, state in enumerate(states):
        other = examples()
        other.load_state_dict(state)
        assert [*other] == whole[number:]
        assert [*other] == whole, "a later iteration begins anew"


def test_streams_that_cannot_be_trained_on_are_told(tmp_path: Path) -> None:
    args = test_dpo.arguments(tmp_path, precompute_ref_log_probs=True)
    rows = Dataset.from_list(test_dpo.rows()).to_iterable_dataset()
    with pytest.raises(UserError, match="precompute_ref_log_probs=True is not supported with IterableDataset"):
        PipelineDPOTrainer(test_dpo.config(), args=args, train_dataset=rows, processing_class=tokenizer())
    with pytest.raises(DataError, match="an iterator, which can be read once; give a map-style or iterable dataset"):
        PipelineDPOTrainer(test_dpo.config(), args=args, train_dataset=iter(rows), processing_class=tokenizer())
    with pytest.raises(UserError, match="max_steps: the training dataset has no length"):
        made("sft", tmp_path, True, max_steps=-1, num_train_epochs=1).train()
