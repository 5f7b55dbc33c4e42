"""Six steps beside the plain Trainer in one process: losses, learning rates, gradient norms, evaluations, tokens.

Both read the rows in the same order, clip most steps and warm up; dropout is off, since the two draw other numbers.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_gpipe.data import PairCollator
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, Recorder, Rows, trainer

STEPS, TOLERANCE = 6, 1e-4
#: Encoder-decoders of transformers average over mini-batches what they accumulate, not over tokens.
ACCUMULATION = {"llama": 2, "marian": 1}
#: Every pair of values meets.
PIPELINES = [
    *(("llama", 1, 1, "gpipe"), ("llama", 2, 4, "1f1b"), ("llama", 3, 1, "1f1b")),
    *(("marian", 1, 4, "1f1b"), ("marian", 2, 1, "gpipe"), ("marian", 3, 4, "gpipe")),
]


def start(family: str) -> PreTrainedModel:
    return plain_model(tiny_config(family, tied=family == "marian"), dtype=torch.float32)


def dataset(family: str, count: int, seed: int) -> Any:
    return (CausalRows if family == "llama" else Rows)(count, seed)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Of the logits' best tokens, where there are targets; of generated tokens, their sum."""
    found, labels = prediction.predictions, prediction.label_ids
    if isinstance(found, tuple):
        found = found[0]
    if found.ndim == 2:
        return {"tokens": float(np.where(found > 0, found, 0).sum())}
    return {"accuracy": float((found.argmax(-1) == labels)[labels != -100].mean())}


def options(family: str) -> dict[str, Any]:
    return {
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": ACCUMULATION[family],
        "learning_rate": 5e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "use_cpu": True,
        "predict_with_generate": family == "marian",
        "generation_max_length": 8,
    }


@lru_cache
def reference(family: str) -> tuple[list[dict[str, Any]], Any]:
    """What the plain Trainer logs, and what its model predicts at the end."""
    recorder = Recorder()
    plain = Seq2SeqTrainer(
        start(family),
        Seq2SeqTrainingArguments(output_dir=mkdtemp(), report_to="none", disable_tqdm=True, **options(family)),
        data_collator=PairCollator(pad_token_id=0),
        train_dataset=dataset(family, 44, 0),
        eval_dataset=dataset(family, 8, 1),
        compute_metrics=accuracy,
        callbacks=[recorder],
    )
    plain.train()
    return recorder.logs, plain.predict(dataset(family, 8, 2)).predictions


@pytest.mark.parametrize(("family", "num_stages", "num_micro_batches", "schedule"), PIPELINES)
def test_the_plain_trainer_s_trajectory(
    family: str, num_stages: int, num_micro_batches: int, schedule: str, tmp_path: Path
) -> None:
    expected, predictions = copy.deepcopy(reference(family))
    recorder = Recorder()
    made = trainer(
        tmp_path,
        model=start(family),
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        recompute="stage" if num_stages == 2 else "none",
        train_dataset=dataset(family, 44, 0),
        eval_dataset=dataset(family, 8, 1),
        compute_metrics=accuracy,
        callbacks=[recorder],
        **options(family),
    )
    made.train()
    assert len(recorder.logs) == len(expected) == STEPS + 2 + 1
    compared = 0
    for found, wanted in zip(recorder.logs, expected, strict=True):
        for name in ("loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "eval_accuracy", "eval_tokens"):
            assert (name in found) == (name in wanted), name
            if name in wanted:
                compared += 1
                assert found[name] == pytest.approx(wanted[name], abs=TOLERANCE), name
    assert compared > 4 * STEPS
    predicted = made.predict(dataset(family, 8, 2))
    found_predictions = predicted.predictions
    if family == "marian":
        width = found_predictions.shape[1]
        np.testing.assert_array_equal(found_predictions, predictions[:, :width])
    else:
        theirs = predictions[0] if isinstance(predictions, tuple) else predictions
        is_target = predicted.label_ids != -100
        np.testing.assert_allclose(found_predictions[is_target], theirs[is_target], atol=1e-2)
