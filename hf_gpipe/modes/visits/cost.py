"""The cost of weights that visit: what of them is on the device and on the host, and seconds of copies and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.memory import Resident
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import ActionKind, Held
from hf_gpipe.schedule.occupancy import Amounts


def visiting(layout: Layout, stage: StageLayers) -> Parameters:
    """The size of the weights of a stage that visit its device: frozen weights, or all weights that no other layer
    uses; all weights of a shared stage."""
    sums, visitors = layout.sums, layout.settings.visits.offload_weights
    held = sums.held(*stage.run)
    if layout.table.placement.is_shared:
        return held
    trained = sums.unshared(*stage.run) if visitors == "all" else Parameters()
    return Parameters(
        held.count - held.trainable_count + trained.trainable_count,
        held.num_bytes - held.trainable_bytes + trained.trainable_bytes,
        trained.trainable_count,
        trained.trainable_bytes,
        trained.exact_count,
    )


def resident(layout: Layout, process: int, own: Sequence[int], there: Resident) -> Resident:
    """What stays on the device: the weights that do not visit, and a buffer for each stage that is there at once."""
    if layout.settings.visits.offload_weights is None:
        return there
    sums, is_shared = layout.sums, layout.table.placement.is_shared
    sizes = {number: visiting(layout, layout.stages[number]) for number in own}
    # Nothing of shared stages stays on the device, not even tied weights.
    trained = 0 if is_shared else there.trained - sum(size.trainable_bytes for size in sizes.values())
    num_buffers = min(most_loaded(layout.table)[process], len(own))
    largest = max(
        size.num_bytes + sums.bytes_of(layout.stages[number], converts_once=layout.converts_once).converted
        for number, size in sizes.items()
    )
    owned = {number: sums.owned(*layout.stages[number].run) for number in own}
    state = 0.0 if is_shared else sum(layout.state_bytes(number, owned[number] - sizes[number]) for number in own)
    coming: dict[int, Amounts] = {
        n: {Held.LEAVING_GRADIENTS: {"gradients": size.trainable_bytes}} for n, size in sizes.items()
    }
    return Resident(trained + num_buffers * largest, trained, state, coming)


def on_host(layout: Layout, timeline: Timeline) -> Mapping[str, Sequence[int]]:
    """The weights that visit, with the gradients and the optimizer's state of trained ones. A weight of shared stages
    is there once, and counts for the worker that updates it."""
    if layout.settings.visits.offload_weights is None:
        return {}
    sums, placement = layout.sums, layout.table.placement
    sizes = [0] * placement.num_processes
    for stage, workers in zip(layout.stages, placement.workers, strict=True):
        size = sums.owned(*stage.run) if placement.is_shared else visiting(layout, stage)
        state = layout.inputs.state_bytes(size, sums.costs.dtype)
        for worker in workers:
            sizes[worker] += round(size.num_bytes + size.trainable_bytes + state)
    return {"weights that visit": sizes}


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of L and D of each stage: all its weights that visit come, and what is trained goes back."""
    if layout.settings.visits.offload_weights is None:
        return {}
    sums, count = layout.sums, layout.num_updating
    sizes = [visiting(layout, stage) for stage in layout.stages]
    return {
        LOAD: [sums.copy_seconds(size.num_bytes, count) for size in sizes],
        DROP: [sums.copy_seconds(size.trainable_bytes, count) for size in sizes],
    }


def host_update_seconds(layout: Layout, owned: Parameters) -> float | None:
    """The seconds of an update where all weights visit: gradients and weights travel in their visits."""
    if layout.settings.visits.offload_weights != "all":
        return None
    # The norm is of the gradients that come, which become master weights' gradients; these become the weights.
    inputs = layout.inputs
    coming = (1 + 2 * inputs.fp32_master_weights) * owned.trainable_bytes
    moved = inputs.moved_bytes(owned, layout.sums.costs.dtype) + coming
    return moved / layout.processes.device.host.process_rate(layout.num_updating)
