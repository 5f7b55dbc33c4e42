"""The order that the channels' events give, judged by torch.cuda's sanitizer; and mutants, each of which it finds."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.runtime import channel, edges
from tests.emulated_cuda.happens_before import checking
from tests.emulated_cuda.mutants import mutate
from tests.emulated_cuda.processes import on_emulated_cuda
from tests.oracle import padded_batch, plain_model, tiny_config

SOURCE, TARGET = torch.device("cuda:0"), torch.device("cuda:1")


def problems_of_device_channel(*, is_strided: bool = False) -> list[str]:
    """Args: is_strided: whether tensors have gaps and swapped strides, and are sent without peer access."""
    with checking(has_peer_access=not is_strided) as (checker, _):
        between = channel.DeviceChannel(SOURCE, TARGET)
        for micro_batch in range(3):
            hidden = torch.ones(4, 8 if is_strided else 4, device=SOURCE) + micro_batch
            hidden = hidden[:, ::2].t() if is_strided else hidden
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


@on_emulated_cuda()
def test_strided_tensors_between_two_devices_without_peer_access() -> None:
    assert not problems_of_device_channel(is_strided=True)


@pytest.mark.parametrize(
    ("line", "replacement", "problem"),
    [
        ("arriving.record_event()", "leaving.record_event()", "aten.mul.Tensor is not ordered after aten._to_copy"),
        (
            "leaving, arriving = self._streams",
            "arriving, leaving = self._streams",
            "to contiguous memory is not ordered after aten.add",
        ),
        (
            "leaving.wait_stream(",
            "arriving.wait_stream(",
            "to contiguous memory is not ordered after aten.add",
        ),
    ],
)
@on_emulated_cuda()
def test_a_line_less_right_without_peer_access(line: str, replacement: str, problem: str) -> None:
    mutate(channel.DeviceChannel, line, replacement)
    found = problems_of_device_channel(is_strided=True)
    assert any(problem in one for one in found), found


@on_emulated_cuda()
def test_no_device_waits_for_a_copy_before_it_is_used() -> None:
    """Neither the sender's nor the receiver's, so that both compute meanwhile."""
    with checking() as (checker, _):
        between = edges._within(SOURCE, TARGET)
        hidden = torch.ones(4, 4, device=SOURCE)
        between.send(0, {"hidden": hidden}, {"hidden": (4, 4)})
        assert not checker.is_behind(SOURCE, "_to_copy")
        assert not checker.is_behind(TARGET, "_to_copy")
        received = between.receive(0)["hidden"]
        assert checker.is_behind(TARGET, "_to_copy")
        assert received.sum().item() == 16
    assert not checker.problems


@on_emulated_cuda()
def test_steps_on_three_devices() -> None:
    """With copies of a tied weight on two of them."""
    config = tiny_config("llama", tied=True)
    found: list[str] = []
    for schedule, recompute in (("1f1b", "stage"), ("gpipe", "none")):
        with checking() as (checker, _):
            pipe = Pipeline(plain_model(config), 3, 4, schedule, recompute, device=["cuda:0", "cuda:1", "cuda:2"])
            optimizer = torch.optim.AdamW(pipe.parameters())
            for _ in range(2):
                pipe.train_step(padded_batch(config), update=lambda loss, norm: optimizer.step())  # noqa: B023
                pipe.zero_grad()
            found += checker.problems
    assert not found, found


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
        ("message.append((work, joined))", "message.append((work, work))", "freed while isend may still use it"),
    ],
)
@on_emulated_cuda()
def test_a_line_less_between_two_processes(line: str, replacement: str, problem: str) -> None:
    mutate(channel.RemoteChannel, line, replacement)
    found = problems_of_remote_channel(ends_early=True)
    assert any(problem in one for one in found), found
