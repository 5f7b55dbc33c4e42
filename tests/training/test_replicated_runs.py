"""The trainer with replicas of stages: the losses, predictions and files of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import EvalPrediction

from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.test_evaluating import Completions, sharp
from tests.training.test_mixed_precision import in_bfloat16
from tests.training.toy import CausalRows, Recorder, Rows, StopAt, trainer

Replicas = int | Sequence[int]

#: The stages and replicas of so many processes, and the processes that divide the layers of a stage.
MESHES: dict[int, tuple[tuple[int, Replicas, int], ...]] = {
    3: ((2, (2, 1), 1),),
    4: ((2, 2, 1), (2, 1, 2)),
}
NUM_STEPS = 6
SHORT = {"encoder_layers": 1, "decoder_layers": 1}
#: Of those, what each mesh trains; the next test trains all.
COMPARED = 3


def losses_of(
    folder: str, num_stages: int, replicas: Replicas, stop_at: int = NUM_STEPS, **options: Any
) -> list[float]:
    """Of each step; dropout depends on seed, step, micro-batch and layer alone, so it is everywhere the same."""
    recorder, config = Recorder(), tiny_config("marian", dropout=0.1, **SHORT)
    config._attn_implementation = "eager"  # whose masks of dropout can be divided
    made = trainer(
        Path(folder),
        model=config,
        callbacks=[recorder, StopAt(stop_at)],
        num_stages=num_stages,
        replicas=replicas,
        max_steps=NUM_STEPS,
        gradient_accumulation_steps=2,
        **options,
    )
    made.train(resume_from_checkpoint=True)
    return recorder.losses


def predictions_of(folder: str, num_stages: int, replicas: Replicas, **options: Any) -> list[Any]:
    """Logits, a part of them, and generated tokens, each with the metrics; rows of unequal length, a last one alone."""
    common: dict[str, Any] = {
        "num_stages": num_stages,
        "replicas": replicas,
        "num_micro_batches": 3,
        "per_device_eval_batch_size": 3,
        "compute_metrics": metrics_of,
        **options,
    }
    marian = plain_model(tiny_config("marian", **SHORT), dtype=torch.float32)
    whole = trainer(Path(folder), model=marian, include_for_metrics=["inputs", "loss"], **common)
    parts = trainer(
        Path(folder),
        model=marian,
        eval_do_concat_batches=False,
        preprocess_logits_for_metrics=lambda logits, labels: (logits.argmax(-1), logits.logsumexp(-1).mean(-1)),
        **common | {"compute_metrics": None},
    )
    tokens = trainer(Path(folder), model=sharp("llama"), predict_with_generate=True, generation_max_length=12, **common)
    found: list[Any] = [one.predict(Rows(7, seed=3)) for one in (whole, parts)]
    return [*found, tokens.predict(Completions(7, seed=4)), whole.evaluate(Rows(7, seed=3))]


def metrics_of(prediction: EvalPrediction) -> dict[str, float]:
    """Numbers that depend on the order of the rows."""
    order = np.arange(1, 1 + len(prediction.label_ids))
    is_target = prediction.label_ids != -100
    labels = (np.where(is_target, prediction.label_ids, 0).sum(axis=1) * order).sum()
    values = prediction.predictions.reshape(len(order), -1)
    return {"labels": float(labels), "predictions": float((values.max(axis=1) * order).sum())}


def float32_copies_of(folder: str, replicas: Replicas) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a model in bfloat16 whose updates are made in float32, and the float32 weights."""
    recorder = Recorder()
    made = trainer(
        Path(folder),
        model=in_bfloat16(),
        train_dataset=CausalRows(),
        fp32_master_weights=True,
        num_stages=1,
        replicas=replicas,
        callbacks=[recorder],
    )
    made.train()
    assert made.master_weights is not None
    return recorder.losses, made.master_weights.copies


def test_replicas_have_the_same_float32_weights(tmp_path: Path) -> None:
    losses, copies = float32_copies_of(str(tmp_path / "one"), 1)
    (first, ours), (second, theirs) = run_gloo(float32_copies_of, 2, str(tmp_path), 2)
    assert first == second == pytest.approx(losses, rel=2e-3), "gradients of bfloat16 are rounded differently"
    assert ours.keys() == theirs.keys() == copies.keys()
    assert all(torch.equal(copy, theirs[name]) for name, copy in ours.items())


def of_mesh(
    folder: str, num_stages: int, replicas: Replicas, size: int = 1, stop_at: int = NUM_STEPS
) -> tuple[list[float], list[Any]]:
    options: dict[str, Any] = {"tensor_parallel": size} if size > 1 else {}
    losses = losses_of(folder, num_stages, replicas, stop_at, **options)
    return losses, predictions_of(folder, num_stages, replicas, **options)


def of_meshes(folder: str, meshes: Sequence[tuple[int, Replicas, int]]) -> list[tuple[list[float], list[Any]]]:
    return [of_mesh(f"{folder}/{number}", *mesh, stop_at=COMPARED) for number, mesh in enumerate(meshes)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[Any]]:
    return of_mesh(str(tmp_path_factory.mktemp("one")), 1, 1)


@pytest.mark.parametrize("num_processes", MESHES)
def test_losses_and_predictions_are_those_of_one_process(
    num_processes: int, expected: tuple[list[float], list[Any]], tmp_path: Path
) -> None:
    processes = run_gloo(of_meshes, num_processes, str(tmp_path), MESHES[num_processes])
    for losses, (whole, parts, tokens, metrics) in (mesh for of_process in processes for mesh in of_process):
        assert losses == pytest.approx(expected[0][:COMPARED], abs=1e-6)
        assert len(losses) == COMPARED
        plain_whole, plain_parts, plain_tokens, plain_metrics = expected[1]
        np.testing.assert_allclose(whole.predictions, plain_whole.predictions, atol=1e-5)
        np.testing.assert_array_equal(whole.label_ids, plain_whole.label_ids)
        for mini_batch, plain in zip(parts.predictions, plain_parts.predictions, strict=True):
            for kept, wanted in zip(mini_batch, plain, strict=True):
                np.testing.assert_allclose(kept, wanted, atol=1e-5)
        np.testing.assert_array_equal(tokens.predictions, plain_tokens.predictions)
        for found, wanted in ((whole, plain_whole), (tokens, plain_tokens)):
            assert_same_metrics(found.metrics, wanted.metrics)
        assert_same_metrics(metrics, plain_metrics)


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    kept = [name for name in expected if name.endswith(("_loss", "_labels", "_predictions"))]
    assert len(kept) == 3
    assert {name: found[name] for name in kept} == pytest.approx({name: expected[name] for name in kept}, rel=1e-5)


def test_a_run_goes_on_with_other_replicas_and_divided_layers(
    expected: tuple[list[float], list[Any]], tmp_path: Path
) -> None:
    losses: list[float] = []
    last: Replicas
    meshes = ((2, 1, 1, 2, 2), (2, 1, 2, 1, 4), (4, 1, 2, 2, 5))
    for processes, num_stages, last, size, stop in meshes:
        found = run_gloo(go_on, processes, str(tmp_path), num_stages, last, stop, size)
        assert found[1:] == found[:1] * (processes - 1)
        losses += found[0]
    losses += losses_of(str(tmp_path), 1, 1, save_strategy="steps", save_steps=NUM_STEPS)
    assert losses == pytest.approx(expected[0], abs=1e-5)
    made = trainer(tmp_path / "again", model=str(tmp_path / "checkpoint-5"))
    made.save_model(str(tmp_path / "again"))
    found, wanted = (tensors_of(tmp_path / name) for name in ("again", "checkpoint-5"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in directory.glob("*.safetensors") for name, one in load_file(path).items()}


def go_on(folder: str, num_stages: int, replicas: Replicas, stop: int, size: int) -> list[float]:
    """Train on from the last checkpoint, if there is one, and stop after some steps, as if the job had ended."""
    saving = {"save_strategy": "steps", "save_steps": stop}
    zero = int(size > 1 and replicas != 1)
    return losses_of(folder, num_stages, replicas, **saving, stop_at=stop, tensor_parallel=size, zero=zero)
