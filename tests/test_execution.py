"""How a pipeline is run changes nothing of its result: recomputation a stage, placement, devices, cuts by tokens."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import register_backend
from transformers import T5Config

from hf_gpipe import Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.from_recipe.timeline import measure_step
from hf_gpipe.planner.search.advice import advising
from hf_gpipe.runtime.cutting import split_rows, split_tokens
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule.builders import placement_for
from hf_gpipe.schedule.kinds import RECOMPUTE, UPDATE
from tests.gloo import run_gloo
from tests.oracle import (
    VOCABULARY,
    Batch,
    Result,
    assert_same,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    tiny_config,
)

TRAINING_SCHEDULES = ("naive", "gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")


@pytest.mark.parametrize("schedule", TRAINING_SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_each_stage_may_recompute_as_it_likes(family: str, schedule: str) -> None:
    config = tiny_config(family)
    batch, plain = padded_batch(config), plain_model(config)
    expected = run_plain(plain, batch, 5)
    # Two of the three; both families together have all.
    first = TRAINING_SCHEDULES.index(schedule) + (family == "marian")
    every: list[list[str | int]] = [["none", "block", "stage"], [1, 2, "none"], [3, 1, 1]]
    for recompute in (every[first % 3], every[(first + 1) % 3]):
        pipe = Pipeline(plain, 3, 5, schedule=schedule, recompute=recompute)
        assert_same(run_pipeline(pipe, batch), expected)


TABLES: list[tuple[str, str | list[str | int]]] = [
    *(("interleaved_1f1b", "none"), ("interleaved_1f1b", "stage"), ("interleaved_1f1b", [1, 2, 1, 2])),
    *(("zb_v", "none"), ("zb_v", [1, 2, 1, 2]), ("v_half", "stage"), ("zb_h2", "block")),
]


def test_several_stages_in_each_of_two_processes() -> None:
    config = tiny_config("marian")
    expected = run_plain(plain_model(config), padded_batch(config), 4)
    for results in run_gloo(results_of_four_stages, 2):
        for found in results:
            assert_same(found, expected)


def results_of_four_stages() -> list[Result]:
    config = tiny_config("marian")
    plain, results = plain_model(config), []
    for schedule, recompute in TABLES:
        pipe = Pipeline(plain, 4, 4, schedule, recompute)
        assert pipe.world.placement == placement_for(schedule, 4, 2)
        results.append(run_pipeline(pipe, padded_batch(config) if pipe.world.is_main else None))
    return results


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("blocks", "recompute: found 'blocks' .*did you mean 'block'"),
        (["none"], "has 1 entries and num_stages is 2"),
        (["none", 0], r"recompute: found \['none', 0\]"),
        (["none", True], r"recompute: found \['none', True\]"),
    ],
)
def test_a_wrong_recomputation_is_named(recompute: str | list[str | int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Pipeline(tiny_config("llama"), 2, recompute=recompute)


@pytest.mark.parametrize("family", ["llama", "m2m_100"])
def test_stages_of_one_process_on_several_devices(family: str) -> None:
    """torch takes "cpu:1" for another device than "cpu" and computes on both: what crosses them is as with GPUs."""
    config = tiny_config(family)
    batch, plain = padded_batch(config), plain_model(config)
    expected = run_plain(plain, batch, 3)
    pipe = Pipeline(plain, 4, 3, schedule="1f1b", device=["cpu", "cpu:1"])
    assert pipe.world.placement.devices == ("cpu", "cpu", "cpu:1", "cpu:1")
    assert_same(run_pipeline(pipe, batch), expected)
    assert float(pipe.grad_norm()) == pytest.approx(expected.norm, rel=1e-10)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected_ids = plain.eval().generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(pipe.generate(**inputs, max_new_tokens=4, do_sample=False), expected_ids)


def test_copies_of_a_tie_on_other_devices_follow_their_owner() -> None:
    config = tiny_config("m2m_100")
    losses = []
    for device in (["cpu", "cpu:1"], "cpu"):
        pipe = Pipeline(config, 4, dtype=torch.float64, device=device)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.mul_(0.9)
        losses.append(pipe.eval_step(padded_batch(config)).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def _t5() -> T5Config:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 4, "dropout_rate": 0.0}
    return T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)


def _tied_on_two_devices() -> tuple[Result, list[list[int]]]:
    config = _t5()
    machine = ["cpu", "cpu:1"] * dist.get_world_size()
    pipe = Pipeline(plain_model(config), 4, 2, partition=[2, 2, 2, 7], device=machine)
    stages: dict[object, list[int]] = {}
    for tie in pipe.ties._ties:
        stage = min(s for s, model in pipe.models.items() if tie.parameter in set(model.parameters.values()))
        stages.setdefault(tie.group, []).append(stage)
    return run_pipeline(pipe, padded_batch(config)), list(stages.values())


def test_a_group_of_ties_has_one_device_of_each_process() -> None:
    """With the embedding on the first device of both processes, and the position bias on another, NCCL would number the
    communicators of a group that they share differently on each process."""
    config = _t5()
    expected = run_plain(plain_model(config), padded_batch(config), 2)
    found = run_gloo(_tied_on_two_devices, 2)
    for result, _ in found:
        assert_same(result, expected)
    groups = [stages for _, stages in found]
    assert len(groups[0]) == len(groups[1]) > 1
    assert all(len(set(stages)) == 1 for ours in groups for stages in ours)


def test_devices_that_do_not_fit_the_stages() -> None:
    with pytest.raises(UserError, match="process 0 has 3 devices for 2 stages"):
        Pipeline(tiny_config("llama"), 2, device=["cpu", "cpu:1", "cpu:2"])
    with pytest.raises(UserError, match="cannot be shared out evenly"):
        Pipeline(tiny_config("llama"), 2, device=[])


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_cutting_by_tokens_changes_nothing_but_the_padding(family: str) -> None:
    config = tiny_config(family)
    batch, plain = padded_batch(config, rows=7), plain_model(config)
    expected = run_plain(plain, batch, 1)
    pipe = Pipeline(plain, 2, 3, length_bucketing=True)
    assert_same(run_pipeline(pipe, batch), expected)


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), num_micro_batches=st.integers(1, 5))
def test_the_cut_by_tokens_is_the_most_even_one(lengths: list[int], num_micro_batches: int) -> None:
    adapter = adapter_for(tiny_config("llama"))
    batch = rows_of(lengths)
    parts = split_tokens(batch, num_micro_batches, adapter)
    assert len(parts) == min(num_micro_batches, len(lengths)) == len(split_rows(batch, num_micro_batches))
    found = [row for part in parts for row in part["attention_mask"].sum(1).tolist()]
    assert found == sorted(lengths, reverse=True)
    tokens = [part["attention_mask"].sum(1).max().item() * len(part["input_ids"]) for part in parts]
    assert max(tokens) == least_bottleneck(sorted(lengths, reverse=True), len(parts))


def rows_of(lengths: Sequence[int]) -> Batch:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.arange(len(lengths))[:, None] * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def least_bottleneck(lengths: Sequence[int], count: int) -> int:
    """By trying every cut."""
    if count == 1:
        return lengths[0] * len(lengths)
    cuts = range(1, len(lengths) - count + 2)
    return min(max(lengths[0] * cut, least_bottleneck(lengths[cut:], count - 1)) for cut in cuts)


def test_compiled_blocks_compute_the_same() -> None:
    """Those of micro-batches of several shapes train in tests/training/test_integrations.py."""
    config = tiny_config("llama")
    config.num_hidden_layers = 2
    batch, plain = padded_batch(config), plain_model(config)
    batch = {name: tensor[:, :5] for name, tensor in batch.items()}
    expected = run_plain(plain, batch, 2)
    pipe = Pipeline(plain, 2, 2, recompute="none", torch_compile="aot_eager")
    assert_same(run_pipeline(pipe, batch), expected)


def test_compiled_blocks_are_recomputed_with_the_same_dropout() -> None:
    """Under the backend eager they were not, and only the gradients were wrong."""
    config = tiny_config("bart", dropout=0.1)
    plain, batch = plain_model(config), padded_batch(config)
    options: dict[str, Any] = {"attn_implementation": "eager", "recompute": "block"}
    torch._dynamo.reset()
    expected = run_pipeline(Pipeline(plain, 3, 2, "1f1b", **options), batch)
    assert_same(run_pipeline(Pipeline(plain, 3, 2, "1f1b", torch_compile="aot_eager", **options), batch), expected)
    with pytest.raises(UserError, match=r"'eager', recompute is block and dropout is 0\.1: this backend draws other"):
        Pipeline(plain, 3, 2, "1f1b", torch_compile="eager", **options)


def test_blocks_of_one_kind_are_compiled_once() -> None:
    """Each block had a class of its own, so each was compiled, and from the ninth on none was."""
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, example: object) -> torch.fx.GraphModule:
        nonlocal num_graphs
        num_graphs += 1
        return graph

    register_backend(backend, name="counting")
    torch._dynamo.reset()
    config = tiny_config("llama")
    config.num_hidden_layers = 10
    pipe = Pipeline(config, 2, torch_compile="counting", recompute="none")
    pipe.train_step(padded_batch(config))
    assert num_graphs == 1


def test_a_measured_step_tells_where_the_time_goes() -> None:
    for times, table in run_gloo(measured, 2):
        assert [one.action for one in times] == table
        for before, after in pairwise(times):
            assert before.end <= after.start
        for one in times:
            assert min(one.waiting, one.sending) >= 0
            assert one.waiting + one.sending <= one.end - one.start + 1e-9


def measured() -> tuple[list[ActionTime], list[object]]:
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, 3)
    times: list[ActionTime] = []
    pipe.train_step(padded_batch(config) if pipe.world.is_main else None, times)
    return times, list(pipe.schedule(3).actions[pipe.world.rank])


def test_the_update_runs_in_the_last_u_of_a_process() -> None:
    for gradients, inside, loss, returned, is_in_u in run_gloo(updated, 2):
        assert inside == gradients, "those of ties are reduced already"
        assert loss == returned
        assert is_in_u


def updated() -> tuple[dict[str, float], dict[str, float], float, float, bool]:
    config = tiny_config("m2m_100")  # its embedding is tied over both processes
    pipe = Pipeline(plain_model(config), 4, 2, "interleaved_1f1b")
    batch = padded_batch(config) if pipe.world.is_main else None
    times: list[ActionTime] = []
    seen: list[tuple[float, float, dict[str, float]]] = []
    returned = float(
        pipe.train_step(batch, times, lambda loss, _: seen.append((time.perf_counter(), float(loss), norms(pipe))))
    )
    ((moment, loss, inside),) = seen
    last = times[-1]
    is_in_u = last.action.kind == UPDATE and last.start + last.waiting <= moment <= last.end
    pipe.zero_grad()
    pipe.train_step(batch)
    return norms(pipe), inside, loss, returned, is_in_u


def norms(pipe: Pipeline) -> dict[str, float]:
    return {name: float(p.grad.norm()) for name, p in pipe.named_parameters() if p.grad is not None}


def test_what_an_update_raises_is_raised_as_it_is() -> None:
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, 2)
    expected = float(pipe.train_step(padded_batch(config)))

    def update(loss: torch.Tensor, norm: torch.Tensor) -> None:
        raise KeyError(float(loss))

    pipe.step = 0
    with pytest.raises(KeyError, match=str(expected)):
        pipe.train_step(padded_batch(config), update=update)


def test_a_measured_step_does_not_count() -> None:
    """Of dropout too: the step after it is the one that would have been."""
    config = tiny_config("llama", dropout=0.3)
    losses = []
    for is_measured in (False, True):
        pipe = Pipeline(plain_model(config), 2, 2)
        if is_measured:
            measure_step(pipe, [padded_batch(config)], repeats=1)
            assert pipe.step == 0
            assert all(parameter.grad is None for parameter in pipe.parameters())
        losses.append(float(pipe.train_step(padded_batch(config))))
    assert losses[0] == losses[1]


def test_a_graph_keeps_no_boundary_output_alive() -> None:
    """Between F and B the value that was sent is gone; only its place in the graph stays."""
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, 1, recompute="none")
    stage = pipe.stages[0]
    alive: list[bool] = []
    original = stage.backward

    def backward(micro_batch: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        graph = stage._live[micro_batch].graph
        alive.append(any(isinstance(value, torch.Tensor) for value in vars(graph).values()))
        return original(micro_batch, gradients)

    stage.backward = backward  # type: ignore[method-assign,assignment]
    run_pipeline(pipe, padded_batch(config))
    assert alive == [False]
    assert RECOMPUTE not in {a.kind for a in pipe.schedule(1).actions[0]}


def test_a_failure_for_want_of_memory_says_what_would_need_less() -> None:
    config = tiny_config("llama")
    batch = padded_batch(config, rows=2)
    pipe = Pipeline(plain_model(config), 2, 2, recompute="none", example=batch, memory="1MiB")
    for failure in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")):
        pipe.stages[1].forward = Mock(side_effect=failure)  # type: ignore[method-assign]
        with (
            pytest.raises(StageError, match=r"stage 1, action 1F0: .* By the planner, .*pipeline\."),
            advising(pipe.plan, pipe.world.rank),
        ):
            pipe.train_step(batch)
    with pytest.raises(ValueError, match="another"), advising(pipe.plan, pipe.world.rank):
        raise ValueError("another failure")


@pytest.mark.parametrize(("family", "partition"), [("llama", "parameters"), ("llama", "profile"), ("marian", "auto")])
def test_the_planner_settles_what_is_left_to_it(family: str, partition: str) -> None:
    config = tiny_config(family)
    batch, plain = padded_batch(config, rows=3), plain_model(config)
    pipe = Pipeline(plain, 2, "auto", "1f1b", "auto", partition, example=batch, memory="200MiB")
    assert isinstance(pipe.num_micro_batches, int)
    assert pipe.planned is not None
    assert "num_micro_batches" in pipe.planned
    assert_same(run_pipeline(pipe, batch), run_plain(plain, batch, 1))


def test_the_planner_decides_the_same_in_every_process() -> None:
    first, second = run_gloo(decisions, 2)
    assert first == second


def decisions() -> list[object]:
    config = tiny_config("llama")
    found: list[object] = []
    for partition in ("profile", "flops"):
        example = padded_batch(config, rows=2) if dist.get_rank() == 0 else None
        pipe = Pipeline(config, 3, 2, "auto", "auto", partition, example=example, memory="200MiB")
        found.append((pipe.partition, pipe.schedule_name, pipe.recompute, pipe.planned))
    return found


def test_the_planner_needs_an_example() -> None:
    with pytest.raises(UserError, match=r"give values .* example="):
        Pipeline(tiny_config("llama"), 2, recompute="auto")


@pytest.mark.parametrize("options", [{}, {"schedule": "vocab_1f1b"}, {"sequence_chunks": 2}], ids=str)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_pipeline_lets_go_of_the_model_that_it_was_made_from(num_processes: int, options: dict[str, Any]) -> None:
    """In several processes each would otherwise hold the weights of all stages."""
    assert run_gloo(weights_left, num_processes, options) == [0] * num_processes


def weights_left(options: dict[str, Any]) -> int:
    """How many modules and parameters of a model are left beside the pipeline that was made from it."""
    plain = plain_model(tiny_config("llama"))
    left = [weakref.ref(part) for part in (*plain.modules(), *plain.parameters())]
    pipe = Pipeline(plain, 2, **options)
    of_pipe = {id(part) for model in pipe.models.values() for part in model.parameters.values()}
    del plain
    gc.collect()
    return sum(part() is not None and id(part()) not in of_pipe for part in left)
