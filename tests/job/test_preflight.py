"""What is wrong with a job's machines is found before anything is made, and told once with their names."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import LlamaConfig

from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.job import _check_same_data
from hf_gpipe.job import facts as facts_module
from hf_gpipe.job import network
from hf_gpipe.job.facts import DeviceFacts, RankFacts, complaints, unreached
from hf_gpipe.job.network import check_main_address
from hf_gpipe.job.world import MeasuredLink, World
from hf_gpipe.partition.cluster import Level
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.planner.decide import memory_problems
from hf_gpipe.planner.machines import links
from hf_gpipe.planner.machines.links import cluster_of, pairs_to_measure
from hf_gpipe.recipe import parse_recipe
from hf_gpipe.schedule import Placement
from hf_gpipe.settings.mode import AUTO
from tests.gloo import run_gloo

GIB = 1 << 30


def facts(host: str, **values: Any) -> RankFacts:
    common = {
        "boot": host,
        "pid": 1,
        "versions": {"torch": "2.13"},
        "address": "10.0.0.1",
    }
    return RankFacts(**{"host": host, **common, **values})


@pytest.mark.parametrize(
    ("everyone", "told"),
    [
        ([facts("n", address=""), facts("n", address="")], []),
        ([facts("n"), facts("m")], []),
        ([facts("n"), facts("m", versions={"torch": "2.11"}), facts("m", versions={"torch": "2.11"})],
         ["torch is 2.13 on n (process 0), 2.11 on m (processes 1, 2)", "install the same on all machines"]),
        ([facts("n"), facts("m", address="127.0.1.1", interfaces=["eth0", "ib0"])],
         ["machine m: its name resolves to 127.0.1.1, where no other machine reaches gloo; set "
          "GLOO_SOCKET_IFNAME=eth0 or GLOO_SOCKET_IFNAME=ib0 there (with GPUs also NCCL_SOCKET_IFNAME), or correct its "
          "/etc/hosts"]),
        ([facts("n"), facts("m", address="", problem="GLOO_SOCKET_IFNAME is 'x'")],
         ["machine m: GLOO_SOCKET_IFNAME is 'x'"]),
        ([facts("n"), facts("n", boot="other")],
         ["2 machines have the name n; give each its own (hostnamectl set-hostname NAME)"]),
    ],
)  # fmt: skip
def test_each_thing_that_is_wrong_is_named(everyone: list[RankFacts], told: list[str]) -> None:
    assert complaints(everyone) == told


def test_a_machine_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        there = facts("m", address="127.0.0.1", interface="eth1", port=door.getsockname()[1])
        here = facts("n", address="127.0.0.1")
        assert unreached(here, [here, there]) == []
    (problem,) = unreached(here, [here, there])
    assert "machine n, at 127.0.0.1, cannot reach machine m at 127.0.0.1 (eth1): Connection refused; allow" in problem


@pytest.mark.parametrize(
    ("address", "rank", "message"),
    [
        ("127.0.0.1", 1, None),
        (
            "127.0.1.1",
            2,
            "on machine here the first machine's name '127.0.1.1' .* resolves to 127.0.1.1, which is here",
        ),
        ("no.such.name.invalid", 2, "machine here finds no address for 'no.such.name.invalid'"),
        ("10.1.2.3", 2, None),
    ],
)
def test_the_main_process_is_not_looked_for_in_vain(
    address: str, rank: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_LISTENS_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for name, value in {
        "MASTER_ADDR": address,
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    if message is None:
        check_main_address(rank)
    else:
        with pytest.raises(UserError, match=message):
            check_main_address(rank)


def test_one_machine_may_stand_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several agents of torchrun on one machine, whose main process listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", port)
        check_main_address(1)


def test_gloo_listens_where_its_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert network.gloo_address({"lo": "127.0.0.1", "ib0": "10.9.9.9"}) == "10.9.9.9"
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME is 'ib0'; the interfaces with an address are lo, eth0"):
        network.gloo_address({"lo": "127.0.0.1", "eth0": "10.9.9.9"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib0")
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME is 'lo,ib0'; the interfaces with an address are lo: name"):
        network.gloo_address({"lo": "127.0.0.1"})


def test_an_interface_with_an_address_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLOO_SOCKET_IFNAME=eth0 was an error on a network without IPv4, though gloo listens there."""
    entry = lambda family, address: SimpleNamespace(family=family, address=address)  # noqa: E731  it is short
    six, four = socket.AF_INET6, socket.AF_INET
    found = {
        "lo": [entry(socket.AF_PACKET, "00:00"), entry(six, "::1"), entry(four, "127.0.0.1")],
        "eth0": [entry(six, "fd00::2"), entry(six, "fe80::1%eth0")],
        "ib0": [entry(six, "fe80::2%ib0")],
        "wlan0": [entry(socket.AF_PACKET, "00:01")],
    }
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)
    assert network.addresses() == {"lo": "127.0.0.1", "eth0": "fd00::2", "ib0": "fe80::2%ib0"}
    for name, address in (("eth0", "fd00::2"), ("ib0", "fe80::2%ib0")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        mine = RankFacts.current(is_alone=False)
        assert (mine.address, mine.interface, mine.problem) == (address, name, "")
        assert mine.interfaces == ("eth0", "ib0")
        assert not complaints([mine, replace(mine, host="another", boot="other")])
    assert network.seen_from("fe80::9%enp3s0", "ib0") == "fe80::9%ib0"
    assert network.seen_from("fd00::9", "ib0") == "fd00::9"


def test_machines_reach_each_other_by_ipv6() -> None:
    """An address of IPv6 is bound and reached like another."""
    try:
        door = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with door:
        mine = replace(RankFacts.current(), address="::1", interface="lo")
        other = replace(mine, host="another", port=door.getsockname()[1])
        assert not unreached(mine, [mine, other])


def test_memory_is_counted_per_machine_on_the_cpu_and_per_process_on_gpus() -> None:
    hosts, peaks = ["n", "n", "m"], [2 * GIB, 3 * GIB, 4 * GIB]

    def ranks(kind: str, *free: list[int]) -> list[RankFacts]:
        devices = [tuple(DeviceFacts(kind, one * GIB, 8 * GIB) for one in own) for own in free]
        return [facts(host, devices=own) for host, own in zip(hosts, devices, strict=True)]

    assert memory_problems(ranks("cpu", [5], [5], [4]), peaks) == []
    (found,) = memory_problems(ranks("cpu", [5], [4], [4]), peaks)
    assert "machine n: its processes (0, 1) need 5 GiB by the plan and 4 GiB are free" in found.replace(".0", "")
    assert memory_problems(ranks("cuda:0", [1, 1], [3], [4]), peaks) == []
    (found,) = memory_problems(ranks("cuda:0", [2], [3], [3]), peaks)
    assert found.startswith("machine m: process 2 needs 4")


def test_machines_are_levels_of_a_cluster() -> None:
    fast = Level(2, 1e10, 1e-6)
    assert cluster_of(World(0, (facts("n"),) * 2), fast) is None

    def cluster(*hosts: str) -> list[tuple[int, float, float]]:
        world = World(0, tuple(map(facts, hosts)))
        for number, host in enumerate(hosts[1:], 1):
            ends = frozenset((hosts[0], host))
            world.links[ends] = MeasuredLink((hosts[0], host), (0, number), 1e9 / number, number / 1e4)
        made = cluster_of(world, fast)
        assert made is not None
        return [(level.parts, level.bytes_per_second, level.latency_seconds) for level in made.levels]

    assert cluster("n", "m") == [(1, 1e10, 1e-6), (2, 1e9, 1 / 1e4)]
    assert cluster("n", "n", "m", "m") == [(2, 1e10, 1e-6), (2, 1e9 / 3, 3 / 1e4)], "the slowest, between machines"
    assert cluster("n", "n", "m") == [(3, 5e8, 2 / 1e4)], "machines of unlike size"
    assert cluster("n", "m", "n", "m") == [(4, 1e9 / 3, 3 / 1e4)], "their processes take turns"


def test_one_pair_of_processes_measures_each_link_of_the_plan() -> None:
    two_pipelines = Placement([[0, 2], [1, 3]])
    assert pairs_to_measure(two_pipelines, ["n", "n", "m", "m"]) == [(0, 2)], "the reduction over replicas"
    assert pairs_to_measure(two_pipelines, ["n", "m", "n", "m"]) == [(0, 1)], "the boundary"
    assert pairs_to_measure(Placement([[0], [1], [2]]), ["n", "m", "o"]) == [(0, 1), (1, 2)]
    assert pairs_to_measure(two_pipelines, ["n"] * 4) == [(0, 1)]


def _error(call: Any, *args: Any, **values: Any) -> str:
    try:
        call(*args, **values)
    except UserError as error:
        return str(error)
    return ""


def _on_two_machines(folder: Path) -> list[Any]:
    """Everything that two processes find which take each other for another machine's."""
    rank = dist.get_rank()
    host = "nm"[rank]
    socket.gethostname = lambda: host
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    facts_module.addresses = lambda: {"eth0": "10.0.0.1", "lo": "127.0.0.1"}
    facts_module.is_loopback = lambda address: address == "127.0.1.1"
    store, limit = distributed_c10d._get_default_store(), timedelta(seconds=30)

    def check(case: str, address: str) -> str:
        facts_module.gloo_address = lambda found: address
        return _error(facts_module.check, store, rank, 2, limit, case)

    found: list[Any] = [
        check("fine", "127.0.0.1"),
        check("name", "127.0.0.1" if rank else "127.0.1.1"),
    ]
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
    example = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.ones(2, 4, dtype=torch.int64)}
    found.append(Pipeline(config, 2, 2, example=example).links)
    facts_module.available_memory = lambda: 1000 if rank else 1 << 40
    found.append(_error(Pipeline, config, 2, 2, example=example))
    found.append(Pipeline(config, 2, 2, example=example, memory="1GiB").links != [])
    for rate in (1e12, 1e4):
        links._answer = lambda world, peer: None
        links._send_and_measure = lambda world, peer, rate=rate: (rate, 1e-9)
        pipe = Pipeline(config, AUTO, 2, AUTO, replicas=AUTO, example=example, memory="1GiB")
        cluster = pipe.decision.planning.planner(pipe.config).cluster
        assert cluster is not None
        found.append([pipe.config.num_stages, cluster.levels[-1].bytes_per_second, *pipe.links])
    (folder / host).mkdir()
    os.chdir(folder / host)
    Path("pairs.jsonl").write_text(f'{{"source": "{host}", "target": "b"}}\n')
    World.current().barrier()
    text = (
        "model: {{path: x}}\ndata: {{kind: jsonl, path: {}}}\ntraining: {{output_dir: o, max_steps: 1, batch_size: 1}}"
    )
    for path in ("pairs.jsonl", "../n/pairs.jsonl"):
        recipe = parse_recipe(text.format(path))
        found.append(_error(_check_same_data, recipe, World.current()))
    return found


def test_two_machines(tmp_path: Path) -> None:
    outcomes = run_gloo(_on_two_machines, 2, tmp_path)
    assert outcomes[0] == outcomes[1], "every process tells the same"
    fine, name, measured, memory, believes, near, far, other_data, same_data = outcomes[0]
    assert fine == ""
    assert name.startswith("machine n: its name resolves to 127.0.1.1,")
    assert len(measured) == 1
    assert measured[0].startswith("n - m, processes 0 and 1: ")
    assert "; the planner assumes " in measured[0]
    assert memory.startswith("machine m: its processes (1) need ")
    assert believes
    # The planner knows the link before it chooses: a pipeline sends less than replicas, which have no bubble.
    assert near[0] == 1
    assert far[:2] == [2, 1e4]
    assert "the planner assumes 10 kB/s" in far[2]
    assert other_data.startswith("data.path ")
    assert " on n, " in other_data
    assert same_data == ""
