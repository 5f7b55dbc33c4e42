"""The placement of stages on workers: which workers hold each stage, on which of their devices, and their ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hf_gpipe.errors import ScheduleError, one_line
from hf_gpipe.schedule import groups

MOST_PLACES = 100_000
"""The most replicas of all stages together: before anything is made that is as large as a number in a file."""


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """Which workers, and which device of each, hold each stage.

    The workers of a stage are its replicas. Builders deal micro-batches out to them in turn: micro-batch m runs on the
    stage's replica m % r, where r is their number (the round robin of PipeDream's 1F1B-RR, arXiv 1806.03377). In
    groups of c micro-batches that depend on each other, all of a group run on replica (m // c) % r. Where an action
    runs, its row in the table says. Several stages may share a worker, in any order.

    Where stages are shared, their weights are in CPU memory that all workers of a replica's pipeline share
    (`pipelines`). An action may then stand in the row of any of them. `workers` has of each stage the one that updates
    it.

    Args:
        workers: of each stage its worker, or the workers of its replicas in order.
        devices: the device string of each stage on each of its workers, for example "cuda:1", in the order of `places`;
            None: the process's default device.
        group_size: how many consecutive micro-batches depend on each other (`hf_gpipe.schedule.groups`).
        ranks_per_worker: T, the number of processes that form a worker, each with a part of every divided layer.
        is_shared: whether stages are shared by the workers of their pipeline; `devices` then has one for each worker.
        workers_per_rank: where they are, the number of workers that one process runs, each on a device of its own.

    Raises:
        ScheduleError: an empty group, no stage, a worker without a stage or twice in one, devices that do not fit the
            places, or shared stages whose replicas share workers.
    """

    workers: tuple[tuple[int, ...], ...]
    """The workers of each stage's replicas. The workers are numbered from 0, and each holds a stage."""
    devices: tuple[str, ...] | None
    group_size: int
    ranks_per_worker: int
    is_shared: bool
    workers_per_rank: int

    def __init__(
        self,
        workers: Sequence[int | Sequence[int]],
        devices: Sequence[str] | None = None,
        group_size: int = 1,
        ranks_per_worker: int = 1,
        is_shared: bool = False,
        workers_per_rank: int = 1,
    ) -> None:
        every = tuple((own,) if isinstance(own, int) else tuple(own) for own in workers)
        object.__setattr__(self, "workers", every)
        object.__setattr__(self, "devices", None if devices is None else tuple(devices))
        object.__setattr__(self, "group_size", group_size)
        object.__setattr__(self, "ranks_per_worker", ranks_per_worker)
        object.__setattr__(self, "is_shared", is_shared)
        object.__setattr__(self, "workers_per_rank", workers_per_rank)
        groups.check_size(group_size)
        if not every:
            raise ScheduleError("a placement has no stage: name the process of at least one.")
        for stage, own in enumerate(every):
            if not own or len(set(own)) < len(own):
                raise ScheduleError(
                    f"placement: the replicas of stage {stage} are on processes {list(own)}; name at least one, and "
                    "none twice."
                )
        used = {process for own in every for process in own}
        if used != set(range(len(used))):
            raise ScheduleError(
                f"placement {self}: the processes must be numbered from 0 to {len(used) - 1} without a gap, for each "
                "process holds at least one stage."
            )
        if is_shared and (len(set(map(len, every))) > 1 or sum(map(len, self.pipelines)) > len(used)):
            raise ScheduleError(
                f"placement {self}: stages are shared by the workers of their replica's pipeline, so each stage has as "
                'many replicas, and no worker is of two; write for example "0,2 1,3".'
            )
        if self.devices is None:
            return
        if is_shared and len(self.devices) != len(used):
            raise ScheduleError(
                f"placement: {len(self.devices)} devices for {len(used)} workers that share stages; name one for each."
            )
        if not is_shared and len(self.devices) != len(self.places):
            raise ScheduleError(
                f"placement: {len(self.devices)} devices for {len(every)} stages with {len(self.places)} replicas in "
                "all; name one device per stage, or one for each of its replicas."
            )
        for device in self.devices:
            if not device or device.split() != [device]:
                raise ScheduleError(f"placement: {device!r} is not a device; write for example 'cpu' or 'cuda:1'.")

    def __str__(self) -> str:
        """The text form: the worker of each stage, or its workers with commas, as in "0,1 2"."""
        return " ".join(",".join(map(str, own)) for own in self.workers)

    @classmethod
    def one_stage_each(cls, num_stages: int, replicas: int | Sequence[int] = 1) -> Placement:
        """Every replica of a stage on a worker of its own.

        Args:
            num_stages: K.
            replicas: the number of replicas. One number D for all stages gives D pipelines of K consecutive workers:
                replica d of stage s is on worker d K + s. Different numbers, one for each stage, put the replicas of a
                stage on consecutive workers, one stage after another.

        Raises:
            ScheduleError: no stage, or numbers of replicas that do not fit.
        """
        counts = replicas_of(num_stages, replicas)
        if len(set(counts)) <= 1:
            return cls.spread(num_stages, num_stages).replicated(counts[0] if counts else 1)
        starts = [sum(counts[:stage]) for stage in range(num_stages)]
        return cls([range(start, start + count) for start, count in zip(starts, counts, strict=True)])

    @classmethod
    def spread(cls, num_stages: int, num_processes: int) -> Placement:
        """Consecutive stages in each process; the numbers of stages differ by at most one, the larger ones first.

        Raises:
            ScheduleError: fewer stages than processes, or no process.
        """
        if not 1 <= num_processes <= num_stages:
            raise ScheduleError(
                f"{num_stages} stages cannot be spread over {num_processes} processes: every process needs a stage. "
                f"Use between 1 and num_stages processes."
            )
        base, extra = divmod(num_stages, num_processes)
        return cls(tuple(p for p in range(num_processes) for _ in range(base + (p < extra))))

    @classmethod
    def interleaved(cls, num_stages: int, num_processes: int) -> Placement:
        """Stages assigned in turn: stage s in process s % num_processes, the same number in each.

        Raises:
            ScheduleError: no process, or a number of stages that is not a multiple of the number of processes.
        """
        if num_processes < 1 or num_stages < 1 or num_stages % num_processes:
            raise ScheduleError(
                f"{num_stages} stages cannot be interleaved over {num_processes} processes: every process holds the "
                "same number of them. Let num_stages be a multiple of the number of processes."
            )
        return cls(tuple(stage % num_processes for stage in range(num_stages)))

    @classmethod
    def shared(cls, num_stages: int, num_workers: int) -> Placement:
        """Stages that all workers share; stage s is updated by worker s % num_workers.

        Raises:
            ScheduleError: no worker, or more workers than stages.
        """
        if not 1 <= num_workers <= num_stages:
            raise ScheduleError(
                f"{num_stages} stages cannot be shared by {num_workers} workers: every worker updates one. Use between "
                "1 and num_stages workers."
            )
        return cls(tuple(stage % num_workers for stage in range(num_stages)), is_shared=True)

    def balanced(self, sizes: Sequence[int]) -> Placement:
        """Share the updates of shared stages out by the `sizes` of the stages: the largest stage first, always to the
        worker of its pipeline that has least. Equal stages stay where `shared` has them."""
        if not self.is_shared:
            return self
        owners: list[list[int]] = [[] for _ in self.workers]
        for pipeline in self.pipelines:
            loads = dict.fromkeys(pipeline, (0, 0))
            for stage in sorted(range(self.num_stages), key=lambda stage: -sizes[stage]):
                worker = min(pipeline, key=lambda member: loads[member])
                loads[worker] = loads[worker][0] + sizes[stage], loads[worker][1] + 1
                owners[stage].append(worker)
        return replace(self, workers=tuple(map(tuple, owners)))

    @classmethod
    def v_shaped(cls, num_stages: int, num_processes: int) -> Placement:
        """Stages in the shape of a V: process k of P has the stages k and 2P-1-k, so the last one has two neighbours.

        Raises:
            ScheduleError: the number of stages is not twice the number of processes.
        """
        if num_processes < 1 or num_stages != 2 * num_processes:
            raise ScheduleError(
                f"{num_stages} stages cannot be placed in a V on {num_processes} processes: every process holds two. "
                "Let num_stages be twice the number of processes."
            )
        return cls((*range(num_processes), *reversed(range(num_processes))))

    def replicated(self, times: int) -> Placement:
        """D copies of this placement: the workers of copy d follow those of copy d - 1, in the same order.

        Neighbouring stages so keep neighbouring workers. With several replicas already, each has D copies.

        Raises:
            ScheduleError: `times` is below 1.
        """
        if times < 1:
            raise ScheduleError(f"a stage has {times} replicas; give it at least one.")
        starts = range(0, times * self.num_processes, self.num_processes)
        workers = [[start + process for start in starts for process in own] for own in self.workers]
        devices = None if self.devices is None else self.devices * times
        if self.devices is not None and not self.is_shared:
            of_place = dict(zip(self.places, self.devices, strict=True))
            devices = tuple(
                of_place[s, process] for s, own in enumerate(self.workers) for _ in starts for process in own
            )
        return Placement(workers, devices, self.group_size, is_shared=self.is_shared)

    @property
    def num_stages(self) -> int:
        return len(self.workers)

    @property
    def num_processes(self) -> int:
        """The number of workers."""
        return max(map(max, self.workers)) + 1

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(map(len, self.workers))

    @property
    def has_replicas(self) -> bool:
        """Whether any stage has more than one."""
        return max(self.replicas) > 1

    @property
    def has_several_devices(self) -> bool:
        """Whether the stages are on several devices by name."""
        return len(set(self.devices or ())) > 1

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each replica of the pipeline, ascending, where stages are shared."""
        return tuple(tuple(sorted({own[r] for own in self.workers})) for r in range(min(self.replicas)))

    def pipeline_of(self, worker: int) -> tuple[int, ...]:
        """The workers that share a worker's stages, itself among them."""
        return (
            next((pipeline for pipeline in self.pipelines if worker in pipeline), (worker,))
            if self.is_shared
            else (worker,)
        )

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Every (stage, worker that holds it), by stage and then by replica."""
        return tuple((stage, process) for stage, own in enumerate(self.workers) for process in own)

    @property
    def rows(self) -> tuple[tuple[int | None, int], ...]:
        """The rows of pictures: the places, or where stages are shared (None, worker)."""
        return tuple((None, worker) for worker in range(self.num_processes)) if self.is_shared else self.places

    def row_of(self, stage: int, process: int) -> tuple[int | None, int]:
        """The row in which a stage's actions on one of its workers are drawn."""
        return None if self.is_shared else stage, process

    def ranks_of(self, worker: int) -> tuple[int, ...]:
        """The processes that form a worker, by their ranks, which follow each other."""
        if self.workers_per_rank > 1:
            return (worker // self.workers_per_rank,)
        return tuple(range(worker * self.ranks_per_worker, (worker + 1) * self.ranks_per_worker))

    def worker_with(self, rank: int) -> int:
        """The worker that a process belongs to; of several that it runs the first."""
        return rank // self.ranks_per_worker * self.workers_per_rank

    def workers_with(self, rank: int) -> tuple[int, ...]:
        """The workers whose rows a process runs."""
        first = self.worker_with(rank)
        return tuple(range(first, first + self.workers_per_rank))

    def worker_of(self, stage: int, micro_batch: int | None) -> int:
        """The worker to which a stage's micro-batch is dealt out; of a stage without replicas its only one.

        Raises:
            ScheduleError: there is no micro-batch, as of a reduction or an update, which stand on all replicas.
        """
        own = self.workers[stage]
        if len(own) == 1:
            return own[0]
        if micro_batch is None:
            raise ScheduleError(
                f"what concerns a whole step of stage {stage} stands on each of the processes {list(own)}; ask for "
                "`workers`."
            )
        return own[micro_batch // self.group_size % len(own)]

    def device_of(self, stage: int, process: int) -> str | None:
        """The device string of a stage in one of its workers; None: the process's default device."""
        if self.devices is None:
            return None
        return self.devices[process if self.is_shared else self.places.index((stage, process))]

    def place_of(self, process: int, stage: int) -> tuple[int, str | None]:
        """The device of a stage in one of its workers, as (process, device)."""
        return process, self.device_of(stage, process)

    def stages_of(self, process: int) -> tuple[int, ...]:
        """The stages that a worker holds, ascending; of shared ones those that it updates."""
        return tuple(stage for stage, own in enumerate(self.workers) if process in own)

    def stages_run_by(self, process: int) -> tuple[int, ...]:
        """The stages whose actions may stand in a worker's row."""
        return tuple(range(self.num_stages)) if self.is_shared else self.stages_of(process)

    def micro_batches_of(self, stage: int, process: int, num_micro_batches: int) -> Sequence[int]:
        """The micro-batches, of so many, that a stage runs in one of its workers; it may be none."""
        own, size = self.workers[stage], self.group_size
        if size == 1:
            return range(own.index(process), num_micro_batches, len(own))
        return [m for m in range(num_micro_batches) if m // size % len(own) == own.index(process)]

    def groups_of(self, micro_batches: Sequence[int]) -> list[Sequence[int]]:
        """Micro-batches, ascending and of whole groups, by group."""
        return [
            micro_batches[first : first + self.group_size] for first in range(0, len(micro_batches), self.group_size)
        ]

    def backward_order(self, micro_batches: Sequence[int]) -> list[int]:
        """Micro-batches in the order of their backwards: the groups in order, of each the last one first."""
        return [m for group in self.groups_of(micro_batches) for m in reversed(group)]

    @property
    def edges(self) -> tuple[tuple[int, int, int], ...]:
        """The pairs of workers that exchange a micro-batch: (stage, its worker, the next stage's worker), ascending.

        A worker that holds both stages is in it too: its edge is within the process.
        """
        if self.is_shared:
            every = [(worker, other) for pipeline in self.pipelines for worker in pipeline for other in pipeline]
            return tuple(sorted((stage, *pair) for stage in range(self.num_stages - 1) for pair in every))
        return edges_between(pairwise(self.workers))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The workers that reduce gradients together: of each stage with replicas, each group once."""
        return tuple(dict.fromkeys(own for own in self.workers if len(own) > 1))


def edges_between(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[tuple[int, int, int], ...]:
    """The edges of stages, from the workers of each stage and of the stage that it exchanges micro-batches with."""
    edges = set()
    for stage, (own, others) in enumerate(pairs):
        # The replicas of both stages are the same again after so many micro-batches.
        for micro_batch in range(math.lcm(len(own), len(others))):
            edges.add((stage, own[micro_batch % len(own)], others[micro_batch % len(others)]))
    return tuple(sorted(edges))


def replicas_of(num_stages: int, replicas: int | Sequence[int]) -> tuple[int, ...]:
    """The number of replicas of each stage, from one number for all or one for each.

    Raises:
        ScheduleError: a number below 1, or not one for each stage, or too many of them.
    """
    if num_stages * (replicas if isinstance(replicas, int) else 1) > MOST_PLACES:
        raise ScheduleError(
            f"num_stages is {num_stages}, and replicas is {one_line(str(replicas), 60)}: over {MOST_PLACES} in all; "
            "use fewer."
        )
    counts = (replicas,) * num_stages if isinstance(replicas, int) else tuple(replicas)
    if len(counts) != num_stages:
        raise ScheduleError(
            f"replicas {list(counts)} has {len(counts)} entries for {num_stages} stages; give one for each, or one "
            "number for all."
        )
    if any(count < 1 for count in counts):
        raise ScheduleError(f"replicas is {replicas}: every stage has at least one replica.")
    return counts
