"""What CUDA graphs need of an action: the same operations with the same numbers for each micro-batch of a shape.

A graph replays the operations that were captured, on the same memory. So a number that the host gives to an operation
must not change, and each gradient must be added to memory that stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hf_gpipe import Pipeline
from hf_gpipe.runtime.stage import Stage
from tests.oracle import padded_batch, tiny_config

#: The operations of an action: the name of each, and its arguments with tensors as their shapes, types and strides.
Operations = list[tuple[str, Any]]


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: Operations = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append((str(function), tree_map(_described, (args, kwargs or {}))))
        return function(*args, **(kwargs or {}))


def _described(value: Any) -> Any:
    return (value.shape, value.dtype, value.stride()) if isinstance(value, torch.Tensor) else value


def _without_numbers(operations: Operations) -> Operations:
    return tree_map(lambda one: None if isinstance(one, int | float) else one, operations)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_actions_can_be_replayed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F and R as they are; B once its gradients stay, but for the number of targets on the last stage."""
    noted: dict[tuple[str, bool], list[Operations]] = defaultdict(list)

    def note(kind: str) -> None:
        action: Callable[..., Any] = getattr(Stage, kind)

        def noting(self: Stage, *args: Any, **options: Any) -> Any:
            with _Noting() as noting:
                result = action(self, *args, **options)
            noted[kind, self.model.is_last].append(noting.operations)
            return result

        monkeypatch.setattr(Stage, kind, noting)

    for kind in ("forward", "recompute", "backward"):
        note(kind)
    pipe = Pipeline(tiny_config(family), 2, 2, "gpipe", "stage", device="cpu")
    batch = {name: rows[:1].repeat(4, 1) for name, rows in padded_batch(pipe.adapter.config).items()}
    pipe.train_step(batch)
    noted.clear()
    for ignored in (1, 3):
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        labels = batch["labels"].clone()
        labels[:, 1 : 1 + ignored] = -100  # in the middle, so that no column is cut off
        pipe.train_step({**batch, "labels": labels})
    assert {kind for kind, _ in noted} == {"forward", "recompute", "backward"}
    for (kind, is_last), times in noted.items():
        assert len(times) == 4
        if is_last and kind == "backward":
            assert times[0] == times[1] != times[2] == times[3]
            times = [_without_numbers(one) for one in times]
        assert all(one == times[0] for one in times), (kind, is_last)
