"""Work in threads, for what spends its time outside of Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turn(workers: Sequence[Callable[[Item], Result]], items: Iterable[Item]) -> Iterator[Result]:
    """Give the items to the workers in turn, each in a thread of its own; their results are in the order of the items.

    At most two items for each worker are under way.
    """
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in workers]
        waiting: deque[Future[Result]] = deque()
        for worker, thread, item in zip(cycle(workers), cycle(threads), items, strict=False):
            waiting.append(thread.submit(worker, item))
            if len(waiting) == 2 * len(workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
