"""Every process gets a GPU of its own, however it was started; CUDA's functions are stand-ins."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.errors import UserError
from hf_gpipe.job.world import World
from hf_gpipe.runtime.device_choice import DeviceChoice, _assign, _DeviceRequest, world_for
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo


def _see(gpus: list[str]) -> list[torch.device]:
    """Let this process see these GPUs; the result has the devices that it then makes its own."""
    chosen: list[torch.device] = []
    torch.cuda.is_available = lambda: bool(gpus)
    torch.cuda.device_count = lambda: len(gpus)
    torch.cuda.get_device_properties = lambda number: SimpleNamespace(uuid=gpus[number])
    torch.cuda.set_device = chosen.append
    torch.cuda.mem_get_info = lambda device: (1 << 30, 1 << 30)
    torch.cuda.memory_reserved = lambda device: 0
    torch.cuda.get_device_name = lambda device: "a GPU"
    return chosen


def _choose(gpus: list[list[str]], hosts: list[str], choice: list[DeviceChoice]) -> Any:
    for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(variable, None)
    rank = dist.get_rank()
    chosen = _see(gpus[rank])
    socket.gethostname = lambda: hosts[rank]
    try:
        world = world_for(PipelineConfig(num_stages=4), choice[rank])
    except UserError as error:
        return str(error)
    assert chosen == [world.device]
    world = Mesh.of(world, Placement.spread(4, world.num_processes))
    return [str(one) for one in world.stage_devices.values()]


#: What `_see` replaces.
REPLACED = (
    *("is_available", "device_count", "get_device_properties"),
    *("set_device", "mem_get_info", "memory_reserved", "get_device_name"),
)
ALL = ["GPU-a", "GPU-b"]


def test_processes_share_a_gpu_where_nccl_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL 2.30 can: an error for every value of its variable but 1 kept one card from showing that NCCL works."""
    wishes, hosts = [_wish(gpus=("GPU-a",))] * 2, ["n", "n"]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    with pytest.raises(UserError, match=r"^processes 0 and 1 would share one GPU"):
        _assign(wishes, hosts)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _assign(wishes, hosts) == [["cuda:0"], ["cuda:0"]]


@pytest.mark.parametrize(
    ("gpus", "hosts", "choice", "expected"),
    [
        # As srun starts them: no LOCAL_RANK, and every process sees all.
        ([ALL, ALL], ["n", "n"], [None, None], [["cuda:0"] * 2, ["cuda:1"] * 2]),
        ([ALL, ALL], ["n", "m"], ["cuda", "auto"], [["cuda:0"] * 2] * 2),
        # CUDA_VISIBLE_DEVICES of each process.
        ([["GPU-a"], ["GPU-b"]], ["n", "n"], ["cuda:0", None], [["cuda:0"] * 2] * 2),
        ([ALL[::-1], ["GPU-a"]], ["n", "n"], [None, None], [["cuda:0"] * 2] * 2),
        ([[*ALL, "GPU-c", "GPU-d"]] * 2, ["n", "n"], [["cuda:3", "cuda:2", "cuda:1", "cuda:0"]] * 2,
         [["cuda:3", "cuda:2"], ["cuda:1", "cuda:0"]]),
    ],
)  # fmt: skip
def test_each_process_has_its_own(
    gpus: list[list[str]], hosts: list[str], choice: list[DeviceChoice], expected: list[list[str]]
) -> None:
    assert run_gloo(_choose, 2, gpus, hosts, choice) == expected


def _wish(names: tuple[str, ...] = ("cuda",), gpus: tuple[str, ...] = ("GPU-a",)) -> _DeviceRequest:
    return _DeviceRequest(names, len(names) > 1, gpus)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ([_wish(), _wish()], "processes 0 and 1 would share one GPU: cuda:0 of process 1 on host n .GPU-a., where it "
         "sees 1; set CUDA_VISIBLE_DEVICES for each process, start fewer processes .*, or use device: cpu"),
        ([_wish(names=("cuda:0",)), _wish(names=("cuda:1",), gpus=("GPU-b", "GPU-a"))], "cuda:1 of process 1"),
        ([_wish(names=("cpu", "cuda:0")), _wish(names=("cpu", "cuda:0"))], "on different kinds|on one kind of device"),
        ([_wish(names=("cpu",)), _wish()], "process 0 on cpu and process 1 on cuda: the processes of a pipeline"),
        ([_wish(names=("cuda:0", "cuda:0", "cuda:0"))] * 2, "3 cannot be shared out evenly between the 2 processes"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(wishes: list[_DeviceRequest], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _assign(wishes, ["n", "n"])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_processes_of_several_hosts_never_share(hosts: list[int]) -> None:
    """In any order of ranks over the hosts."""
    gpus = tuple(f"GPU-{number}" for number in range(6))
    names = _assign([_wish(gpus=gpus)] * len(hosts), list(map(str, hosts)))
    found = [(host, *own) for host, own in zip(hosts, names, strict=True)]
    assert len(set(found)) == len(hosts)
    assert max(int(own[0][5:]) for own in names) == max(map(hosts.count, hosts)) - 1


def _one_sees_none() -> str:
    _see([] if dist.get_rank() else ["GPU-a"])
    with pytest.raises(UserError) as error:
        world_for(PipelineConfig(num_stages=2, device="cuda"))
    return str(error.value)


def test_an_error_of_one_process_is_raised_in_all() -> None:
    found = run_gloo(_one_sees_none, 2)
    assert found == ["device 'cuda' was asked for and torch finds no CUDA device; use device: cpu"] * 2


def test_only_the_devices_of_the_configuration_are_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process asks before the model is made: the current device gets a context, which takes memory."""
    for name in REPLACED:
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    chosen = _see([*ALL, "GPU-c"])
    world = world_for(PipelineConfig(num_stages=2, devices=("cuda:2", "cuda:1")))
    assert list(map(str, world.devices)) == ["cuda:2", "cuda:1"]
    assert chosen == [torch.device("cuda:2")]


@pytest.mark.parametrize(("device", "message"), [("cuda:2", "torch finds 2 CUDA devices"), ("cudda", "is not one of")])
def test_a_device_that_does_not_exist(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in REPLACED:
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    _see(ALL)
    with pytest.raises(UserError, match=message):
        world_for(PipelineConfig(), device)


def test_a_number_of_processes_that_does_not_fit() -> None:
    with pytest.raises(UserError, match="num_processes is 2 and 1 are running"):
        world_for(PipelineConfig(num_stages=2, num_processes=2))
    three = World.current().on(["cpu"] * 3)
    with pytest.raises(UserError, match="process 0 has 3 devices for 2 stages: cpu, cpu, cpu"):
        Mesh.of(three, Placement.spread(2, 1))


def test_the_ranks_of_a_worker_have_a_device_each() -> None:
    two, stages = World.current().on(["cpu"] * 2), Placement.spread(2, 1)
    with pytest.raises(UserError, match=r"tensor_parallel is 2 and a process has several devices \(cpu, cpu\); give"):
        Mesh.of(two, Placement(stages.workers, ranks_per_worker=2))
