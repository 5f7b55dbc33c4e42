"""Stages and replicas that are "auto" are chosen for the processes that run, and the numbers stay those of one."""

from __future__ import annotations

from hf_gpipe import Pipeline
from tests.gloo import run_gloo
from tests.oracle import (
    Result,
    assert_same,
    gathered_gradients,
    padded_batch,
    plain_model,
    run_plain,
    tiny_config,
)

CONFIG = tiny_config("llama")


def _chosen() -> tuple[Result, str | None, object]:
    batch = padded_batch(CONFIG)
    pipe = Pipeline(plain_model(CONFIG), "auto", 6, "1f1b", "auto", "auto", replicas="auto", example=batch)
    loss = float(pipe.train_step(batch))
    return Result(loss, gathered_gradients(pipe)), pipe.planned, pipe.config


def test_what_is_chosen_for_three_processes_is_exact() -> None:
    expected = run_plain(plain_model(CONFIG), padded_batch(CONFIG), 6)
    found = run_gloo(_chosen, 3)
    for result, planned, config in found:
        assert_same(result, expected)
        assert planned is not None
        assert "stages with" in planned
        assert (planned, config) == found[0][1:]


def _placed() -> Result:
    batch = padded_batch(CONFIG)
    pipe = Pipeline(plain_model(CONFIG), 2, 6, "1f1b", replicas=[2, 1], placement="2,0 1")
    assert pipe.world.placement.workers == ((2, 0), (1,))
    loss = float(pipe.train_step(batch))
    return Result(loss, gathered_gradients(pipe))


def test_any_order_of_the_processes_is_exact() -> None:
    expected = run_plain(plain_model(CONFIG), padded_batch(CONFIG), 6)
    for result in run_gloo(_placed, 3):
        assert_same(result, expected)
