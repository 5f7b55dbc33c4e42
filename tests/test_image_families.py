"""Each family of image classifiers that docs/image_models.md lists has the plain model's loss and gradients."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from hf_gpipe import Pipeline
from hf_gpipe.errors import UnsupportedModelError
from tests.image_families import BROKEN, EXACT, classifier, difference, images
from tests.oracle import Result, assert_same, run_pipeline


@pytest.mark.parametrize("family", EXACT)
def test_a_family_is_exact(family: str) -> None:
    assert difference(family)[-1] <= 1e-10


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
        pipe = Pipeline(model, num_stages, 3, schedule, recompute=recompute, seed=1, example=batch)
        return run_pipeline(pipe, batch)

    expected = step(1, "none", "gpipe", 0.3)
    for settings in ((3, "stage", "gpipe"), (2, "block", "1f1b"), (2, "none", "zb_h1")):
        assert_same(step(*settings, 0.3), expected)
    assert step(1, "none", "gpipe", 0.0).loss != expected.loss
