"""The seconds of a model's layers, and the memory and the rates of this process's device, measured.

`profile_layers` gives one layer of each class real memory and initial weights, and runs it as a stage of its own.
Blocks run alone and several in a row. The time that one more block adds is the block's. The time that is left is the
stage's, which every stage spends once per micro-batch on masks, positions and calls. `this_machine` measures a device
in about a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property, partial
from itertools import takewhile
from operator import eq
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.modules.autocast import keeping_weights
from hf_gpipe.adapters.modules.dropout import keeping_random_numbers
from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.job.facts import DeviceFacts
from hf_gpipe.job.world import World
from hf_gpipe.libraries.torch import loopback_group
from hf_gpipe.losses.loss import PLAIN, Loss
from hf_gpipe.model.assembly import assemble
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import ModelCosts, Seconds
from hf_gpipe.planner.costs.tracing import context_of
from hf_gpipe.planner.costs.tracker import Tracker
from hf_gpipe.planner.machines.devices import LINKS, Device, Host, cpu, like_gpu
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.micro_batch import Context, on_devices
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.settings.division import Division

#: The most blocks of one kind that run in a row.
_BLOCKS_IN_A_ROW = 3
_DTYPES = ("float32", "bfloat16", "float16")
#: Rows and columns of the matrices whose product is timed, up to those that are large enough for a GPU.
_PRODUCT_SIZES = {"cuda": (512, 2048, 4096), "cpu": (512,)}
#: The most time of each sum of buckets: where one side fails, the other must not wait for it.
_LOOPBACK_LIMIT = timedelta(seconds=60)
#: Bytes of memory whose copy is timed.
_COPIED_BYTES = 1 << 26
#: The seconds from which a product is large enough. Without units for its type a larger product would take minutes.
_LONG_PRODUCT_SECONDS = 0.01
_REPEATS = 3
#: The runs of the block by which devices are compared, and the seconds after which no further run begins.
_BLOCK_REPEATS, _BLOCK_BUDGET_SECONDS = 10, 2.0
#: The bytes that CUDA takes of a GPU when kernels first run, after its context was made: 0.23 GiB on an H100, and 0.32
#: with streams that copy.
_KERNELS_BYTES = 5 << 26
#: What glibc's allocator keeps of what comes and goes: from a third to a half in eight runs.
_RESERVED_SHARE = 0.45

#: Speeds are rounded to powers of 2^(1/8), steps of 9 %, so that the next run, which measures a little differently,
#: mostly decides the same.
_STEPS_OF_AN_OCTAVE = 8

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def profile_layers(
    adapter: Adapter,
    workload: Workload,
    device: torch.device,
    *,
    loss: Loss = PLAIN,
    repeats: int = 5,
    budget_seconds: float = 20.0,
    barrier: Callable[[], None] | None = None,
    make_optimizer: MakeOptimizer | None = None,
    ranks: Ranks | None = None,
    costs: ModelCosts | None = None,
) -> ModelCosts:
    """The costs of `LayerTracer` with the seconds filled in, medians of several runs after one that is not counted.

    Args:
        repeats: the number of runs of each class of layers.
        budget_seconds: the seconds after which no further run of a class of layers begins, but two are always made.
        barrier: waits for all processes that measure at the same time, before each class of layers, so that each
            measures while the others compute, as in a run; None: this process is alone.
        make_optimizer: parameters -> the optimizer whose update is measured, after the gradients have been clipped;
            None: updates are not measured.
        ranks: the ranks among which the layers are divided. All of them measure, and the seconds include the sums over
            them. None: the layers are whole.
        costs: the costs without seconds; None: the layers are traced.
    """
    clock = _Clock(adapter, workload, device, loss, barrier, ranks, repeats, budget_seconds)
    tracer = clock.tracer
    costs = tracer.costs(workload) if costs is None else costs
    with keeping_random_numbers([device]):
        measured, beyond_layers = clock.of_classes(dict.fromkeys(tracer.representative_layer))
        update = None if make_optimizer is None else clock.update_seconds(make_optimizer)
    return replace(
        costs,
        layers=tuple(
            replace(layer, seconds=measured[number])
            for layer, number in zip(costs.layers, tracer.representative_layer, strict=True)
        ),
        stage_seconds=beyond_layers,
        update_seconds_per_parameter=update,
    )


def block_seconds(
    adapter: Adapter,
    workload: Workload,
    device: torch.device,
    *,
    loss: Loss = PLAIN,
    barrier: Callable[[], None] | None = None,
    ranks: Ranks | None = None,
) -> float:
    """The seconds of a forward and a backward of the model's first block, or of the layer in its middle where it has no
    block, measured as in `profile_layers`."""
    clock = _Clock(adapter, workload, device, loss, barrier, ranks, _BLOCK_REPEATS, _BLOCK_BUDGET_SECONDS)
    kinds = [layer.kind for layer in clock.tracer.run.adapter.layers]
    block = kinds.index("block") if "block" in kinds else len(kinds) // 2
    with keeping_random_numbers([device]):
        return clock.measure(block, block + 1).of_micro_batch()


def measure_speeds(
    adapter: Adapter, workload: Workload, world: World, loss: Loss, ranks: Ranks | None = None
) -> tuple[float, ...] | None:
    """The speed of each worker relative to the first one; None: all are alike.

    Every process calls it. All of them compute a forward and a backward of one block at the same time, as in a run, so
    processes that share a machine slow each other down as they will.

    Args:
        ranks: the ranks of this process's worker, among which the block is divided; None: a process is a worker.
    """
    own = block_seconds(adapter, workload, world.device, loss=loss, barrier=world.barrier, ranks=ranks)
    # The ranks of a worker wait for each other.
    first, *others = world.gather_objects(own)[:: 1 if ranks is None else ranks.size]
    steps = [round(_STEPS_OF_AN_OCTAVE * math.log2(first / seconds)) for seconds in others]
    speeds = (1.0, *(float(f"{2.0 ** (step / _STEPS_OF_AN_OCTAVE):.3g}") for step in steps))
    return None if set(speeds) == {1.0} else speeds


@dataclass(frozen=True)
class _Clock:
    """Runs stages of a model with memory and weights. The fields are the arguments of `profile_layers`."""

    adapter: Adapter
    workload: Workload
    device: torch.device
    loss: Loss
    barrier: Callable[[], None] | None
    ranks: Ranks | None
    repeats: int
    budget_seconds: float

    @cached_property
    def tracer(self) -> LayerTracer:
        """The tracer of layers as they run on the device."""
        division = Division() if self.ranks is None else self.ranks.division
        return LayerTracer(self.adapter, loss=self.loss, as_on_gpu=self.device.type == "cuda", division=division)

    def of_classes(self, numbers: Collection[int]) -> tuple[Mapping[int, Seconds], Seconds]:
        """The seconds of each class of layers, by the layer that runs, and of a stage beyond its layers."""
        alike, kinds = self.tracer.run.first_alike(), self.tracer.run.adapter.layers
        layers: dict[int, Seconds] = {}
        beyond: dict[str, Seconds] = {}
        for number in numbers:
            following = alike[number : number + _BLOCKS_IN_A_ROW]
            count = len([*takewhile(partial(eq, alike[number]), following)])
            if kinds[number].kind == "block" and count > 1:
                alone = self.measure(number, number + 1)
                layers[number] = self.measure(number, number + count).less(alone).divided(count - 1)
                beyond.setdefault(kinds[number].stack, alone.less(layers[number]))
        stage = Seconds.combined(beyond.values(), median) if beyond else Seconds(0.0, 0.0, 0.0)
        for number in numbers:
            if number not in layers:
                layers[number] = self.measure(number, number + 1).less(beyond.get(kinds[number].stack, stage))
        return layers, stage

    def stage(self, start: int, stop: int) -> Stage:
        """A run of layers as the executor has it."""
        model = self.tracer.run
        stage_model = assemble(model.adapter, range(start, stop), None, self.device, ranks=self.ranks)
        stage_model.overlap_sums()
        return Stage(stage_model, model.wants_gradient)

    def measure(self, start: int, stop: int) -> Seconds:
        """The median seconds of several forwards without a graph, forwards with a graph, and backwards."""
        stage, model = self.stage(start, stop), self.tracer.run.adapter
        own = replace(self.workload.within(self.adapter).micro_batch(model), loss=self.loss)
        micro_batch = on_devices([own], [self.device])[self.device][0]
        with torch.device(self.device):
            context = context_of(stage.model, micro_batch)
        runs: list[Seconds] = []
        if self.barrier is not None:
            self.barrier()
        begin = time.perf_counter()
        with keeping_weights(model.autocast):
            while len(runs) < 3 or (len(runs) <= self.repeats and self._elapsed(begin) < self.budget_seconds):
                runs.append(self._run(stage, context))
        return Seconds.combined(runs[1:], median)

    def _run(self, stage: Stage, context: Context) -> Seconds:
        """Run and time a forward without a graph, a forward with a graph, and a backward."""
        marks = [_now(self.device)]
        stage.forward(context, keep_graph=False)
        marks.append(_now(self.device))
        outputs = stage.forward(context, keep_graph=True)
        marks.append(_now(self.device))
        wanted = [name for name, is_wanted in stage.trainable_outputs.items() if is_wanted]
        gradients = {name: torch.randn_like(outputs[name]) for name in wanted}
        del outputs
        begun = _now(self.device)
        stage.backward(0, gradients)
        return Seconds(marks[1] - marks[0], marks[2] - marks[1], _now(self.device) - begun)

    def _elapsed(self, begin: float) -> float:
        """The seconds since `begin`, the most of all ranks: they run each layer together, and so equally often."""
        seconds = time.perf_counter() - begin
        return seconds if self.ranks is None else float(self.ranks.largest(torch.tensor(seconds, device=self.device)))

    def update_seconds(self, make_optimizer: MakeOptimizer) -> float | None:
        """The seconds of an update per parameter, clipping included, on the layer with the most parameters. None: no
        layer is trained."""
        model = self.tracer.run
        largest = max(model.first_alike(), key=lambda number: model.own[number].trainable_count)
        stage = self.stage(largest, largest + 1)
        parameters = [p for p in stage.model.parameters.values() if p.requires_grad]
        if not parameters:
            return None
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make_optimizer(parameters)
        runs = []
        if self.barrier is not None:
            self.barrier()
        for _ in range(self.repeats + 1):
            start = _now(self.device)
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
            optimizer.step()
            runs.append(_now(self.device) - start)
        return median(runs[1:]) / sum(p.numel() for p in parameters)


@cache
def this_machine(device: torch.device, num_processes: int = 1) -> Device:
    """Memory, rate of matrix products by type and bandwidths of a device of this machine, and of a GPU's host.

    They are measured once in a process. A GPU's memory is what is free and what this process holds, without what
    kernels will take beside tensors. A CPU is shared: its memory is divided by the number of processes, and this
    process's threads have the rate.

    Args:
        device: a CUDA device or the CPU.
        num_processes: processes that will share a CPU's memory.
    """
    rates = {dtype: _matrix_rate(getattr(torch, dtype), device) for dtype in _DTYPES}
    memory = device_memory(DeviceFacts.of(device), num_processes)
    if device.type == "cuda":
        name, link = torch.cuda.get_device_name(device), LINKS["pcie4"]
        reserved = Device.reserved_share, Device.reserved_working_share
        sheet, host = _sheet_of(device), _host_of(device)
    else:
        name, link, reserved = "this machine", _loopback(), (_RESERVED_SHARE, _RESERVED_SHARE)
        sheet, host = cpu(1), Host()
    return Device(
        name,
        memory,
        rates,
        _memory_rate(device),
        link,
        *reserved,
        call_seconds=_call_seconds(device),
        has_host=device.type == "cuda",
        host=host,
        workspace_bytes=sheet.workspace_bytes,
        fp16_accumulation=sheet.fp16_accumulation,
    )


def rated_machine(device: torch.device, num_processes: int = 1) -> Device:
    """A device of this machine by its data sheet, and the memory that every machine like it has: nothing is timed.

    Args:
        device: a CUDA device or the CPU.
        num_processes: processes that will share a CPU's memory.
    """
    memory = steady_memory(DeviceFacts.of(device), num_processes)
    if device.type == "cuda":
        return replace(_sheet_of(device), memory_bytes=memory)
    sheet, share = cpu(torch.get_num_threads()), _RESERVED_SHARE
    return replace(sheet, memory_bytes=memory, reserved_share=share, reserved_working_share=share)


def _sheet_of(device: torch.device) -> Device:
    """The data sheet of a GPU of this machine."""
    of = torch.cuda.get_device_properties(device)
    return like_gpu(of.name, of.total_memory, (of.major, of.minor))


def steady_memory(device: DeviceFacts, num_processes: int = 1) -> int:
    """The bytes of `device_memory`. A GPU's are rounded down to sixteenths, so a little less changes no choice."""
    memory = device_memory(device, num_processes)
    return device.total_bytes // 16 * (16 * memory // device.total_bytes) if device.is_gpu else memory


def device_memory(device: DeviceFacts, num_processes: int = 1) -> int:
    """The bytes that a process can have of a device, as in `this_machine`."""
    return device.free_bytes - _KERNELS_BYTES if device.is_gpu else device.total_bytes // num_processes


def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """The operations a second of a product that is large enough, with sums in float32."""
    matmul, rate = torch.backends.cuda.matmul, 0.0
    allowed, matmul.allow_fp16_accumulation = matmul.allow_fp16_accumulation, False
    for size in _PRODUCT_SIZES[device.type]:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = _seconds(partial(torch.matmul, left, right), device)
        rate = 2 * size**3 / seconds
        if seconds > _LONG_PRODUCT_SECONDS:
            break
    matmul.allow_fp16_accumulation = allowed
    return rate


def _memory_rate(device: torch.device) -> float:
    """The bytes a second that a copy reads and writes."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _host_of(device: torch.device) -> Host:
    """The link of a GPU to pinned memory of its host, and the bandwidth of that memory for the threads of this process.

    All processes together are assumed to have no more bandwidth, unless that is less than the usual one.
    """
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device=device)
    link = source.nbytes / _seconds(lambda: target.copy_(source, non_blocking=True), device)
    of_process = _memory_rate(torch.device("cpu"))
    latency = LINKS["pcie4"].latency_seconds
    return Host(Level(2, link, latency), 1, max(of_process, Host.bytes_per_second), of_process)


def _call_seconds(device: torch.device) -> float:
    """Seconds of an operation that computes next to nothing, with its part of autograd's and the modules' code."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(8, 8, device=device), nn.GELU())]
    model, given = nn.Sequential(*layers), torch.ones(8, 8, device=device)

    def step() -> None:
        model(given).sum().backward()

    with Tracker() as tracker, tracker.phase() as phase:
        step()
    return _seconds(step, device) / phase.calls


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median time of a call, after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        start = _now(device)
        call()
        times.append(_now(device) - start)
    return median(times[1:])


def _now(device: torch.device) -> float:
    """The time at which the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _loopback(size_bytes: int = 1 << 25) -> Level:
    """Measure the link between two processes of this machine as gloo uses it: both sum a bucket of gradients.

    In a sum over two processes each sends as many bytes as the bucket has. Making the bucket, copying through sockets
    and adding take the time of the processes' cores, so all of it counts.
    """
    store = dist.HashStore()

    def sum_buckets(rank: int) -> tuple[float, Any]:
        group = loopback_group(store, rank, _LOOPBACK_LIMIT)

        def sum_one() -> None:
            group.allreduce([torch.ones(size_bytes // 4)]).wait()

        return _seconds(sum_one, torch.device("cpu")), group

    with ThreadPoolExecutor(2) as threads:
        sides = [threads.submit(sum_buckets, rank) for rank in range(2)]
        # The side that fails ends first. No group may end its connection while the other one is at work.
        seconds = max(side.result()[0] for side in as_completed(sides))
    return Level(2, size_bytes / seconds, 1e-4)
