"""The relative speeds of the devices of a job, measured on a block of the model or read off data sheets."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks
from hf_gpipe.job.world import World
from hf_gpipe.losses.loss import Loss
from hf_gpipe.planner.costs.measure import block_seconds
from hf_gpipe.planner.costs.model_costs import ModelCosts, estimated_seconds
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.workload import Workload

#: Speeds are rounded to powers of 2^(1/8), steps of 9 %, so that the next run, which measures a little differently,
#: mostly decides the same.
_STEPS_OF_AN_OCTAVE = 8


def measure_speeds(
    adapter: Adapter, workload: Workload, world: World, loss: Loss, ranks: Ranks | None = None
) -> tuple[float, ...] | None:
    """The speed of each worker relative to the first one; None: all are alike.

    Every process calls it. All of them compute a forward and a backward of one block at the same time, as in a run, so
    processes that share a machine slow each other down as they will.

    Args:
        adapter: the model's adapter.
        workload: a micro-batch.
        world: the processes and their devices.
        loss: the loss of the micro-batch.
        ranks: the ranks of this process's worker, among which the block is divided; None: a process is a worker.
    """
    own = block_seconds(adapter, workload, world.device, loss=loss, barrier=world.barrier, ranks=ranks)
    # The ranks of a worker wait for each other.
    first, *others = world.gather_objects(own)[:: 1 if ranks is None else ranks.size]
    speeds = (1.0, *(_rounded(first / seconds) for seconds in others))
    return None if set(speeds) == {1.0} else speeds


def rated_speeds(costs: ModelCosts, devices: Sequence[Device]) -> tuple[float, ...]:
    """The speed of each device relative to the first one, by their data sheets, for the layers of a model."""
    dtype = costs.compute_dtype
    seconds = [
        sum(estimated_seconds(layer, dtype, device).of_micro_batch() for layer in costs.layers) for device in devices
    ]
    return tuple(float(f"{seconds[0] / total:.3g}") for total in seconds)


def _rounded(speed: float) -> float:
    exact = 2.0 ** (round(_STEPS_OF_AN_OCTAVE * math.log2(speed)) / _STEPS_OF_AN_OCTAVE)
    return float(f"{exact:.3g}")
