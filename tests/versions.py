"""The libraries with which some tests are skipped or compare less exactly: those older than in constraints.txt."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

OLD_TORCH = Version(torch.__version__) < Version("2.13")
OLD_TRANSFORMERS = Version(transformers.__version__) < Version("5.23")
#: The share of operations that transformers 5.17 adds to a forward: a product for the positions of each stage.
OF_POSITIONS = 1e-3 if OLD_TRANSFORMERS else 0.0


def needs_mended_doge() -> None:
    """Skip the test with transformers 5.17, in which doge's experts fail and its sdpa sees later tokens."""
    if OLD_TRANSFORMERS:
        pytest.skip(f"doge's experts fail in transformers {transformers.__version__}, and its sdpa sees later tokens")
