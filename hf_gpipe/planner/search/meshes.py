"""Meshes, which say which processes hold which stages: the first meshes of a search, and the steps between meshes.

A mesh is a row of processes with cuts in it: the processes between two cuts are the replicas of a stage. The search
begins with even cuts. It goes on by one cut more, one cut less, a cut that moves along the row, or two processes of
other devices that change places, so it can come to every mesh in which a process has one stage. Of the meshes in which
a process has several stages, the search has the even meshes only. The simulator says how good a mesh is (choose.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, islice, pairwise, permutations

from hf_gpipe.partition.count import by_count
from hf_gpipe.planner.plan import Planner
from hf_gpipe.schedule import Placement, placement_for
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.settings.pipeline import PipelineConfig

#: The most processes with which the search begins with every mesh that has one stage a process.
_FEW_PROCESSES = 7
#: The most processes with which it begins with every order of different processes.
_FEW_ORDERED = 4
#: The number of orders of the classes of devices with which it begins, for more processes.
_MOST_ORDERS = 6


def with_mesh(config: PipelineConfig, placement: Placement) -> PipelineConfig:
    """The configuration with the mesh of a placement."""
    counts = placement.replicas
    replicas = counts[0] if len(set(counts)) == 1 else counts
    usual = placement_for("gpipe", len(counts), placement.num_processes, replicas)
    return config.on_mesh(len(counts), replicas, placement=None if placement == usual else str(placement))


class Meshes:
    """The meshes that a configuration allows on a number of processes.

    Args:
        planner: the planner of the model, which knows the memory, the speeds and the links of the processes.
        config: the configuration, whose `num_stages` or `replicas` are "auto" and number of processes is known.
    """

    def __init__(self, planner: Planner, config: PipelineConfig) -> None:
        self._size = config.processes
        self._most = planner.num_layers if config.num_stages == AUTO else int(config.num_stages)
        self._fewest = 1 if config.num_stages == AUTO else self._most
        self._replicas = config.replicas
        self._divisors = [number for number in range(1, self._size + 1) if self._size % number == 0]
        self._classes = planner.classes(self._size)
        depths = range(1, 1 if planner.cluster is None else len(planner.cluster.levels))
        #: The number of processes of a machine, and of each larger part of the cluster.
        self._machines = [planner.cluster.devices_in(depth) for depth in depths] if planner.cluster else []
        self._looks = [
            (number, *(process // size for size in self._machines)) for process, number in enumerate(self._classes)
        ]

    def first(self) -> list[Placement]:
        """The meshes with which a search begins: even meshes, the usual order first; all meshes of few processes."""
        usual = [*self._side_by_side(), *self._consecutive()]
        every: dict[object, Placement] = {}
        for row in self._rows():
            for placement in (_renamed(mesh, dict(enumerate(row))) for mesh in usual):
                looks = [tuple(sorted(self._looks[process] for process in own)) for own in placement.workers]
                every.setdefault(tuple(looks), placement)
        return list(every.values())

    def beside(self, placement: Placement, near: int = 0) -> list[Placement]:
        """The meshes that differ from a placement in a cut, with cuts beside the stage `near` first, or in two
        processes that have changed places."""
        return list(dict.fromkeys([*self._recut(placement, near), *self._exchanged(placement)]))

    def _side_by_side(self) -> Iterator[Placement]:
        """Yield D pipelines side by side, with one or two stages a process."""
        for replicas in self._divisors:
            of_pipeline = self._size // replicas
            asked = (self._most,) if self._fewest == self._most else (of_pipeline, 2 * of_pipeline)
            for num_stages in asked:
                if self._replicas in (AUTO, replicas) and of_pipeline <= num_stages <= self._most:
                    yield placement_for("gpipe", num_stages, self._size, replicas)

    def _consecutive(self) -> Iterator[Placement]:
        """Yield meshes with the replicas of a stage side by side."""
        most = min(self._most, self._size)
        if self._size <= _FEW_PROCESSES:
            places = range(1, self._size)
            cuts = [cuts for count in range(self._fewest, most + 1) for cuts in combinations(places, count - 1)]
        else:
            counts = {most, *(count for count in self._divisors if self._fewest <= count <= most)}
            cuts = [tuple(accumulate(by_count(self._size, count)))[:-1] for count in sorted(counts)]
        for each in cuts:
            placement = _cut(range(self._size), each)
            if self._replicas == AUTO or set(placement.replicas) == {self._replicas}:
                yield placement

    def _rows(self) -> Iterator[Sequence[int]]:
        """Yield the orders of the processes, the given order first."""
        processes = range(self._size)
        if self._size <= _FEW_ORDERED:
            yield from permutations(processes)
            return
        yield processes
        for size in self._machines:
            yield sorted(processes, key=lambda process: process % size)
        for order in islice(permutations(sorted(set(self._classes))), _MOST_ORDERS):
            yield sorted(processes, key=lambda process: order.index(self._classes[process]))

    def _recut(self, placement: Placement, near: int) -> Iterator[Placement]:
        """Yield meshes with a cut more, a cut less, or a cut moved by a process, or by a process of each machine."""
        if self._replicas != AUTO or len(placement.places) > self._size:
            return
        row = [process for own in placement.workers for process in own]
        cuts, places = set(accumulate(placement.replicas)) - {self._size}, range(1, self._size)
        steps = [way * step for step in (1, *(self._size // size for size in self._machines)) for way in (1, -1)]
        moved = [{at, at + step} for at in cuts for step in steps if at + step in places and at + step not in cuts]
        ends = [0, *accumulate(placement.replicas)][near : near + 2]
        every = [*moved, *({at} for at in places)]
        for changed in sorted(every, key=lambda changed: min(abs(at - end) for at in changed for end in ends)):
            others = cuts ^ changed
            if self._fewest <= len(others) + 1 <= self._most:
                made = _cut(row, others)
                # The usual order of processes where their order does not matter.
                is_alike = len(set(self._looks)) == 1
                yield Placement.one_stage_each(made.num_stages, made.replicas) if is_alike else made

    def _exchanged(self, placement: Placement) -> Iterator[Placement]:
        """Yield meshes in which two processes of different classes and stages change places, one for alike pairs."""
        stages = [placement.stages_of(process) for process in range(self._size)]
        pairs = {
            (self._classes[first], stages[first], self._classes[second], stages[second]): (first, second)
            for first, second in permutations(range(self._size), 2)
            if self._classes[first] < self._classes[second] and stages[first] != stages[second]
        }
        for first, second in pairs.values():
            yield _renamed(placement, {first: second, second: first})


def _cut(row: Sequence[int], cuts: Iterable[int]) -> Placement:
    """Cut a row of processes into stages."""
    return Placement([row[start:stop] for start, stop in pairwise((0, *sorted(cuts), len(row)))])


def _renamed(placement: Placement, names: Mapping[int, int]) -> Placement:
    return Placement([[names.get(process, process) for process in own] for own in placement.workers])
