"""Prices of rows in chunks: the arithmetic of whole rows, the memory of a chunk, and keys and values of the row."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from hf_gpipe.adapters import adapter_for
from hf_gpipe.commands import plan
from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.chunks.search import cuts, taper_of
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import ModelCosts, Seconds
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.of_model import costs_of_members, planner_of
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import Costs, build, simulate
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_held
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.oracle import tiny_config
from tests.planner.models import DEVICE, blocks
from tests.versions import OF_POSITIONS

ROOT = Path(__file__).parents[2]
TOKENS = 64


def long_llama() -> Any:
    """Four heads share two of keys and values."""
    config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings = 4, 2, 4096
    config._attn_implementation = "sdpa"
    return adapter_for(config)


def test_the_arithmetic_of_whole_rows() -> None:
    """All products are those of the row, on a GPU half of the attention: kernels leave out what the mask hides."""
    tracer, row = LayerTracer(long_llama(), as_on_gpu=True), Workload(1, TOKENS, TOKENS, has_padding=False)
    whole, chunks = tracer.costs(row), costs_of_members(row, Groups(8), tracer.costs)
    attention = 4 * TOKENS**2 * 4 * tracer.run.adapter.config.head_dim
    padded = tracer.costs(Workload(2, TOKENS, TOKENS))
    for index, layer in enumerate(whole.layers):
        if layer.kind == "block":
            own = [costs.layers[index] for costs in chunks]
            assert sum(one.weight_flops for one in own) == layer.weight_flops
            assert sum(one.forward.flops for one in own) == layer.forward.flops
            rows = padded.layers[index].forward.flops
            assert 2 * layer.forward.flops == pytest.approx(rows - attention, rel=OF_POSITIONS)


def test_chunks_between_those_that_were_traced() -> None:
    """They are read off, and are what a tracer finds that has traced no other."""
    row = Workload(1, TOKENS, TOKENS, has_padding=False)
    found = costs_of_members(row, Groups(8), LayerTracer(long_llama()).costs)
    for number in (3, 7):
        assert found[number] == LayerTracer(long_llama()).costs(row.members(Groups(8))[number])


def test_with_its_taper_every_chunk_takes_as_long() -> None:
    """Tokens that attend to more are in shorter chunks; equal chunks say how much more they take."""
    tracer, row = LayerTracer(long_llama(), as_on_gpu=True), Workload(1, 2048, 2048, has_padding=False)

    def of_chunks(taper: float) -> list[StageCosts]:
        return [StageCosts(costs, DEVICE) for costs in costs_of_members(row, Groups(4, taper), tracer.costs)]

    equal = of_chunks(0.0)
    taper = taper_of(equal)
    assert taper > 1
    tapered = of_chunks(taper)
    assert taper_of(tapered) < 0.05
    # All tokens of a chunk take about as long as its middle one.
    first, *_, last = (sums.seconds(1, 2, "none").of_micro_batch() for sums in tapered)
    assert last == pytest.approx(first, rel=0.05)
    assert sum(sums.forward_flops(0, 3) for sums in equal) == sum(sums.forward_flops(0, 3) for sums in tapered)


def test_later_chunks_are_shorter_where_memory_allows() -> None:
    row = Workload(1, 4096, 4096, has_padding=False)
    within = planner_of(long_llama(), PlanInputs(row, "sgd"), DEVICE, as_on_gpu=True)
    config = PipelineConfig(2, 1, "1f1b", "stage", (3, 3), num_processes=2, sequence_chunks=4)
    even, tapered = (best_plan(within, config.replace(chunk_taper=taper)) for taper in (0.0, "auto"))
    assert tapered.settings.chunk_taper > 1
    assert tapered.step_seconds < even.step_seconds
    assert tapered.peak_bytes > even.peak_bytes
    least = best_plan(within.within(even.peak_bytes), config.replace(chunk_taper="auto"))
    assert (least.settings.chunk_taper, least.step_seconds) == (0.0, even.step_seconds)


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_keys_and_values_are_of_the_row_and_graphs_of_a_chunk(as_on_gpu: bool) -> None:
    adapter = long_llama()
    tracer, row = LayerTracer(adapter, as_on_gpu=as_on_gpu), Workload(1, TOKENS, TOKENS, has_padding=False)
    whole, chunks = tracer.costs(row), costs_of_members(row, Groups(4), tracer.costs)
    config, block = adapter.config, 1
    width = config.head_dim * config.num_key_value_heads
    for costs in chunks:
        assert costs.layers[block].row_bytes == 2 * TOKENS * width * adapter.dtype.itemsize
    assert whole.layers[block].row_bytes == 0
    graphs = [costs.layers[block].plain.saved_bytes for costs in chunks]
    if as_on_gpu:
        assert len(set(graphs)) == 1
        assert graphs[0] <= whole.layers[block].plain.saved_bytes / 4
    else:  # a CPU keeps keys and values for all heads
        assert graphs == sorted(set(graphs))


def test_each_chunk_takes_its_own_time() -> None:
    """Of one row on one stage: F of both chunks, then B of the second and of the first."""
    table = build("gpipe", 1, 2, recompute="none", group_size=2)
    timeline = simulate(table, Costs([[Fraction(1), Fraction(3)]], [[Fraction(2), Fraction(6)]]))
    assert [span.end for span in timeline.spans][:4] == [1, 4, 10, 12]
    with pytest.raises(ScheduleError, match="forward_seconds has 3 values for 2 chunks of a row"):
        simulate(table, Costs([[1, 2, 3]], 2))


def test_what_is_held_of_a_row() -> None:
    timeline = simulate(build("1f1b", 2, 6, recompute="stage", group_size=3), Costs(1, 2))
    for stage in range(2):
        most = most_held(timeline, stage)
        # The next row has begun when the last chunk of a row goes back.
        assert (most[Held.ROW], most[Held.ROW_GRADIENTS]) == (2, 1)
    whole = most_held(simulate(build("1f1b", 2, 2), Costs(1, 2)), 0)
    assert whole[Held.ROW] == 0


def planner(rows: int, tokens: int, call_seconds: float = 0.0) -> Planner:
    """Of four blocks whose forward takes as many seconds as a chunk has tokens."""

    def costs_of(count: int, groups: Groups) -> list[ModelCosts]:
        one = blocks(4, boundary=0, saved=count * tokens // groups.size)
        took = Seconds(*(count * tokens / groups.size * factor + call_seconds for factor in (1, 1, 2)))
        layers = tuple(replace(layer, seconds=took) for layer in one.layers)
        return [replace(one, layers=layers)] * groups.size

    return Planner(costs_of, PlanInputs(Workload(rows, tokens, tokens), "sgd"), DEVICE)


def test_chunks_fill_a_pipeline_that_one_row_does_not() -> None:
    config = PipelineConfig(4, 1, "1f1b", "none", "count", sequence_chunks="auto")
    free, dear = (best_plan(planner(1, 8192, seconds), config) for seconds in (0.0, 2000.0))
    assert free.settings.sequence_chunks == 32
    assert free.bubble == pytest.approx(3 / 35)
    assert 1 < dear.settings.sequence_chunks < 32
    whole = planner(1, 8192).plan(free.settings.replace(sequence_chunks=1))
    assert (whole.bubble, whole.timeline.schedule.group_size) == (pytest.approx(3 / 4), 1)


@pytest.mark.parametrize(
    ("given", "tokens", "counts"),
    [(3, 100, [3]), ("auto", 100, [1]), ("auto", 1024, [1, 2, 4]), ("1000 tokens", 4096, [5])],
)
def test_the_numbers_of_chunks_that_are_tried(given: Any, tokens: int, counts: list[int]) -> None:
    assert [way.size for way in cuts(PipelineConfig(2, sequence_chunks=given), tokens)] == counts


def test_rows_that_are_not_cut_have_no_taper() -> None:
    """So measured costs of whole rows are found, whatever taper is asked for."""
    config = PipelineConfig(2, sequence_chunks="auto", chunk_taper=2.0)
    assert cuts(config, 512) == [Groups(1, 0.0), Groups(2, 2.0)]
    assert cuts(config.replace(chunk_taper="auto"), 512) == [Groups(1, 0.0), Groups(2, 0.0)]


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Three lengths of rows are planned; tests/planner/test_command.py looks for the longest that fits.
    monkeypatch.setattr(plan, "_MOST_TOKENS", 1024)
    recipe = str(ROOT / "recipes" / "causal" / "pretrain.yaml")
    given = [recipe, "data.max_target_tokens=512", "training.batch_size=1", "pipeline.partition=auto", "--devices", "4"]
    picked = ["pipeline.num_micro_batches=1", "pipeline.sequence_chunks=auto", "--device", "rtx4090"]
    assert plan.main([*given, *picked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["sequence_chunks"] in (1, 2)
    assert plan.main([*given, *picked[:1], "pipeline.sequence_chunks=4", "--memory", "2GiB", "--longest"]) in (0, 1)
    assert "cut into 4 chunks of at most 128 tokens" in " ".join(capsys.readouterr().out.split())
