"""What tests leave out, or compare less exactly, with libraries older than those of constraints.txt."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

OLD_TORCH = Version(torch.__version__) < Version("2.13")
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.23")
#: Share of a forward's operations that transformers 5.17 has besides: a product for the positions of each stage.
OF_POSITIONS = 1e-3 if OLD_TRANSFORMERS else 0.0


def needs_mended_doge() -> None:
    """Skip the test with transformers 5.17, in which doge's experts fail and its sdpa sees later tokens."""
    if OLD_TRANSFORMERS:
        pytest.skip("this version of transformers has faults of its own in doge")
