"""Tests of this folder run on emulated CUDA devices."""

import pytest

from tests.emulated_cuda.processes import check_available


@pytest.fixture(scope="session", autouse=True)
def emulated_cuda() -> None:
    """Build the device once. Where there is no compiler the tests are skipped; in CI they fail."""
    check_available()
