"""What tests share."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import pytest

# Before anything reads it: no test asks a hub, and a model that is not there is told at once.
os.environ["HF_HUB_OFFLINE"] = "1"
# What tests prepare is not for the cache of whoever runs them; their commands inherit this one.
_CACHE = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="hf_gpipe-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


@pytest.fixture
def undo_the_command_s_settings() -> Iterator[None]:
    """The command silences other packages for good, which a process of its own may do."""
    environment, logger, filters = dict(os.environ), logging.getLogger("hf_gpipe"), list(warnings.filters)
    handlers = logger.handlers
    yield
    os.environ.clear()
    os.environ.update(environment)
    logger.handlers, logger.propagate = handlers, True
    warnings.filters[:] = filters


@pytest.fixture(scope="module")
def no_prediction() -> Iterator[None]:
    """Leave out what a run says at its end of the planner's prediction: for a tiny model it takes longer than the run.

    tests/training/test_cost.py has its test, and the command that tests start as a user does has it.
    """
    from hf_gpipe.training import cost

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "_predicted", lambda pipe, batches: {})
        yield
