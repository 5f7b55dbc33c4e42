"""The cost of weights that visit: what of them is on the device and on the host, and seconds of copies and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_gpipe.modes.visits.late_updates import LATE_UPDATE
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.modes.visits.visit import DROP, LOAD
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.memory import Resident
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import ActionKind, Held
from hf_gpipe.schedule.occupancy import Amounts


def stays(layout: Layout, number: int) -> bool:
    """Whether the weights of a stage stay on its device, while those of other stages visit."""
    return layout.table.num_actions(number, LOAD) == 0


def visiting(layout: Layout, number: int) -> Parameters:
    """The size of the weights of a stage that visit its device: frozen weights, frozen experts, or all weights that no
    other layer uses; all weights of a shared stage. Where some stages stay, weights that layers share stay too."""
    sums, visits, run = layout.sums, layout.settings.visits, layout.stages[number].run
    if stays(layout, number):
        return Parameters()
    held, alone = sums.held(*run), sums.unshared(*run)
    if layout.table.placement.is_shared:
        return held
    frozen = alone if visits.resident_stages else held
    if visits.offload_weights == "experts":
        frozen = sums.experts(*run)
    trained = alone if visits.offload_weights == "all" else Parameters()
    return Parameters(
        frozen.count - frozen.trainable_count + trained.trainable_count,
        frozen.num_bytes - frozen.trainable_bytes + trained.trainable_bytes,
        trained.trainable_count,
        trained.trainable_bytes,
        trained.exact_count,
    )


def resident(layout: Layout, process: int, own: Sequence[int], there: Resident) -> Resident:
    """The weights that do not visit, which stay on the device, and a buffer for each stage that is there at once."""
    if layout.settings.visits.offload_weights is None:
        return there
    sums, is_shared = layout.sums, layout.table.placement.is_shared
    known = {n: sums.bytes_of(layout.stages[n], converts_once=layout.converts_once) for n in own}
    coming = {n: visiting(layout, n) for n in own if not stays(layout, n)}
    # Nothing of shared stages stays on the device, not even tied weights.
    trained = 0 if is_shared else there.trained - sum(size.trainable_bytes for size in coming.values())
    # A frozen weight that several stages share comes with each of them.
    frozen = there.weights - there.trained - sum(of_stage.converted for of_stage in known.values())
    frozen -= sum(size.num_bytes - size.trainable_bytes for size in coming.values())
    weights = trained + max(frozen, 0) + sum(known[n].converted for n in own if n not in coming)
    if coming:
        num_buffers = min(most_loaded(layout.table)[process], len(coming))
        weights += num_buffers * max(size.num_bytes + known[n].converted for n, size in coming.items())
    owned = {n: known[n].owned - coming.get(n, Parameters()) for n in own}
    state = 0.0 if is_shared else sum(layout.state_bytes(n, size) for n, size in owned.items())
    amounts: dict[int, Amounts] = {
        n: {Held.LEAVING_GRADIENTS: {"gradients": size.trainable_bytes}} for n, size in coming.items()
    }
    return Resident(weights, trained, state, amounts)


def on_host(layout: Layout, timeline: Timeline) -> Mapping[str, Sequence[int]]:
    """The weights that visit, with the gradients and the optimizer's state of trained ones. A weight of shared stages
    is there once, and counts for the worker that updates it."""
    if layout.settings.visits.offload_weights is None:
        return {}
    inputs, dtype, placement = layout.inputs, layout.sums.costs.dtype, layout.table.placement
    sizes, states = ([0] * placement.num_processes for _ in range(2))
    for number, workers in enumerate(placement.workers):
        size = _on_host(layout, number)
        state = round(inputs.state_bytes(size, dtype) - inputs.disk_bytes(size, dtype))
        for worker in workers:
            sizes[worker] += round(size.num_bytes + size.trainable_bytes)
            # With the rest on a disk, these are gradients of master weights, of one stage after another.
            states[worker] = max(states[worker], state) if inputs.state_on_disk else states[worker] + state
    sizes = [size + state for size, state in zip(sizes, states, strict=True)]
    return {"weights that visit": sizes}


def _on_host(layout: Layout, number: int) -> Parameters:
    """The size of the weights of a stage in CPU memory."""
    is_shared = layout.table.placement.is_shared
    return layout.sums.owned(*layout.stages[number].run) if is_shared else visiting(layout, number)


def hosted(layout: Layout, number: int) -> Parameters | None:
    """The size of the weights of a stage that the CPU updates."""
    return _on_host(layout, number) if layout.settings.visits.offload_weights == "all" else None


def seconds(layout: Layout) -> dict[ActionKind, list[float]]:
    """The seconds of L, D and A of each stage: all its weights that visit come, and what is trained goes back."""
    if layout.settings.visits.offload_weights is None:
        return {}
    sums, count = layout.sums, layout.num_updating
    sizes = [visiting(layout, number) for number in range(len(layout.stages))]
    return {
        LOAD: [sums.copy_seconds(size.num_bytes, count) for size in sizes],
        DROP: [sums.copy_seconds(size.trainable_bytes, count) for size in sizes],
        LATE_UPDATE: [_late_seconds(layout, number) for number in range(len(layout.stages))],
    }


def host_update_seconds(layout: Layout, number: int, owned: Parameters) -> float | None:
    """The seconds of an update where all weights visit: gradients and weights travel in their visits."""
    if layout.settings.visits.offload_weights != "all" or stays(layout, number):
        return None
    # The norm is of the gradients that come. A is the rest of a late update.
    moved = owned.trainable_bytes + (0 if _is_late(layout, number) else _updated_bytes(layout, owned))
    return moved / layout.processes.device.host.process_rate(layout.num_updating)


def _is_late(layout: Layout, number: int) -> bool:
    return layout.table.num_actions(number, LATE_UPDATE) > 0


def _late_seconds(layout: Layout, number: int) -> float:
    """The seconds of A of a stage: its update in CPU memory, and all of its state on a disk is read and written."""
    if not _is_late(layout, number):
        return 0.0
    host, count = layout.processes.device.host, layout.num_updating
    owned = layout.sums.owned(*layout.stages[number].run)
    on_disk = 2 * layout.disk_bytes(number) / host.disk_rate(count)
    return _updated_bytes(layout, owned) / host.process_rate(count) + on_disk


def _updated_bytes(layout: Layout, owned: Parameters) -> float:
    """The bytes that an optimizer's step moves. Gradients become those of master weights, which become the weights."""
    inputs = layout.inputs
    return inputs.moved_bytes(owned, layout.sums.costs.dtype) + 2 * inputs.fp32_master_weights * owned.trainable_bytes
