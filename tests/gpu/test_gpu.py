"""Each check of hf_gpipe on GPUs: see conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.conftest import write
from tests.gpu.speed import Comparison


@pytest.mark.gpu
def test_on_gpus(check: Any, state: dict[str, Any]) -> None:
    """A failure that does not make the command fail is an expected one to pytest."""
    given, clock = state["given"], state["clock"]
    if clock.is_over:
        pytest.skip("no time is left; the same command goes on with it")
    own = clock.begin()
    if isinstance(check, Comparison):
        results = check.measure(1 if given["quick"] or given["emulated"] else given["reps"], own.limit)
    else:
        results = [check.run(own.limit)]
    if any(clock.was_cut(own, one) for one in results):
        pytest.skip("the time ended while it ran; the same command runs it again")
    state["results"] += results
    write(state)
    failed = [one for one in results if one.result == "failed"]
    text = "; ".join(f"{one.name}: {one.message}" for one in failed)
    if any(one.decides for one in failed):
        pytest.fail(text, pytrace=False)
    if failed:
        pytest.xfail(text)
    if all(one.result == "skipped" for one in results):
        pytest.skip(results[0].message)
