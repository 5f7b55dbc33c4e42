"""Each family of image classifiers that docs/image_models.md lists has the plain model's loss and gradients."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F

from hf_gpipe import Pipeline
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.runtime.cutting import split_rows
from tests.image_families import BROKEN, EXACT, classifier, difference, images
from tests.oracle import Result, assert_same, run_pipeline


@pytest.mark.parametrize("family", EXACT)
def test_a_family_is_exact(family: str) -> None:
    assert difference(family)[-1] <= 1e-10


@pytest.mark.parametrize(
    ("family", "autocast"),
    [("ConvNext", torch.bfloat16), ("ResNet", torch.float16), ("ViT", torch.bfloat16), ("ViT", torch.float16)],
)
def test_a_family_under_autocast(family: str, autocast: torch.dtype) -> None:
    """Of families whose forwards round alike with and without a graph: those of Swin do not, in plain torch either."""
    assert difference(family, autocast)[-1] <= 1e-6


@pytest.mark.parametrize("family", BROKEN)
def test_a_family_that_is_no_chain(family: str) -> None:
    values, message = BROKEN[family]
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        Pipeline(classifier(family, values), 2, example=images(values))


@pytest.mark.parametrize("family", ["Swin", "ConvNext"])
def test_drop_path_is_seeded_as_dropout_is(family: str) -> None:
    """Which paths are dropped depends on the seed, the step, the layer and the micro-batch, and not on the stages."""

    def step(num_stages: int, recompute: str, schedule: str, rate: float) -> Result:
        config = getattr(transformers, f"{family}Config")(num_labels=3, drop_path_rate=rate, **EXACT[family])
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForImageClassification")(config).double()
        batch = images(EXACT[family])
        pipe = Pipeline(model, num_stages, 3, schedule, recompute, "count", seed=1, example=batch)
        return run_pipeline(pipe, batch)

    expected = step(1, "none", "gpipe", 0.3)
    for settings in ((3, "stage", "gpipe"), (2, "block", "1f1b"), (2, "none", "zb_h1")):
        assert_same(step(*settings, 0.3), expected)
    assert step(1, "none", "gpipe", 0.0).loss != expected.loss


@pytest.mark.parametrize(("family", "targets"), [("ViT", "all-linear"), ("ConvNext", ["pwconv1", "patch_embeddings"])])
def test_lora_is_peft_s(family: str, targets: Any, tmp_path: Path) -> None:
    batch, model = images(EXACT[family]), classifier(family, EXACT[family])
    config = LoraConfig(r=2, target_modules=targets, modules_to_save=["classifier"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config).double()
    plain, value = copy.deepcopy(adapted).base_model.model, 0.0
    for rows in split_rows(batch, 2):
        logits = plain(pixel_values=rows["pixel_values"]).logits
        loss = F.cross_entropy(logits, rows["labels"], reduction="sum") / 5
        loss.backward()
        value += loss.item()
    expected = Result(value, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    for num_stages, recompute in ((1, "none"), (3, "block")):
        pipe = Pipeline(copy.deepcopy(adapted), num_stages, 2, "1f1b", recompute, "count", example=batch)
        assert_same(run_pipeline(pipe, batch), expected)
    pipe.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(model, tmp_path).double().eval()
    assert torch.equal(*(one(pixel_values=batch["pixel_values"]).logits for one in (again, adapted.eval())))
    resnet = classifier("ResNet", EXACT["ResNet"])
    with pytest.raises(UnsupportedModelError, match=r"peft_config: '.*' of ResNet.* is a BatchNorm, whose moving"):
        Pipeline(resnet, 2, 2, peft_config=config, example=images(EXACT["ResNet"]))
