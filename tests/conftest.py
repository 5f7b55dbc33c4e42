"""What tests share."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator

import pytest

# Before anything reads it: no test asks a hub, and a model that is not there is told at once.
os.environ["HF_HUB_OFFLINE"] = "1"


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
