"""The mesh of a pipeline: which stages each process has, on which devices, and the groups in which stages talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
import torch.distributed as dist

from hf_gpipe.adapters.parts.ranks import ProcessRanks
from hf_gpipe.errors import UserError
from hf_gpipe.job.world import World, backend_of
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.settings.division import Division


@dataclass(frozen=True)
class Mesh(World):
    """The processes of a pipeline whose stages are placed, as seen by one of them.

    Attributes:
        placement: the workers of each stage, and its devices where a process has several.
    """

    placement: Placement = field(kw_only=True)

    @classmethod
    def of(cls, world: World, placement: Placement) -> Mesh:
        """Place the stages on the processes of a job.

        The stages of a process are spread over its devices, consecutive ones together. The result's placement names the
        devices of all stages, if a process has several.

        Raises:
            UserError: a process has more devices than stages, or several and shares its stages with other ranks.
        """
        several = [rank for rank in world.ranks if len(rank.devices) > 1]
        if placement.ranks_per_worker > 1 and several:
            raise UserError(
                f"{Division(placement.ranks_per_worker).text} and a process has several devices "
                f"({', '.join(device.name for device in several[0].devices)}); give each process one device, and start "
                "more processes"
            )
        place = _shared_by_workers if placement.is_shared else _on_devices
        return cls(**{f.name: getattr(world, f.name) for f in fields(World)}, placement=place(world, placement))

    @cached_property
    def worker(self) -> int:
        """The worker that this process belongs to: it runs the worker's row of a table."""
        return self.placement.worker_with(self.rank)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """The workers whose rows this process runs: `worker`, and where stages are shared one for each device."""
        return self.placement.workers_with(self.rank)

    @cached_property
    def place(self) -> int:
        """This process's place among the ranks of its worker."""
        return self.placement.ranks_of(self.worker).index(self.rank)

    @cached_property
    def own_workers(self) -> Mapping[int, int]:
        """The worker of each stage of this process, by stage, ascending."""
        return dict(sorted((stage, worker) for worker in self.workers for stage in self.placement.stages_of(worker)))

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of this process, ascending."""
        return tuple(self.own_workers)

    @cached_property
    def stage_devices(self) -> Mapping[int, torch.device]:
        """The device of each of this process's stages."""
        return {stage: self.device_of(worker, stage) for stage, worker in self.own_workers.items()}

    def device_of(self, worker: int, stage: int) -> torch.device:
        """The device on which one of this process's workers runs a stage."""
        name = self.placement.device_of(stage, worker)
        return self.device if name is None else torch.device(name)

    def peer(self, worker: int) -> int:
        """The rank that stands for this one in another worker: their messages go there."""
        return self.placement.ranks_of(worker)[self.place]

    def replicas_of(self, stage: int) -> tuple[int, ...]:
        """The ranks that stand for this one in the replicas of a stage."""
        return tuple(map(self.peer, self.placement.workers[stage]))

    def leader_of(self, stage: int) -> int:
        """The first process of the stage's first replica: it writes the stage's files."""
        return self.placement.ranks_of(self.placement.workers[stage][0])[0]

    def leads(self, stage: int) -> bool:
        """Whether this process is the leader of a stage."""
        return self.leader_of(stage) == self.rank

    def is_in_first_replica(self, stage: int) -> bool:
        """Whether this process has the stage's first replica, or a part of it: its parameters count once."""
        return self.placement.workers[stage][0] in self.workers

    def new_group(self, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
        """Create a group of some processes for tensors on a kind of device. Every process must call it.

        Args:
            ranks: of several workers, those that stand for this one. Those at each other place form a group as well.
            device: of the tensors.
        """
        groups = [
            self.job.new_group([rank - self.place + place for rank in ranks], backend_of(device))
            for place in range(self.placement.ranks_per_worker)
        ]
        return groups[self.place]

    def worker_ranks(self, division: Division) -> ProcessRanks | None:
        """The ranks of this process's worker, whose layers are divided so; None: it is the only one. Every process must
        call it."""
        if self.placement.ranks_per_worker == 1:
            return None
        groups = [
            self.job.new_group(self.placement.ranks_of(worker), backend_of(self.device))
            for worker in range(self.placement.num_processes)
        ]
        return ProcessRanks(division, self.place, groups[self.worker], self.device)


def ranks_of_workers(world: World, division: Division) -> ProcessRanks | None:
    """`Mesh.worker_ranks` where layers are divided so, before any stage is placed."""
    if division.is_whole:
        return None
    count = division.workers_among(world.num_processes)
    return Mesh.of(world, division.placed(Placement.spread(count, count))).worker_ranks(division)


def _on_devices(world: World, placement: Placement) -> Placement:
    """The placement with the device of each stage, where a process has several."""
    names: dict[tuple[int, int], str] = {}
    for worker in range(placement.num_processes):
        stages, (rank, *_) = placement.stages_of(worker), placement.ranks_of(worker)
        devices = [device.name for device in world.ranks[rank].devices] or ["cpu"]
        if len(devices) > len(stages):
            raise UserError(
                f"process {rank} has {len(devices)} devices for {len(stages)} stages: {', '.join(devices)}; name at "
                "most one for each stage"
            )
        names |= {(stage, worker): devices[i * len(devices) // len(stages)] for i, stage in enumerate(stages)}
    if all(len(rank.devices) <= 1 for rank in world.ranks):
        return placement
    return replace(placement, devices=tuple(names[place] for place in placement.places))


def _shared_by_workers(world: World, placement: Placement) -> Placement:
    """The placement of stages that devices share: of a process with several, each is a worker.

    Raises:
        UserError: the processes of a pipeline are on several machines, or have different numbers of devices.
    """
    counts = {max(1, len(rank.devices)) for rank in world.ranks}
    if len(counts) > 1:
        raise UserError(
            f"stages are shared by processes with {' and '.join(map(str, sorted(counts)))} devices; give each "
            "process as many"
        )
    (each,) = counts
    if each > 1:
        own = [[worker * each for worker in workers] for workers in placement.workers]
        # The stages of a process are updated in turn by its devices' workers.
        turns = [sum(earlier == workers for earlier in own[:stage]) % each for stage, workers in enumerate(own)]
        spread = [[first + turn for first in workers] for workers, turn in zip(own, turns, strict=True)]
        if {worker for workers in spread for worker in workers} != set(range(each * placement.num_processes)):
            raise UserError(
                f"{placement.num_stages} stages are shared by {each} devices of each of {placement.num_processes} "
                "processes, and each updates one at least; give more stages, or fewer devices"
            )
        devices = [device.name for rank in world.ranks for device in rank.devices]
        placement = Placement(spread, devices, is_shared=True, workers_per_rank=each)
    for pipeline in placement.pipelines:
        hosts = {world.hosts[rank] for worker in pipeline for rank in placement.ranks_of(worker)}
        if len(hosts) > 1:
            raise UserError(
                f"the stages of a pipeline are shared by processes on {' and '.join(sorted(hosts))}, which share no "
                "memory; use replicas, one for each machine, or another schedule, such as breadth_first"
            )
    return placement


def table_of_reader(world: World, make: Callable[[], Schedule | None]) -> Schedule | None:
    """Make a table in the main process, for every process. Every process calls it; it travels as its text."""

    def text() -> str | None:
        table = make()
        return None if table is None else table.text()

    told = world.from_main(text)
    return None if told is None else Schedule.from_text(told)
