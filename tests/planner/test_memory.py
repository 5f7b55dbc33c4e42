"""The memory estimate, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_gpipe.planner.costs.model_costs import SharedParameter
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.report import host_lines
from tests.planner.models import MIB, blocks, layer, model, planner, settings


def test_gpipe_without_recomputation_keeps_every_graph_and_every_boundary() -> None:
    """At the end of the forwards stage 1 has M = 4 graphs of two layers and 4 inputs. In the first backward the
    gradients of weights come as the graph goes: 20 MiB for 5 of its 10 when the first layer's turn comes.
    """
    toy = planner(blocks(4))
    toy.device = replace(toy.device, reserved_share=0.1, reserved_working_share=0.5)
    memory = toy.plan(settings((2, 2))).stages[1].memory
    assert memory.parameters == 20 * MIB
    assert memory.activations == 4 * 10 * MIB
    assert memory.boundaries == 4 * MIB
    assert memory.gradients == 15 * MIB
    assert memory.working == memory.optimizer == memory.early_gradients == memory.logits == 0
    assert memory.reserve == pytest.approx((0.1 * 44 + 0.5 * 15) * MIB, abs=1)
    assert memory.total == sum(vars(memory).values())


def test_recomputed_stages_keep_one_graph_and_the_inputs() -> None:
    plan = planner(blocks(4)).plan(settings((2, 2), recompute="stage"))
    assert plan.stages[1].memory.activations == 10 * MIB
    # Before the last backward of the first micro-batches, whose inputs are gone, the gradients have come.
    assert plan.stages[1].memory.parameters + plan.stages[1].memory.gradients >= 20 * MIB
    assert plan.peak_bytes < planner(blocks(4)).plan(settings((2, 2))).peak_bytes


def test_one_forward_one_backward_keeps_as_many_graphs_as_stages_follow() -> None:
    plan = planner(blocks(6), rows=8).plan(settings((2, 2, 2), 8, schedule="1f1b"))
    assert [stage.memory.activations // (10 * MIB) for stage in plan.stages] == [3, 2, 1]


def test_recomputed_blocks_keep_their_inputs() -> None:
    plan = planner(blocks(4)).plan(settings((2, 2), recompute="block"))
    assert plan.stages[0].memory.activations == 4 * 2 * MIB
    entries = planner(blocks(4)).plan(settings((2, 2), recompute=("none", "block")))
    assert [stage.recompute for stage in entries.stages] == ["none", "block"]
    assert entries.stages[1].memory.activations == 4 * 2 * MIB


def test_gradients_that_come_early_wait_under_the_fused_schedule() -> None:
    """Where the last stage is quick, all its gradients wait at the stage before it."""
    costs = model(layer("a", flops=8), layer("b", flops=1))
    plan = planner(costs).plan(settings((1, 1), schedule="gpipe_fused"))
    assert plan.stages[0].memory.early_gradients > 0
    assert planner(costs).plan(settings((1, 1), schedule="1f1b")).stages[0].memory.early_gradients <= MIB


@pytest.mark.parametrize(("optimizer", "slots"), [("adamw_torch", 2), ("rmsprop", 1), ("sgd", 0), ("adafactor", 0.01)])
def test_optimizer_state(optimizer: str, slots: float) -> None:
    memory = planner(blocks(2), optim=optimizer).plan(settings((2,))).stages[0].memory
    assert memory.optimizer == round(slots * 20 * MIB)


def test_master_weights_are_kept_in_float32() -> None:
    half = replace(blocks(2), dtype="bfloat16")
    memory = planner(half, optim="adamw_torch", fp32_master_weights=True).plan(settings((2,))).stages[0].memory
    # A copy, its gradient and two moments, each of twice the bytes.
    assert memory.optimizer == 4 * 2 * 20 * MIB


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 2)])
def test_an_offloaded_optimizer_needs_the_host_s_memory(zero: int, share: int) -> None:
    asked = settings((2,), num_processes=2, replicas=2, zero=zero)
    with_it, without = (
        planner(blocks(2), optim="adamw_torch", offload_optimizer=on).plan(asked) for on in (True, False)
    )
    assert {process.memory.optimizer for process in with_it.processes} == {0}
    # A copy, its gradient and two moments.
    assert [own.offloaded for own in with_it.on_hosts] == [4 * 20 * MIB // share] * 2
    assert f"{4 * 20 * 2 // share} MiB in all" in host_lines(with_it)["optimizer"]
    assert with_it.step_seconds > without.step_seconds
    assert not any(own.offloaded for own in without.on_hosts)
    assert host_lines(without)["optimizer"] == ""


def test_a_tied_weight_counts_once_a_process_and_its_state_once() -> None:
    table = SharedParameter("table", Parameters(MIB, 4 * MIB, MIB, 4 * MIB), 0)
    costs = model(layer("embedding", shared=(table,)), layer("block"), layer("head", kind="head", shared=(table,)))

    def weights_and_state(plan: Plan) -> list[tuple[int, int]]:
        return [(one.memory.parameters // MIB, one.memory.optimizer // MIB) for one in plan.processes]

    assert weights_and_state(planner(costs, optim="rmsprop").plan(settings((1, 1, 1)))) == [
        (14, 14),
        (10, 10),
        (14, 10),
    ]
    assert weights_and_state(planner(costs, optim="rmsprop").plan(settings((1, 2)))) == [(14, 14), (24, 20)]
    one_process = settings((1, 1, 1), num_processes=1)
    assert weights_and_state(planner(costs, optim="rmsprop").plan(one_process)) == [(34, 34)]


def test_what_autocast_makes_of_weights_is_there_once_where_weights_do_not_change() -> None:
    costs = model(*(replace(layer(f"h.{index}"), converted_bytes=5 * MIB) for index in range(2)))
    one, four = (planner(costs).plan(settings((2,), number)).stages[0].memory for number in (1, 4))
    assert one.parameters == four.parameters == (20 + 10) * MIB
    assert (one.activations, four.activations) == (10 * MIB, 40 * MIB)
    # A window updates between micro-batches.
    window = planner(costs).plan(settings((1, 1), schedule="pipedream")).stages[0].memory
    assert window.parameters == 10 * MIB
    assert window.activations == 2 * (5 + 5) * MIB


def test_on_a_gpu_a_recomputed_block_keeps_nothing_that_autocast_makes() -> None:
    costs = model(*(replace(layer(f"h.{index}"), converted_bytes=5 * MIB) for index in range(4)))
    recomputed = settings((4,), recompute="block")
    on_cpu, on_gpu = planner(costs), planner(costs)
    on_cpu.device = replace(on_cpu.device, has_host=False)
    cpu, gpu = (one.plan(recomputed).stages[0].memory for one in (on_cpu, on_gpu))
    assert (cpu.parameters, gpu.parameters) == (60 * MIB, 40 * MIB)
    # All of it is there when the first block is recomputed, in a backward that has made no gradients yet.
    assert gpu.of_tensors < cpu.of_tensors


def test_the_head_has_an_item_of_its_own() -> None:
    costs = model(layer("block"), layer("head", kind="head", saved=50 * MIB))
    memory = planner(costs).plan(settings((2,), 1)).stages[0].memory
    assert (memory.activations, memory.logits) == (5 * MIB, 50 * MIB)


def test_several_stages_of_a_process_add_up() -> None:
    plan = planner(blocks(4)).plan(settings((1, 1, 1, 1), num_processes=2))
    assert [process.stages for process in plan.processes] == [(0, 1), (2, 3)]
    for process in plan.processes:
        assert process.memory.parameters == 20 * MIB
        alone = [plan.stages[stage].memory.total for stage in process.stages]
        assert max(alone) < process.memory.total <= sum(alone)


def test_copies_for_saving_are_of_what_is_saved_in_the_process_that_writes_it() -> None:
    asked = settings((2, 2), num_processes=3, replicas=(2, 1))
    for inputs, stage in (
        ({"optim": "adamw_torch"}, 20 + 2 * 20),
        ({"optim": "adamw_torch", "fp32_master_weights": True}, 20 + 3 * 20),
        ({"optim": "adamw_torch", "saved": "adapters"}, 20 + 2 * 20),
        ({"optim": "adamw_torch", "saves_in_background": False}, 0),
    ):
        plan = planner(blocks(4), **inputs).plan(asked)
        assert [own.copies for own in plan.on_hosts] == [stage * MIB, 0, stage * MIB], inputs
        assert bool(host_lines(plan)["saving"]) == bool(stage)
    frozen = replace(blocks(1).layers[0], parameters=Parameters(10 * MIB, 40 * MIB, MIB, 4 * MIB))
    alone = settings((1,))
    assert planner(model(frozen)).plan(alone).on_hosts[0].copies == 40 * MIB
    assert planner(model(frozen), saved="adapters").plan(alone).on_hosts[0].copies == 4 * MIB
