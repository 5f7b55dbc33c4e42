"""Each family of image classifiers that docs/image_models.md lists has the plain model's loss and gradients."""

from __future__ import annotations

import re

import pytest

from hf_gpipe import Pipeline
from hf_gpipe.errors import UnsupportedModelError
from tests.image_families import BROKEN, EXACT, classifier, difference, images


@pytest.mark.parametrize("family", EXACT)
def test_a_family_is_exact(family: str) -> None:
    assert difference(family)[-1] <= 1e-10


@pytest.mark.parametrize("family", BROKEN)
def test_a_family_that_is_no_chain(family: str) -> None:
    values, message = BROKEN[family]
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        Pipeline(classifier(family, values), 2, example=images(values))
