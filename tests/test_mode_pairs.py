"""Every pair of modes either trains as the plain model does, or is an error that the modes' `excludes` say."""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations
from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.tasks.distil import DistillationLoss
from tests.oracle import Result, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config

CONFIG = tiny_config("llama", tied=False)
M = 4
#: What turns each mode on in one process, by the name of its field. `zero` and `tensor_parallel` need several
#: processes, and kernels need a GPU.
MODES: dict[str, dict[str, Any]] = {
    "chunks": {"sequence_chunks": 2},
    "visits": {"offload_weights": "all", "schedule": "breadth_first"},
    "shared_stages": {"offload_weights": "all", "schedule": "round_robin"},
    "host_graphs": {"recompute": "host"},
    "boundary": {"boundary_dtype": "float32"},
    "compiled": {"torch_compile": "eager"},
    "divided_head": {"schedule": "vocab_1f1b"},
    "asynchronous": {"schedule": "pipedream_2bw"},
    "teacher": {"loss": DistillationLoss(cross_entropy_share=0.3)},
}
ELSEWHERE = {"shared_updates", "division", "liger"}


def keys(*modes: str) -> dict[str, Any] | None:
    """The options of modes that are on together; None: they are two values of one key."""
    options: dict[str, Any] = {}
    for mode in modes:
        if any(options.get(name, value) != value for name, value in MODES[mode].items()):
            return None
        options |= MODES[mode]
    return options


PAIRS = [pair for pair in combinations(MODES, 2) if keys(*pair) is not None]


def excluded(one: str, other: str) -> bool:
    modes = PipelineConfig().modes
    on = {one, other} | ({"visits"} if "shared_stages" in (one, other) else set())  # dealt stages visit
    return any(b in modes[a].excludes for a, b in permutations(on, 2) if a in modes)


def pipeline(options: dict[str, Any], num_stages: int = 5) -> Pipeline:
    given = {"schedule": "1f1b", "recompute": "stage"} | options
    if "loss" in options:
        given["teacher"] = plain_model(CONFIG, seed=7)
    return Pipeline(plain_model(CONFIG), num_stages, M, num_processes=1, **given)


@cache
def expected(has_teacher: bool) -> Result:
    batch = padded_batch(CONFIG)
    if has_teacher:  # tests/test_distillation.py compares this one with a loop of the plain models
        return run_pipeline(pipeline(MODES["teacher"], 1), batch)
    return run_plain(plain_model(CONFIG), batch, M)


def test_every_mode_is_in_a_pair() -> None:
    assert {*PipelineConfig().modes} == {*MODES, *ELSEWHERE}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_a_pair_of_modes(pair: tuple[str, str]) -> None:
    options = keys(*pair)
    assert options is not None
    if excluded(*pair):
        with pytest.raises(UserError):
            pipeline(options)
        return
    pipe, batch, whole = pipeline(options), padded_batch(CONFIG), expected("teacher" in pair)
    if "asynchronous" in pair:
        seen: list[torch.Tensor] = []
        found = pipe.train_window([[batch]], lambda stage, step, norm: seen.append(norm))[0]
        assert found.tolist() == pytest.approx([whole.loss, whole.norm], rel=1e-5 if "boundary" in pair else 1e-10)
        assert len(seen) == 5
        return
    assert_same(run_pipeline(pipe, batch), whole, tolerance=1e-5 if "boundary" in pair else 1e-10)
