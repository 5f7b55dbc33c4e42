"""The orders of unlike processes: which of them hold which stages.

Processes of the same memory and speed are of one kind, and only the kinds matter: the replicas of a stage can be
exchanged, and so can processes of one kind. For few processes there are few orders, and all of them are tried. For more
those are tried in which the processes of a kind follow each other; the best plan is then improved by exchanging two
processes as long as that helps (choose.py).

Processes that can stay where they are stay there. So where a cluster has several levels, an order moves few processes
to another machine; which of several alike ones is moved is not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, permutations, product

from hf_gpipe.planner.limits import ALIKE, MemoryLimit, limit_of
from hf_gpipe.schedule import Placement

#: Up to so many orders of a placement all are tried: those of four unlike processes.
_FEW_ORDERS = 24

Kinds = Sequence[int]
"""The number of the kind of each process; the kinds are numbered in the order of their first process."""


def kinds_of(memory_bytes: MemoryLimit, speeds: Sequence[float] | None, num_processes: int) -> Kinds:
    """The kind of each process. Processes of one kind have the same speed, and limits of memory that are `ALIKE`.

    A plan must fit the limit of each process all the same.
    """
    limits = [limit_of(memory_bytes, one) or 0 for one in range(num_processes)]
    group: dict[float, float] = {}
    for limit in sorted(set(limits)):
        least = next(reversed(group.values()), limit)
        group[limit] = least if limit < ALIKE * least else limit
    each = [(group[limit], 1.0 if speeds is None else speeds[one]) for one, limit in enumerate(limits)]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(each))}
    return [numbers[kind] for kind in each]


def orders(placement: Placement, kinds: Kinds) -> list[Placement]:
    """A placement, and the same with its processes in other orders: all orders that differ, or some of many.

    Args:
        placement: with the processes in the given order; it is the first result.
        kinds: of the processes.
    """
    if len(set(kinds)) == 1:
        return [placement]
    cells = _cells(placement)
    sizes = [len(own) for own in cells]
    found = list(islice(_shares(sizes, Counter(kinds)), _FEW_ORDERS + 1))
    if len(found) > _FEW_ORDERS:
        found = [
            _in_a_row(sizes, [kind for kind in order for _ in range(kinds.count(kind))])
            for order in islice(permutations(set(kinds)), _FEW_ORDERS)
        ]
    return list(dict.fromkeys([placement, *(_placed(placement, cells, share, kinds) for share in found)]))


def exchanges(placement: Placement, kinds: Kinds) -> Iterator[Placement]:
    """The placement with two processes exchanged, of different kinds and with different stages; of alike ones once."""
    cells = _cells(placement)
    for first, second in combinations(cells, 2):
        pairs = {(kinds[one], kinds[other]): (one, other) for one, other in product(first, second)}
        for (kind, other_kind), (one, other) in pairs.items():
            if kind != other_kind:
                yield _renamed(placement, {one: other, other: one})


def _cells(placement: Placement) -> list[list[int]]:
    """The processes that hold the same stages, together; in the order of the stages."""
    cells: dict[tuple[int, ...], list[int]] = {}
    for process in dict.fromkeys(one for own in placement.workers for one in own):
        cells.setdefault(tuple(placement.stages_of(process)), []).append(process)
    return list(cells.values())


def _shares(sizes: Sequence[int], left: Mapping[int, int]) -> Iterator[list[Counter[int]]]:
    """Every way to share out kinds: of each cell the number of its processes of each kind."""
    if not sizes:
        yield []
        return
    for own in _filled(sizes[0], list(left.items())):
        for rest in _shares(sizes[1:], {kind: left[kind] - own[kind] for kind in left}):
            yield [own, *rest]


def _filled(size: int, left: Sequence[tuple[int, int]]) -> Iterator[Counter[int]]:
    """Every way to take `size` of the kinds that are left, each given with its number."""
    if not left:
        if size == 0:
            yield Counter()
        return
    (kind, count), others = left[0], left[1:]
    enough = size - sum(number for _, number in others)
    for chosen in range(max(0, enough), min(size, count) + 1):
        for rest in _filled(size - chosen, others):
            yield rest + Counter({kind: chosen})


def _in_a_row(sizes: Sequence[int], kinds: Sequence[int]) -> list[Counter[int]]:
    """The share of kinds that are given to the cells one after another."""
    row = iter(kinds)
    return [Counter(islice(row, size)) for size in sizes]


def _placed(
    placement: Placement, cells: Sequence[Sequence[int]], share: Sequence[Counter[int]], kinds: Kinds
) -> Placement:
    """The placement with a share of the kinds, in which processes that can stay in their cell stay there."""
    open_places: list[tuple[int, int]] = []
    moved: dict[int, list[int]] = {}
    for own, wanted in zip(cells, share, strict=True):
        missing, places = Counter(wanted), []
        for process in own:
            if missing[kinds[process]]:
                missing[kinds[process]] -= 1
            else:
                places.append(process)
                moved.setdefault(kinds[process], []).append(process)
        open_places += zip(places, missing.elements(), strict=True)
    waiting = {kind: iter(sorted(own)) for kind, own in moved.items()}
    return _renamed(placement, {place: next(waiting[kind]) for place, kind in open_places})


def _renamed(placement: Placement, names: Mapping[int, int]) -> Placement:
    return Placement([[names.get(one, one) for one in own] for own in placement.workers])
