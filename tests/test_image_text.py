"""Models of images and text in stages: loss, gradients and files are the plain model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_gpipe import Pipeline
from hf_gpipe.errors import DataError, UserError
from tests import oracle
from tests.gloo import run_gloo
from tests.image_text_families import FAMILIES, NUM_IMAGES, batch_of, clone, parts_of, run_plain

#: K, M and options, in turn.
CASES: list[dict[str, Any]] = [
    {"num_stages": 1, "num_micro_batches": 1, "schedule": "gpipe", "recompute": "none"},
    {"num_stages": 2, "num_micro_batches": 3, "schedule": "1f1b", "recompute": "stage"},
    {"num_stages": 3, "num_micro_batches": 2, "schedule": "gpipe", "recompute": "block"},
    {"num_stages": 3, "num_micro_batches": 4, "schedule": "zb_h1", "recompute": "none"},
    {"num_stages": 8, "num_micro_batches": 4, "schedule": "1f1b", "recompute": "stage"},
]
#: What is frozen: nothing, the tower, tower and projector, and these with the table of tokens.
FROZEN = (0, 1, 2, 3)


def freeze(model: nn.Module, parts: int) -> list[str]:
    """Freeze so many modules of the first layers; their names."""
    names = ("model.vision_tower", "model.multi_modal_projector", "model.language_model.embed_tokens")
    for name in names[:parts]:
        model.get_submodule(name).requires_grad_(False)
    return list(names[:parts])


def pairs() -> list[Any]:
    every = [(family, CASES[number % len(CASES)], 0) for number, family in enumerate(FAMILIES)]
    return [*every, *(("llava", CASES[1 + turn], frozen) for turn, frozen in enumerate(FROZEN[1:]))]


@pytest.mark.parametrize(("family", "case", "frozen"), pairs())
def test_a_step_is_the_plain_model_s(family: str, case: dict[str, Any], frozen: int) -> None:
    model = clone(family)
    freeze(model, frozen)
    batch = batch_of(model)
    expected = run_plain(copy.deepcopy(model), parts_of(batch, NUM_IMAGES, case["num_micro_batches"]))
    oracle.assert_same(oracle.run_pipeline(Pipeline(model, **case), batch), expected)


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize("num_stages", [1, 8])
def test_a_frozen_tower_runs_once(frozen: int, num_stages: int) -> None:
    """One that is trained runs again for its backward."""
    model = clone("llava")
    freeze(model, frozen)
    batch = batch_of(model)
    pipe = Pipeline(model, num_stages=num_stages, num_micro_batches=3, recompute="stage", schedule="gpipe")
    tower = pipe.models[0].model.model.vision_tower
    calls: list[bool] = []
    tower.encoder.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    pipe.train_step(batch)
    # Two of the three micro-batches have images.
    assert sorted(calls) == ([False, False] if frozen else [False, False, True, True]), "whether forwards have graphs"
    assert (tower.embeddings.patch_embedding.weight.grad is None) == bool(frozen)
    if num_stages > 1:
        assert pipe.stages[0].trainable_outputs == {"images": frozen < 2}


def _of_replicas(replicas: Any, frozen: int) -> oracle.Result:
    model = clone("llava")
    freeze(model, frozen)
    return oracle.run_pipeline(Pipeline(model, 2, 3, "1f1b", "stage", replicas=replicas), batch_of(model))


@pytest.mark.parametrize(("replicas", "frozen"), [([2, 1], 0), (2, 1)])
def test_replicas_share_rows_with_images(replicas: Any, frozen: int) -> None:
    """Of three micro-batches the last has no images."""
    model = clone("llava")
    freeze(model, frozen)
    expected = run_plain(model, parts_of(batch_of(model), NUM_IMAGES, 3))
    for found in run_gloo(_of_replicas, 4 if replicas == 2 else 3, replicas, frozen):
        oracle.assert_same(found, expected)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_lora_is_peft_s(num_stages: int) -> None:
    model = clone("llava")
    config = LoraConfig(r=2, target_modules=["q_proj", "fc1", "linear_1"], init_lora_weights=False)
    adapted = get_peft_model(model, config).double()
    batch = batch_of(clone("llava"))
    names = [name for name, one in adapted.base_model.model.named_parameters() if one.requires_grad]
    for part in ("vision_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in names), part
    expected = run_plain(copy.deepcopy(adapted).base_model.model, parts_of(batch, NUM_IMAGES, 2))
    pipe = Pipeline(adapted, num_stages, 2, "1f1b", "stage")
    oracle.assert_same(oracle.run_pipeline(pipe, batch), expected)


def test_rows_are_counted_where_they_have_more_images() -> None:
    model = clone("llava")
    counts = (2, 2, 0)
    batch = batch_of(model, counts)
    # As the inputs of a model of the Hub may come.
    batch = {name: batch[name] for name in sorted(batch, reverse=True)}
    expected = run_plain(copy.deepcopy(model), parts_of(batch, counts, 2))
    found = Pipeline(model, 2, 2).eval_step(batch)
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    assert len(found.row_losses) == 3


def test_rows_by_length() -> None:
    """Rows in another order keep their images."""
    model = clone("qwen2_vl")
    batch = batch_of(model)
    pipe = Pipeline(copy.deepcopy(model), num_stages=2, num_micro_batches=1, schedule="gpipe", recompute="none")
    whole = oracle.run_pipeline(pipe, batch)
    sorted_rows = Pipeline(model, num_stages=2, num_micro_batches=3, length_bucketing=True)
    oracle.assert_same(oracle.run_pipeline(sorted_rows, batch), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": lambda t: t[:3]}, "image tokens"),
        ({"pixel_values_videos": lambda t: torch.zeros(1)}, "pixel_values_videos"),
    ],
)
def test_images_that_are_not_the_rows(change: dict[str, Any], message: str) -> None:
    model = clone("llava")
    batch = batch_of(model)
    for name, function in change.items():
        if (tensor := function(batch.get(name))) is None:
            del batch[name]
        else:
            batch[name] = tensor
    with pytest.raises(DataError, match=message):
        Pipeline(model, num_stages=2, num_micro_batches=2).train_step(batch)


def test_text_is_generated_and_images_are_refused() -> None:
    model = clone("qwen2_vl").eval()
    batch = batch_of(model, (1, 0))
    given = {"input_ids": batch["input_ids"][1:], "attention_mask": batch["attention_mask"][1:]}
    expected = model.generate(**given, max_new_tokens=4, do_sample=False)
    pipe = Pipeline(model, num_stages=3, num_micro_batches=1)
    assert torch.equal(pipe.generate(**given, max_new_tokens=4, do_sample=False), expected)
    with pytest.raises(UserError, match="a pipeline generates from text alone"):
        pipe.generate(**given, pixel_values=batch["pixel_values"])


@pytest.mark.parametrize("options", [{"packing": True}, {"sequence_chunks": 2}])
def test_rows_with_images_stay_whole(options: dict[str, Any]) -> None:
    model = clone("llava")
    with pytest.raises(UserError, match=r"rows of text alone|whole"):
        Pipeline(model, num_stages=2, num_micro_batches=2, **options).train_step(batch_of(model))
