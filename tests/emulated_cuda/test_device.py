"""The emulated device itself: values, refusals and counts as on CUDA."""

from __future__ import annotations

import pytest
import torch

from tests.emulated_cuda.device import counting
from tests.emulated_cuda.processes import EmulatedError, on_emulated_cuda, run_emulated


@on_emulated_cuda()
def test_values_and_gradients_are_the_cpu_s() -> None:
    results = []
    for device in ("cpu", "cuda:3"):
        torch.manual_seed(0)
        x = torch.randn(5, 4, dtype=torch.float64, device=device, requires_grad=True)
        y = torch.nn.functional.dropout(x @ x.T, 0.5).softmax(-1)
        y.square().sum().backward()
        assert x.grad is not None
        assert y.device == x.grad.device == torch.device(device)
        view = x.detach()[1:, ::2]
        view.mul_(2)
        results.append([t.detach().cpu() for t in (x, y, x.grad)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@on_emulated_cuda()
def test_each_device_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.cuda.manual_seed_all(0)
    assert torch.equal(torch.rand(3, device="cuda:1").cpu(), first)
    torch.rand(3)
    assert torch.equal(torch.rand(3, device="cuda:2").cpu(), first)
    generator = torch.cuda.default_generators[2]
    state = generator.get_state()
    second = torch.rand(3, device="cuda:2")
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="cuda:2"), second)


@on_emulated_cuda()
def test_devices_are_not_mixed() -> None:
    zero, one, cpu = (torch.ones(2, 2, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    for mix in (
        lambda: zero + cpu,
        lambda: cpu + zero,
        lambda: zero @ one,
        lambda: torch.cat([zero, cpu]),
        lambda: zero.add_(one),
        lambda: zero + one.sum(),
        lambda: zero.index_select(0, torch.tensor([1])),
        lambda: cpu[zero.long()],
        lambda: torch.nn.functional.embedding(torch.tensor([1]), zero),
        lambda: torch.where(zero > 0, cpu, zero),
        lambda: torch._foreach_add_([zero], [one]),
    ):
        with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device|indices should be"):
            mix()
    assert torch.equal((zero * torch.tensor(2.0)).cpu(), 2 * cpu), "a number of the CPU is allowed, as by CUDA"
    assert torch.equal((zero.long() // 1).cpu(), cpu.long()), "so is a number of Python"
    assert torch.equal(zero[torch.tensor([1])].cpu(), cpu[:1]), "so are indices of the CPU"
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:8")


@on_emulated_cuda()
def test_waiting_for_the_device_is_counted_and_located() -> None:
    x = torch.arange(4.0, device="cuda:0")
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(4).is_pinned()
    for call, synchronisations, copies in (
        (lambda: x * 2 + 1, 0, 0),
        (lambda: x.sum().item(), 1, 0),
        (lambda: bool(x.any()), 1, 0),
        (lambda: torch.nonzero(x), 1, 0),
        (lambda: x.cpu(), 1, 1),
        (lambda: x.to("cpu", non_blocking=True), 0, 0),  # torch pins the target itself
        (lambda: torch.empty(4).copy_(x, non_blocking=True), 1, 1),
        (lambda: x.to("cuda:1"), 0, 0),
        (lambda: torch.ones(2).to("cuda:0"), 1, 1),
        (lambda: torch.ones(2).to("cuda:0", non_blocking=True), 0, 1),
        (lambda: pinned.to("cuda:0"), 1, 0),
        (lambda: pinned[1:].to("cuda:0", non_blocking=True), 0, 0),
        (lambda: x[torch.tensor([1])], 1, 1),
        (lambda: x[x > 1], 1, 0),
        (lambda: x.index_put_((x > 1,), x[0]), 1, 0),
        (lambda: x.masked_fill(x > 1, 0.0), 0, 0),
        (lambda: torch.cuda.synchronize("cuda:0"), 1, 0),
        (lambda: torch.cuda.current_stream().synchronize(), 1, 0),
    ):
        with counting() as counts:
            call()
        assert (len(counts.synchronisations), len(counts.pageable_copies)) == (synchronisations, copies), str(counts)
        assert all(__file__ in str(place) for place in counts.synchronisations)
    with counting() as counts:
        y = (x.requires_grad_() * 2).sum()
        y.register_hook(lambda gradient: gradient.item() * gradient)
        y.backward()
    (place,) = counts.synchronisations
    assert "backward" in place.stack[-1].name or any("backward" in frame.name for frame in place.stack), str(place)


@on_emulated_cuda()
def test_streams_events_and_memory() -> None:
    stream = torch.cuda.Stream("cuda:1")
    assert torch.cuda.current_stream("cuda:1") != stream
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream("cuda:1") == stream
        assert torch.cuda.current_device() == 1
        before = torch.cuda.memory_allocated()
        x = torch.ones(1000, device="cuda")
        assert torch.cuda.memory_allocated() == before + 4000
    assert torch.cuda.current_device() == 0
    stream.wait_stream(torch.cuda.current_stream("cuda:0"))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    x.record_stream(stream)
    end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    torch.cuda.current_stream().synchronize()  # which has waited for it
    assert begin.elapsed_time(end) >= 0
    torch.cuda.reset_peak_memory_stats(1)
    y = x[:10] + 1
    del x, y
    assert torch.cuda.memory_allocated(1) == before
    assert torch.cuda.max_memory_allocated(1) == before + 4040


@on_emulated_cuda()
def test_a_copy_to_pinned_memory_is_there_when_the_host_has_waited() -> None:
    def wait_by_event(device: str) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()

    def wait_by_another_stream(device: str) -> None:
        other = torch.cuda.Stream(device)
        other.wait_stream(torch.cuda.current_stream(device))
        other.synchronize()

    x = torch.arange(6.0, device="cuda:1").view(2, 3)
    for wait in (
        torch.cuda.synchronize,
        lambda device: torch.cuda.current_stream(device).synchronize(),
        wait_by_event,
        wait_by_another_stream,
        lambda device: torch.ones(1, device=device).item(),
        lambda device: torch.ones(1, device=device).cpu(),
    ):
        copies = [one.to("cpu", non_blocking=True) for one in (x, x.t(), x[:, 1:], x.int(), x > 2)]
        into = torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True)
        torch.cuda.Stream("cuda:1").synchronize()
        wait("cuda:0")
        assert into.isnan().all()
        assert copies[0].isnan().all()
        wait("cuda:1")
        values = torch.arange(6.0).view(2, 3)
        for found, expected in zip(copies, (values, values.t(), values[:, 1:], values.int(), values > 2), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(into, values)


@on_emulated_cuda()
def test_pinned_memory_may_not_change_before_its_copy_has_ended() -> None:
    pinned = torch.ones(4).pin_memory()
    copy = pinned.to("cuda:0", non_blocking=True)
    torch.cuda.synchronize("cuda:0")
    pinned += 1
    assert copy.tolist() == [1.0] * 4
    pinned.to("cuda:0", non_blocking=True)
    pinned += 1
    with pytest.raises(RuntimeError, match="pinned memory was written before its copy to cuda:0 had ended"):
        torch.cuda.synchronize("cuda:0")


@on_emulated_cuda()
def test_a_strided_copy_goes_through_memory_that_is_not_pinned() -> None:
    pinned, x = torch.ones(4, 4).pin_memory(), torch.ones(4, 4, device="cuda:0")
    for call, is_pageable in (
        (lambda: pinned.t().to("cuda:0", non_blocking=True), False),
        (lambda: pinned[:, 1:].to("cuda:0", non_blocking=True), True),
        (lambda: pinned[1:].to("cuda:0", torch.bfloat16, non_blocking=True), False),
        (lambda: x[:, 1:].to("cpu", non_blocking=True), False),
        (lambda: pinned[:, 1:].copy_(x[:, 1:].contiguous(), non_blocking=True), True),
    ):
        with counting() as counts:
            call()
        assert bool(counts.pageable_copies) == is_pageable, str(counts)


@on_emulated_cuda()
def test_events_of_two_devices_have_no_time_between_them() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream("cuda:0"))
    end.record(torch.cuda.current_stream("cuda:1"))
    for one in (begin, end):
        one.synchronize()
    with pytest.raises(RuntimeError, match="invalid resource handle"):
        begin.elapsed_time(end)


def test_a_failure_is_brought_back() -> None:
    with pytest.raises(EmulatedError, match="ValueError: no such thing"):
        run_emulated(fail, 1)
    with pytest.raises(EmulatedError, match=r"processes \[0\] had not ended after 0.[5-9] s"):
        run_emulated(hang, 1, timeout=0.5)
    assert run_emulated(answer, 1, 41) == [42]


def fail() -> None:
    raise ValueError("no such thing")


def hang() -> None:
    torch.cuda.Event().wait()
    while True:
        pass


def answer(value: int) -> int:
    return int(torch.tensor(value, device="cuda:0") + 1)
