"""`boundary_dtype`: what crosses a boundary is rounded, on its way down and up, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from hf_gpipe.planner.traffic import traffic
from hf_gpipe.runtime.channel import RemoteChannel, narrowed
from tests.gloo import run_gloo
from tests.oracle import Result, assert_same, gathered_gradients, padded_batch, plain_model, run_plain, tiny_config
from tests.planner.models import blocks, planner, settings

CONFIG = tiny_config("llama")
#: Embedding and a block; two blocks; norm and head.
PARTITION = [2, 2, 2]


class Rounding(torch.autograd.Function):
    """Rounds a tensor, and its gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.bfloat16().to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].bfloat16().to(gradients[0].dtype)


def rounded_plain() -> Result:
    plain = plain_model(CONFIG)
    for module in (plain.model.layers[1], plain.model.norm):
        module.register_forward_pre_hook(lambda _, args: (Rounding.apply(args[0]), *args[1:]))
    return run_plain(plain, padded_batch(CONFIG), 4)


def rounded_pipeline(recompute: str, **values: Any) -> tuple[Result, float]:
    pipe = Pipeline(plain_model(CONFIG), 3, 4, "1f1b", recompute, PARTITION, boundary_dtype="bfloat16", **values)
    batch = padded_batch(CONFIG)
    loss = float(pipe.train_step(batch))
    return Result(loss, gathered_gradients(pipe)), pipe.eval_step(batch).loss


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_boundaries_are_rounded_and_nothing_else(recompute: str) -> None:
    expected = rounded_plain()
    found, evaluated = rounded_pipeline(recompute)
    assert_same(found, expected)
    assert evaluated == pytest.approx(found.loss, rel=1e-10)
    assert abs(expected.loss - run_plain(plain_model(CONFIG), padded_batch(CONFIG), 4).loss) > 1e-6


def _in_processes() -> tuple[Result, set[torch.dtype]]:
    sent = set()
    send = RemoteChannel._send

    def noted(self: RemoteChannel, micro_batch: int, tensors: Any, names: Any) -> None:
        sent.update(tensor.dtype for tensor in tensors.values())
        send(self, micro_batch, tensors, names)

    RemoteChannel._send = noted  # type: ignore[method-assign]
    return rounded_pipeline("none", replicas=(1, 2, 1))[0], sent


def test_processes_send_the_narrow_type_and_compute_the_same() -> None:
    expected = rounded_plain()
    for found, sent in run_gloo(_in_processes, 4):
        assert_same(found, expected)
        assert sent == {torch.bfloat16}


def test_only_wider_floating_point_numbers_are_narrowed() -> None:
    types = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool
    assert [narrowed(one, torch.bfloat16) for one in types] == [torch.bfloat16] * 3 + list(types[3:])
    assert [narrowed(one, None) for one in types] == list(types)


def test_a_type_that_is_not_narrower_is_refused() -> None:
    with pytest.raises(UserError, match="boundary_dtype is bfloat16 and the model's type is bfloat16, which is not wi"):
        Pipeline(CONFIG, 2, dtype="bfloat16", boundary_dtype="bfloat16")
    with pytest.raises(UserError, match="boundary_dtype: found 'int8'"):
        Pipeline(CONFIG, 2, boundary_dtype="int8")


def test_the_planner_prices_what_is_sent() -> None:
    made = planner(blocks(4))
    plain, narrow = (made.plan(settings((2, 2), num_processes=2, boundary_dtype=dtype)) for dtype in (None, "bfloat16"))
    assert traffic(narrow).boundaries == traffic(plain).boundaries / 2 > 0
    assert narrow.timeline.total_seconds < plain.timeline.total_seconds
    assert narrow.processes[1].memory == plain.processes[1].memory
