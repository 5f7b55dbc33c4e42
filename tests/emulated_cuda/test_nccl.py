"""The stand-in for NCCL: its rules, each with what breaks it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.emulated_cuda.processes import EmulatedError, on_emulated_cuda, run_emulated


def here(value: float = 1.0) -> torch.Tensor:
    """A tensor on this process's device."""
    return torch.full((3,), value, device=f"cuda:{dist.get_rank()}")


@on_emulated_cuda(2)
def test_messages_and_collectives() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    torch.cuda.set_device(rank)
    total = here(rank + 1.0)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 3
    dist.broadcast(mine := here(float(rank)), src=1)
    assert mine.tolist() == [1.0] * 3
    work = dist.all_reduce(largest := here(float(rank)), op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    assert largest.tolist() == [1.0] * 3
    assert work.is_completed()
    dist.reduce(mine := here(rank + 1.0), dst=1)
    assert mine.tolist() == ([3.0] * 3 if rank == 1 else [1.0] * 3)
    both = [here(), here()]
    dist.all_gather(both, here(float(rank)))
    assert [one.tolist() for one in both] == [[0.0] * 3, [1.0] * 3]
    dist.barrier()
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=dist.new_group(backend="nccl"))
    assert objects == [{"rank": 0}, {"rank": 1}]
    if rank == 0:
        kept = [here(float(i)) for i in range(3)]
        works = [dist.isend(one, peer, tag=9 - i) for i, one in enumerate(kept)]
    else:
        kept = [here() for _ in range(3)]
        works = [dist.irecv(one, peer, tag=i) for i, one in enumerate(kept)]
    for work in works:
        assert work is not None
        work.wait()
    assert [one[0].item() for one in kept] == [0.0, 1.0, 2.0], "in order; tags are ignored"
    # Opposing messages in one batch do not wait for each other.
    out, into = here(float(rank)), here()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()
    assert into.tolist() == [float(peer)] * 3


@on_emulated_cuda(2)
def test_cpu_tensors_are_refused() -> None:
    group = dist.new_group(backend="nccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(ValueError, match="ensors must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="cuda:0")[:, ::2], group=group)


@on_emulated_cuda(2)
def test_a_result_is_there_once_it_was_waited_for() -> None:
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    on_host = dist.new_group(backend="gloo")
    for is_whole in (False, True):
        total, values = here(), here(float(rank))
        works = [dist.all_reduce(total, async_op=True), dist.broadcast(values, src=0, async_op=True)]
        sent, received = here(5.0), here()
        works.append(dist.isend(sent, peer) if rank == 0 else dist.irecv(received, peer))
        if rank == 0:
            works[-1].wait()
        dist.barrier(group=on_host)
        assert total.isnan().all()
        assert values.isnan().any() == (rank == 1), "the source keeps its own"
        if is_whole:
            torch.cuda.synchronize(rank)
        for work in works:
            work.wait()
        assert total.tolist() == [2.0] * 3
        assert values.tolist() == [0.0] * 3
        assert received.tolist() == [5.0 if rank == 1 else 1.0] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("opposing_sends", r"(?s)had not ended.* in opposing_sends\n.* in opposing_sends\n"),
        ("other_numbers_of_devices", r"(?s)had not ended.* in other_numbers_of_devices\n"),
        ("two_set_up_at_once", "is set up while a message may be under way on cuda:[01]; synchronize the device"),
        ("freed_before_it_was_sent", "the memory of a tensor was freed before its send had ended"),
    ],
)
def test_what_would_hang_or_break(name: str, expected: str) -> None:
    with pytest.raises(EmulatedError, match=expected):
        run_emulated(globals()[name], 2, timeout=8, stall=3)


def opposing_sends() -> None:
    """Each process sends first, on the communicator of the two: neither receive is reached."""
    peer = 1 - dist.get_rank()
    out, into = here(), here()
    sent = dist.isend(out, peer)
    received = dist.irecv(into, peer)
    assert sent is not None
    assert received is not None
    received.wait()


def other_numbers_of_devices() -> None:
    """A group numbers its communicators as devices come up; the second of process 0 finds none in process 1."""
    group = dist.new_group(backend="nccl")
    for device in (0, 1) if dist.get_rank() == 0 else (2, 2):
        dist.all_reduce(torch.ones(1, device=f"cuda:{device}"), group=group)


def two_set_up_at_once() -> None:
    """Right with a wait for the device between them, and wrong without."""
    rank = dist.get_rank()
    for wait in (lambda: torch.cuda.synchronize(rank), lambda: here().sum().item(), lambda: None):
        for _ in range(2):
            group = dist.new_group(backend="nccl")
            if rank == 0:
                dist.send(here(), 1, group=group)
            else:
                dist.recv(here(), 0, group=group)
            wait()


def freed_before_it_was_sent() -> None:
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        dist.send(here(), 1)  # the first message waits for the communicator
        work = dist.isend(here(), 1)
        dist.barrier(group=group)
        assert work is not None
        work.wait()
    else:
        dist.recv(here(), 0)
        dist.barrier(group=group)
        dist.recv(here(), 0)
