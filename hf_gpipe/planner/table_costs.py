"""The seconds of the actions and messages of a table, by the costs of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from hf_gpipe.planner.costs.model_costs import Seconds
from hf_gpipe.planner.costs.stage_costs import Beside, StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import sent_share
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import Costs


def costs_of_table(layout: Layout) -> Costs:
    """The costs for the simulation of a table."""
    settings, sums, stages = layout.settings, layout.sums, layout.stages
    placement, processes = layout.table.placement, layout.processes
    network, speeds = processes.network(placement), processes.speeds_of(placement)
    # The number of devices that copy and update at once.
    host_size = processes.num_copying(placement.num_processes)

    def update(number: int, stage: StageLayers, count: int) -> float:
        owned = sums.owned(*stage.run)
        seconds = _update_seconds(layout, owned, host_size) / speeds[number]
        if (shares := settings.shared_updates.among(count)) == 1:
            return seconds
        # Each replica updates a part, and sends it to the others: half of what a reduction takes.
        return seconds / shares + network.reduce_seconds(number, owned.trainable_bytes) / 2

    def each(
        seconds_of: Callable[[Seconds, float, float, float], float],
        of_beside: Callable[[Beside], float] = lambda _: 0.0,
    ) -> list[float | Sequence[float]]:
        """The seconds of an action for each stage: a value for each chunk in turn, where rows are cut."""
        of_stages: list[float | Sequence[float]] = []
        for stage, speed, share in zip(stages, speeds, layout.recompute_shares, strict=True):
            run, beside = stage.run, of_beside(stage.beside)
            values = []
            for chunk in layout.of_chunks:
                weights, hidden = chunk.weight_seconds(*run), chunk.hidden_seconds(*run)
                values.append((seconds_of(chunk.seconds(*run, stage.inner), share, weights, hidden) + beside) / speed)
            of_stages.append(values if len(values) > 1 else values[0])
        return of_stages

    share = sent_share(settings, sums.costs.dtype)
    boundaries = [
        share * (sums.costs.layers[stage.start].input_bytes + stage.beside.input_bytes) for stage in stages[1:]
    ]
    others: dict[str, list[float]] = {}
    for seconds_of_mode in functions_of_modes("cost", "seconds"):
        others |= seconds_of_mode(layout)
    return Costs(
        forward_seconds=each(lambda own, share, *_: own.first_forward(share), attrgetter("forward_seconds")),
        recompute_seconds=each(lambda own, *_: own.forward),
        backward_seconds=each(lambda own, *_: own.backward, attrgetter("backward_seconds")),
        # Products that W computes later hide nothing of I.
        input_seconds=each(
            lambda own, _, weights, hidden: own.backward - weights + hidden, attrgetter("backward_seconds")
        ),
        weight_seconds=each(lambda _, __, weights, ___: weights),
        update_seconds=[
            update(number, *stage) for number, stage in enumerate(zip(stages, placement.replicas, strict=True))
        ],
        transfer_seconds=network.transfer_seconds(boundaries),
        reduce_seconds=[
            network.reduce_seconds(number, sums.held(*stage.run).trainable_bytes) for number, stage in enumerate(stages)
        ],
        turn_transfer_seconds=sum(own(layout) for own in functions_of_modes("cost", "turn_transfer_seconds")),
        others=others,
    )


def _update_seconds(layout: Layout, owned: Parameters, num_processes: int) -> float:
    """The seconds of the optimizer's update of these parameters. The host updates trained weights that visit, and
    weights with offloaded state; then `num_processes` update at once."""
    inputs, visitors, costs = layout.inputs, layout.settings.visits.offload_weights, layout.sums.costs
    device = layout.processes.device
    if inputs.is_on_host(visitors):
        moved = inputs.moved_bytes(owned, costs.dtype, visitors)
        # Gradients and weights travel; weights that visit travel in their visits.
        travels = 0.0 if visitors == "all" else 2 * owned.trainable_bytes / device.host.copy_rate(num_processes)
        return travels + moved / device.host.process_rate(num_processes)
    if costs.update_seconds_per_parameter is not None:
        return costs.update_seconds_per_parameter * owned.trainable_count
    # Gradients are read for their norm and for the update; weights and state are read and written.
    moved = 4 * owned.trainable_bytes + 2 * inputs.own_state_bytes(owned, costs.dtype)
    return moved / device.memory_rate
