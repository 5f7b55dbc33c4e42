"""The order that the channels' events give, judged by torch.cuda's sanitizer; and mutants, each of which it finds."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe.runtime import channel
from tests.emulated_cuda.happens_before import checking
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import on_emulated_cuda

SOURCE, TARGET = torch.device("cuda:0"), torch.device("cuda:1")


def problems_of_device_channel() -> list[str]:
    with checking() as (checker, _):
        between = channel.DeviceChannel(SOURCE, TARGET)
        for micro_batch in range(3):
            hidden = torch.ones(4, 4, device=SOURCE) + micro_batch
            between.send(micro_batch, {"hidden": hidden}, {"hidden": (4, 4)})
            del hidden
            received = between.receive(micro_batch)
            result = received["hidden"] * 2
            del received
            assert result.sum().item() == 32 * (micro_batch + 1)
    return checker.problems


@on_emulated_cuda()
def test_between_two_devices() -> None:
    assert not problems_of_device_channel()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("stream.wait_event(arrived)", "aten.mul.Tensor is not ordered after aten._to_copy"),
        (
            "leaving.wait_stream(torch.cuda.current_stream(self._source))",
            "_to_copy.default is not ordered after aten.add",
        ),
        ("tensor.record_stream(leaving)", "memory is freed while aten._to_copy.default may still use it"),
        ("copy.record_stream(stream)", "memory is freed while aten.mul.Tensor may still use it"),
    ],
)
@on_emulated_cuda()
def test_a_line_less_between_two_devices(line: str, problem: str) -> None:
    mutate(channel.DeviceChannel, line, "pass")
    found = problems_of_device_channel()
    assert any(problem in one for one in found), found


def problems_of_remote_channel(*, ends_early: bool) -> list[str]:
    """Args: ends_early: whether the sends have ended when the next begins, else only when they are waited for."""
    with checking() as (checker, messages):
        ends = [channel.RemoteChannel(1, 0, None, device, lambda _: torch.float32) for device in (SOURCE, TARGET)]  # type: ignore[arg-type]
        for micro_batch in range(3):
            hidden = torch.ones(4, 4, device=SOURCE) + micro_batch
            ends[0].send(micro_batch, {"hidden": hidden}, {"hidden": (4, 4)})
            del hidden
            ends[1].expect(micro_batch, {"hidden": (4, 4)})
            received = ends[1].receive(micro_batch)
            result = received["hidden"] * 2
            del received
            assert result.sum().item() == 32 * (micro_batch + 1)
            for work in messages.works:
                work.has_ended = ends_early
        if not ends_early:
            ends[0].flush()
        ends[0].send(3, {"hidden": torch.ones(1, device=SOURCE)}, {"hidden": (1,)})
        for work in messages.works:
            work.has_ended = True
        del work
        ends[0].send(4, {"hidden": torch.ones(1, device=SOURCE)}, {"hidden": (1,)})
        found = list(checker.problems)
    return found


@on_emulated_cuda()
def test_between_two_processes() -> None:
    assert not problems_of_remote_channel(ends_early=True)


@on_emulated_cuda()
def test_between_two_processes_with_a_flush() -> None:
    assert not problems_of_remote_channel(ends_early=False)


@pytest.mark.parametrize(
    ("line", "replacement", "problem"),
    [
        ("            work.wait()\n", "            pass\n", "aten.mul.Tensor is not ordered after irecv"),
        ("self._sent.append((work, tensor))", "self._sent.append((work, work))", "freed while isend may still use it"),
    ],
)
@on_emulated_cuda()
def test_a_line_less_between_two_processes(line: str, replacement: str, problem: str) -> None:
    mutate(channel.RemoteChannel, line, replacement)
    found = problems_of_remote_channel(ends_early=True)
    assert any(problem in one for one in found), found
