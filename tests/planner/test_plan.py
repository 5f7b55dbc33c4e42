"""Time, splits, recomputation, auto values, fixes and searches of the planner."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from hf_gpipe.errors import PartitionError, UserError
from hf_gpipe.losses.embeddings import EmbeddingLoss
from hf_gpipe.losses.loss import Loss, TokenLoss
from hf_gpipe.planner.costs.model_costs import ModelCosts
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.report import report
from hf_gpipe.planner.search.advice import smallest_fix
from hf_gpipe.planner.search.choose import best_plan, search_all
from hf_gpipe.planner.search.cut import choose_partition, choose_recompute
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.tasks.dpo import PreferenceLoss
from hf_gpipe.tasks.grpo.loss import GRPOLoss
from hf_gpipe.tasks.kto import KTOLoss
from hf_gpipe.text import size_text
from tests.planner.models import MIB, blocks, layer, model, planner, settings


def test_the_bubble_of_equal_stages_is_the_papers() -> None:
    plan = planner(blocks(4), rows=8).plan(settings((1, 1, 1, 1), 8))
    assert plan.bubble == pytest.approx(3 / 11, rel=1e-3)
    # Eight micro-batches and three steps of fill and drain, each 1 s forward and 2 s backward.
    assert plan.step_seconds == pytest.approx(11 * 3, rel=1e-3)
    for process in plan.processes:
        assert process.time.forward == pytest.approx(8)
        assert process.time.backward == pytest.approx(16)
        assert sum(asdict(process.time).values()) == pytest.approx(plan.step_seconds)


def test_recomputation_takes_a_forward_more() -> None:
    plan = planner(blocks(2), rows=8).plan(settings((1, 1), 8, recompute="stage"))
    assert plan.processes[0].time.recompute == pytest.approx(8)
    assert plan.processes[0].time.backward == pytest.approx(8 * 2)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_recomputed_blocks_take_a_forward_more(schedule: str) -> None:
    """A plan whose every block was recomputed said "recompute 0 s", and counted it to the backward."""
    costs = model(*(replace(one, weight_flops=1) for one in blocks(2).layers))
    block, plain = (
        planner(costs, rows=8).plan(settings((1, 1), 8, recompute=way, schedule=schedule)).processes[0].time
        for way in ("block", "none")
    )
    assert block.recompute == pytest.approx(plain.forward)
    assert (block.forward, block.backward) == pytest.approx((plain.forward, plain.backward))


def test_a_split_backward_has_its_share_of_the_seconds_and_keeps_what_w_needs() -> None:
    costs = model(
        *(replace(one, weight_flops=1, deferred_bytes=one.graph("none").saved_bytes) for one in blocks(3).layers)
    )
    whole, split = (planner(costs, rows=6).plan(settings((1, 1, 1), 6, schedule=name)) for name in ("1f1b", "zb_h1"))
    # A third of the bubble of 3 s a stage, for W takes half of the backward.
    assert whole.step_seconds == pytest.approx((6 + 2) * 3, rel=1e-3)
    assert split.step_seconds == pytest.approx(6 * 3 + 2, rel=1e-3)
    assert split.processes[2].time.backward == pytest.approx(6 * 2, rel=1e-3)
    # The last stage has one graph in 1f1b, and here two micro-batches more between I and W.
    assert split.processes[2].memory.activations == 3 * whole.processes[2].memory.activations
    assert split.processes[0].memory.activations == whole.processes[0].memory.activations


def test_auto_considers_a_split_backward_but_not_with_compiled_blocks() -> None:
    costs = model(
        *(replace(one, weight_flops=1, deferred_bytes=one.graph("none").saved_bytes) for one in blocks(3).layers)
    )
    asked = PipelineConfig(3, 6, "auto", "none", "auto")
    assert best_plan(planner(costs, rows=6), asked).settings.schedule == "zb_h1"
    compiled = best_plan(planner(costs, rows=6), asked.replace(torch_compile=True))
    assert compiled.settings.schedule == "1f1b"


def test_a_step_has_its_rollouts_and_passes_before_its_tables() -> None:
    """Tokens come one after another, of all rows and through all stages; then forwards, and the table twice."""
    made = planner(blocks(4), rows=4)
    alone = made.plan(settings((2, 2)))
    assert alone.before == (0, 0)
    assert alone.step_seconds == alone.table_seconds
    seen: list[tuple[int, int]] = []

    def generation_costs(rows: int, tokens: int) -> ModelCosts:
        seen.append((rows, tokens))
        return model(*(layer(f"h.{index}", seconds=0.25 * tokens) for index in range(4)))

    made.generation_costs, made.num_forwards = generation_costs, 3
    made.inputs = replace(made.inputs, example=Workload(4, 4, 4), new_tokens=2, vocabulary=8, updates=2)
    plan = made.plan(settings((2, 2)))
    assert set(seen) == {(4, 2), (4, 1)}  # of four tokens two are generated
    assert plan.before.generation == pytest.approx(2 + 1, rel=1e-3)
    # Four micro-batches go through two stages of two blocks, a second each.
    assert plan.before.forwards == pytest.approx(3 * (4 + 1) * 2, rel=1e-3)
    assert plan.step_seconds == pytest.approx(sum(plan.before) + 2 * alone.table_seconds)
    assert "2 new tokens a row" in report(plan)
    assert "3 passes of forwards, then the table 2 times" in report(plan)


@pytest.mark.parametrize(
    ("loss", "without", "with_reference"),
    [
        (TokenLoss(), 0, 0),
        (PreferenceLoss(), 0, 1),
        (KTOLoss(), 1, 3),
        (KTOLoss(loss_type="apo_zero_unpaired"), 0, 1),
        (GRPOLoss(), 0, 0),
        (GRPOLoss(0.1), 1, 1),
        (EmbeddingLoss(), 1, 1),
    ],
)
def test_passes_of_a_loss(loss: Loss, without: int, with_reference: int) -> None:
    for own in (loss, loss.planned):
        assert own.num_forwards(has_reference=False) == without
        assert own.num_forwards(has_reference=True) == with_reference


def test_measured_seconds_go_before_rates() -> None:
    measured = model(*(replace(layer(f"h.{i}", seconds=0.5), name=f"h.{i}") for i in range(2)))
    plan = planner(measured).plan(settings((1, 1), 1))
    assert plan.costs.is_measured
    assert plan.step_seconds == pytest.approx(2 * 1.5, rel=1e-3)


def test_a_mini_batch_of_few_rows_has_as_many_micro_batches() -> None:
    plan = planner(blocks(2), rows=3).plan(settings((1, 1), 8))
    assert plan.timeline.schedule.num_micro_batches == 3


def test_accumulated_mini_batches_are_one_table() -> None:
    """Under gpipe all their graphs are alive at once, and a cap counts them all."""
    once = planner(blocks(2), rows=4).plan(settings((1, 1), 4))
    thrice = planner(blocks(2), accumulation=3).plan(settings((1, 1), 4))
    assert thrice.timeline.schedule.num_micro_batches == 12
    assert thrice.bubble < once.bubble
    assert thrice.peak_bytes - once.peak_bytes >= 8 * 5 * MIB


@pytest.mark.parametrize("strategy", ["flops", "auto"])
def test_a_dear_head_stands_alone(strategy: str) -> None:
    costs = model(*(layer(f"h.{i}") for i in range(6)), layer("head", kind="head", flops=6))
    assert choose_partition(planner(costs), settings((4, 3)), strategy) == (6, 1)
    assert choose_partition(planner(costs), settings((4, 3)), "count") == (4, 3)
    assert choose_partition(planner(costs), settings((4, 3)), [2, 5]) == (2, 5)


def test_parameters_are_split_by_size() -> None:
    costs = model(layer("embedding", weights=60 * MIB, flops=0), *(layer(f"h.{i}") for i in range(6)))
    assert choose_partition(planner(costs), settings((4, 3)), "parameters") == (1, 6)


def test_a_stage_that_recomputes_nothing_gets_more_layers() -> None:
    """The last stage of 1f1b has its gradient at hand: a layer there takes 3 s and elsewhere 4 s."""
    asked = settings((7, 7), 4, schedule="1f1b", recompute="stage")
    assert choose_partition(planner(blocks(14)), asked, "auto") == (6, 8)


@pytest.mark.parametrize("strategy", ["flops", "auto"])
def test_a_stage_with_more_replicas_gets_more_layers(strategy: str) -> None:
    asked = settings((4, 4), 12, num_processes=4, replicas=(1, 3))
    assert choose_partition(planner(blocks(8), rows=12), asked, strategy) == (2, 6)
    assert choose_partition(planner(blocks(8), rows=12), asked.replace(replicas=(2, 2)), strategy) == (4, 4)


def test_a_split_keeps_to_the_limit() -> None:
    """By time stage 0, whose graphs are many, would get half of the layers."""
    costs = blocks(8, weights=MIB, saved=10 * MIB)
    asked = settings((4, 4), 4, schedule="1f1b")
    free = planner(costs).plan(asked.replace(partition=choose_partition(planner(costs), asked, "auto")))
    limit = int(0.9 * free.peak_bytes)
    tight = planner(costs, memory_bytes=limit)
    counts = choose_partition(tight, asked, "auto")
    assert counts[0] < counts[1]
    assert tight.plan(asked.replace(partition=counts)).peak_bytes <= limit


def test_a_limit_that_no_split_meets_is_named_with_the_least_that_would_do() -> None:
    with pytest.raises(PartitionError, match=r"fits 0\.009766 GiB per stage: .* needs 0\.\d+ GiB"):
        choose_partition(planner(blocks(4), memory_bytes=10 * MIB), settings((2, 2)), "flops")


def test_a_limit_that_several_stages_share_is_named_as_it_was_given() -> None:
    """The message was about 5 MiB "per stage", a limit that nobody had given."""
    asked = settings((1,) * 4, schedule="interleaved_1f1b", num_processes=2)
    with pytest.raises(PartitionError, match=r"memory \(10 MiB each, .* share\): .* needs (\d+\.\d+) times") as found:
        choose_partition(planner(blocks(4), memory_bytes=10 * MIB), asked, "flops")
    needed = round(found.value.fullness * 10 * MIB) + MIB
    assert choose_partition(planner(blocks(4), memory_bytes=needed), asked, "flops") == (1,) * 4


def test_profile_needs_measured_layers() -> None:
    with pytest.raises(PartitionError, match="plan with --profile, or use flops"):
        choose_partition(planner(blocks(4)), settings((2, 2)), "profile")


@pytest.mark.parametrize("schedule", ["gpipe", "gpipe_fused", "1f1b"])
def test_chosen_recomputation_fits_and_one_graph_more_would_not(schedule: str) -> None:
    """The bound that the choice goes by is not far from the estimate."""
    costs = blocks(4, saved=40 * MIB)
    asked = settings((2, 2), 8, schedule=schedule)
    whole = planner(costs, rows=8).plan(asked)
    least = planner(costs, rows=8).plan(asked.replace(recompute=(1, 1)))
    seen = set()
    for share in (0.0, 0.3, 0.6, 1.1):
        limit = int(least.peak_bytes + share * (whole.peak_bytes - least.peak_bytes)) + 30 * MIB
        within = planner(costs, rows=8, memory_bytes=limit)
        chosen = choose_recompute(within, asked)
        Recompute.parse(chosen, 2)
        plan = within.plan(asked.replace(recompute=chosen))
        assert plan.fits
        seen.add(chosen)
        if not isinstance(chosen, str):
            more = tuple(entry + 2 if isinstance(entry, int) else entry for entry in chosen)
            assert not within.plan(asked.replace(recompute=more)).fits
    assert "none" in seen
    assert len(seen) > 1


def test_blocks_are_recomputed_where_no_whole_graph_fits() -> None:
    costs = blocks(8, weights=MIB, saved=100 * MIB)
    asked = settings((4, 4), 2, schedule="1f1b")
    within = planner(costs, memory_bytes=250 * MIB)
    assert choose_recompute(within, asked) == ("block", "block")
    assert within.plan(asked.replace(recompute="block")).fits
    # With a partition by cost it was an error, which advised what the recipe had: recompute=auto.
    plan = best_plan(within, PipelineConfig(2, 2, "1f1b", "auto", "auto"))
    assert (plan.fits, plan.settings.recompute) == (True, ("block", "block"))
    with pytest.raises(PartitionError, match="no split of 8 layers into 2 stages fits"):
        best_plan(within.within(20 * MIB), PipelineConfig(2, 2, "1f1b", "auto", "auto"))


def test_without_a_limit_nothing_is_recomputed() -> None:
    assert choose_recompute(planner(blocks(4)), settings((2, 2))) == "none"


def test_auto_values_are_the_fastest_that_fits() -> None:
    costs = blocks(8, weights=MIB, saved=10 * MIB)
    asked = PipelineConfig(2, "auto", "auto", "auto", "auto")
    within = planner(costs, rows=8, memory_bytes=150 * MIB)
    assert not asked.is_decided
    plan = best_plan(within, asked)
    assert plan.settings.is_decided
    assert plan.settings == best_plan(within, asked).settings
    again = best_plan(within, plan.settings)
    assert again.settings == plan.settings
    assert plan.fits
    for schedule in ("gpipe", "1f1b"):
        for num_micro_batches in (1, 2, 4, 8):
            rival = best_plan(within, PipelineConfig(2, num_micro_batches, schedule, "stage", "auto"))
            assert not rival.fits or plan.step_seconds <= rival.step_seconds * 1.01


def test_a_configuration_that_is_impossible() -> None:
    with pytest.raises(UserError, match="num_processes is 3 and num_stages is 2"):
        PipelineConfig(2, num_processes=3)
    with pytest.raises(UserError, match="'adam' has no known size of state; use one of adamw_torch_fused"):
        planner(blocks(2), optim="adam").plan(settings((1, 1)))


def limited(plan: Plan, limit: int) -> Plan:
    return plan.planner.within(limit).plan(plan.settings)


def test_the_smallest_fix_is_recomputation_where_that_is_enough() -> None:
    plan = planner(blocks(8, weights=MIB, saved=10 * MIB), rows=8).plan(settings((4, 4), 8))
    tight = limited(plan, int(0.7 * plan.peak_bytes))
    assert not tight.fits
    assert smallest_fix(tight).startswith("pipeline.recompute=auto fits: ")


def test_a_fix_can_be_more_stages_and_says_what_they_need() -> None:
    plan = planner(blocks(8, weights=100 * MIB), rows=8).plan(settings((4, 4), 8))
    text = smallest_fix(limited(plan, 450 * MIB))
    found = re.match(r"pipeline.num_stages=(\d) on \1 devices with .* fits: ([\d.]+) MiB", text)
    assert found is not None, text
    assert float(found[2]) <= 450


def test_where_nothing_helps_the_least_need_is_named() -> None:
    plan = planner(blocks(2, weights=100 * MIB)).plan(settings((1, 1)))
    assert re.match(
        r"no number of stages or micro-batches fits 50 MiB: .* needs \d+ MiB", smallest_fix(limited(plan, 50 * MIB))
    )


def test_weights_in_the_memory_of_the_host_are_named_where_the_devices_do_not_suffice() -> None:
    plan = planner(blocks(16, weights=100 * MIB), rows=8).plan(settings((8, 8), 8))
    found = re.search(
        r"; on these devices, with weights in CPU memory, pipeline.offload_weights=all with pipeline.num_stages=16, .* "
        r"fits: (.*) a process at most, and a step of .*, with (.*) of CPU memory\.$",
        smallest_fix(limited(plan, 500 * MIB)),
    )
    assert found is not None
    # The host has all weights and their gradients.
    assert found[2] == size_text(2 * 1600 * MIB)
    assert "CPU memory" not in smallest_fix(limited(plan, 50 * MIB)), "a block does not fit twice"


def test_adapters_are_named_where_the_devices_do_not_suffice_for_all_weights() -> None:
    """Full fine-tuning that did not fit was told to buy devices, and never that LoRA would do."""
    plan = planner(blocks(8, weights=100 * MIB), rows=8).plan(settings((4, 4), 8))
    tight, limit = limited(plan, 450 * MIB), 450 * MIB
    lora = planner(blocks(8, weights=MIB, saved=10 * MIB), rows=8).within(limit)
    quantised = planner(blocks(8, weights=MIB, saved=60 * MIB), rows=8).within(limit)

    def not_supported() -> Plan:
        raise UserError("this task has no adapters")

    tight.planner.lighter = {
        "never": not_supported,
        "lora.r=16": lambda: lora.plan(plan.settings),
        "lora.r=16 model.quantization=nf4": lambda: quantised.plan(plan.settings),
    }
    peak = lora.plan(plan.settings).peak_bytes
    assert peak <= limit < quantised.plan(plan.settings).peak_bytes
    found = re.fullmatch(
        r"pipeline.num_stages=\d on \d devices with .* fits: .*; on these devices, where adapters alone are trained, "
        r"lora.r=16 fits: (.*) a process at most, .*; lora.r=16 model.quantization=nf4 with "
        r"pipeline.recompute=auto fits: (.*) a process at most, .*\.",
        smallest_fix(tight),
    )
    assert found is not None, smallest_fix(tight)
    assert found[1] == size_text(peak)
    # Where nothing else helps they stand in place of "use devices with more memory".
    small = limited(planner(blocks(2, weights=1000 * MIB)).plan(settings((1, 1))), limit)
    small.planner.lighter = {"lora.r=16": lambda: lora.plan(plan.settings)}
    assert "; on these devices, where adapters alone are trained, lora.r=16 fits" in smallest_fix(small)
    # Where recomputation is enough they are not named.
    enough = limited(lora.plan(plan.settings), int(0.7 * peak))
    enough.planner.lighter = tight.planner.lighter
    assert smallest_fix(enough).startswith("pipeline.recompute=auto fits: ")
    assert "lora" not in smallest_fix(enough)


def test_a_plan_that_should_have_fitted_is_mended_by_less() -> None:
    """A run out of memory that was to fit needs an answer too."""
    plan = planner(blocks(8, weights=MIB, saved=10 * MIB), rows=8).plan(settings((4, 4), 8))
    assert " fits: " in smallest_fix(plan)


def test_a_search_is_no_slower_than_what_was_asked_for_and_knows_the_leanest() -> None:
    costs = blocks(8, weights=MIB, saved=10 * MIB)
    asked = PipelineConfig(2, 2, "gpipe", "stage", "auto")
    within = planner(costs, rows=8, memory_bytes=150 * MIB)
    found = search_all([(within, asked)])
    given = best_plan(within, asked)
    assert found.fastest[0].step_seconds <= given.step_seconds
    assert found.leanest.peak_bytes <= given.peak_bytes
    assert all(plan.fits for plan in found.fastest)
    steps = [plan.step_seconds for plan in found.fastest]
    assert steps == sorted(steps)
    assert {plan.settings.num_stages for plan in found.fastest} >= {2}


def test_a_search_names_no_division_where_whole_layers_fit_and_another_division_has_no_split() -> None:
    """It said that it takes pipeline.tensor_parallel=1 or more, as soon as 2, 4 or 8 ranks had no split."""
    costs, asked = blocks(8, weights=MIB), PipelineConfig(2, 2, "gpipe", "stage", "auto")
    divided = asked.replace(tensor_parallel=2)
    tight = planner(costs, memory_bytes=1)
    tight.division = divided.division
    with pytest.raises(PartitionError):
        search_all([(tight, divided)])
    assert search_all([(planner(costs), asked), (tight, divided)]).least is None
